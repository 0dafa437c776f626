"""Operators of pipelines for tests, which other processes can import."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LongerThan:
    """Keeps longer texts."""

    least: int

    def __call__(self, sample) -> bool:
        return len(sample["text"]) > self.least
