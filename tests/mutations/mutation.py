"""A mistake in one place of the package."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One mistake.

    Attributes:
        path: the file in ``swift``.
        right: text that stands there once.
        wrong: what takes its place.
        tests: those that have to fail, as pytest takes them.
    """

    path: str
    right: str
    wrong: str
    tests: tuple[str, ...]
