"""A part of a prompt that the model writes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from swift.errors import SettingError, check_count
from swift.generate.sampling import Sampling


@dataclass(frozen=True)
class Gen:
    """A part of a prompt that the model writes.

    Attributes:
        name: name of the part, by which it is read.
        max_tokens: its tokens at most.
        sampling: choice of the tokens; parts and forks of a prompt have choices of their own.
        stop: texts at which it ends; they are not part of it.
        regex: regular expression that it matches as a whole, unless ``max_tokens`` cuts it short.
        choices: texts of which the likeliest is taken, by the sum of the log-probabilities of its tokens.

    Raises:
        SettingError: a value cannot be.
    """

    name: str
    max_tokens: int = 64
    sampling: Sampling = field(default_factory=Sampling)
    stop: str | Sequence[str] = ()
    regex: str | None = None
    choices: Sequence[str] | None = None

    def __post_init__(self) -> None:
        check_count("Gen.max_tokens", self.max_tokens, least=1)
        if not all(self.stops):
            raise SettingError("Gen.stop", self.stop, "must not be empty")
        if self.choices is not None:
            self._check_choices(self.choices)

    def _check_choices(self, choices: Sequence[str]) -> None:
        if isinstance(choices, str) or not choices or not all(choices):
            raise SettingError("Gen.choices", choices, "must be a list of texts, none of them empty")
        for name, value in (("regex", self.regex), ("stop", self.stop)):
            if value:
                raise SettingError(f"Gen.{name}", value, "must not be given beside choices")
        for choice in choices:
            if sum(other.startswith(choice) for other in choices) > 1:
                allowed = "must not be the beginning of another choice, which could never be likelier"
                raise SettingError("Gen.choices", choice, allowed)

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts at which it ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
