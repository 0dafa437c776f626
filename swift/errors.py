"""Errors that the command line prints as one line, their exit codes, and checks and limits of settings.

Several packages check these limits, and some of them do not import JAX.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, get_args, get_origin, get_type_hints

INTERRUPTED = 130
"""Exit code of a run stopped by Ctrl-C or SIGTERM, the same as a shell's for Ctrl-C."""
STOPPED = 3
"""Exit code of a run that cannot continue, or could not save what it should have."""
JOINING_NOTE = "swift: note: "
"""Prefix of a line on stderr that only matters if hosts cannot join."""

MOST_COUNT = 2**31 - 1
"""Largest count: compiled programs count in int32."""
MOST_NUMBER, LEAST_NUMBER = 1e30, 1e-30
"""Largest number of a setting, and the smallest above 0: products of settings must stay within float32."""

MAX_TOKENS = 1_000_000
"""Most tokens by which a user may have a text continued."""


class SettingError(ValueError):
    """A setting has a value that cannot work; exit code 2.

    Args:
        setting: name of the setting as the user writes it, such as ``Experiment.num_steps`` or ``--run-dir``.
        value: value that was given.
        allowed: phrase that says which values are accepted, or what to do instead.
    """

    def __init__(self, setting: str, value: object, allowed: str):
        super().__init__(f"{setting} = {shortened(repr(value))}: {allowed}")
        self.setting, self.value, self.allowed = setting, value, allowed


def shortened(text: str, most: int = 400) -> str:
    """Shortens a long text for a line: its beginning and its length.

    >>> shortened("[" * 5000, most=3)
    '[[[... (5000 letters)'
    """
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} letters)"


def printable(text: str) -> str:
    """Escapes control characters and line breaks, so that a text cannot change the terminal.

    >>> printable("runs/\x1b[31m one")
    'runs/\\\\x1b[31m one'
    """
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


@contextmanager
def renamed_settings(names: Mapping[str, str]) -> Iterator[None]:
    """Renames settings in errors raised in the block: from a lower layer's fields to the names that users write.

    >>> with renamed_settings({"Loader.seed": "Experiment.seed"}):
    ...     raise SettingError("Loader.seed", -1, "must be at least 0")
    Traceback (most recent call last):
    swift.errors.SettingError: Experiment.seed = -1: must be at least 0

    Args:
        names: for each field of the lower layer, the name that users write.
    """
    try:
        yield
    except SettingError as error:
        if error.setting not in names:
            raise
        raise SettingError(names[error.setting], error.value, error.allowed) from error


@contextmanager
def renamed_errors(translate: Callable[[SettingError], SettingError]) -> Iterator[None]:
    """Translates a SettingError raised in the block, for example into the options that the user has given."""
    try:
        yield
    except SettingError as error:
        raise translate(error) from error


def suggest(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Suggests the nearest known name, or else ``otherwise`` or all names; of a name ``a.b`` only b is compared."""
    names = {full.rpartition(".")[2].lower(): full for full in known if full != name}
    near = difflib.get_close_matches(name.lower(), names, n=1)
    if near or otherwise:
        return f"did you mean {names[near[0]]}?" if near else otherwise
    every = ", ".join(names.values()) or "none"
    return f"there is only {every}" if len(names) == 1 else f"there are {every}"


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message, or its class name if there is no message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def error_line(error: BaseException) -> str:
    """Formats an exception from code outside this package as one line.

    >>> error_line(TypeError("no number\\nmore about it")), error_line(AssertionError())
    ('TypeError: no number', 'AssertionError')
    """
    name, line = type(error).__name__, first_line(error)
    return line if line == name else f"{name}: {line}"


class RunError(RuntimeError):
    """A run that has started cannot continue; the message says how to resume it; exit code 3."""


def check_choices(owner: Any) -> None:
    """Raises SettingError unless a dataclass's settings with a ``Literal`` or ``bool`` annotation have such values."""
    for field, hint in get_type_hints(type(owner)).items():
        value, name = getattr(owner, field), f"{type(owner).__name__}.{field}"
        if get_origin(hint) is Literal and value not in get_args(hint):
            raise SettingError(name, value, f"must be one of {', '.join(map(str, get_args(hint)))}")
        if hint is bool and not isinstance(value, bool):
            raise SettingError(name, value, "must be True or False")


def check_count(setting: str, value: object, least: int, most: int = MOST_COUNT) -> None:
    """Raises SettingError unless ``value`` is an integer from ``least`` to ``most``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SettingError(setting, value, f"must be a whole number of at least {least}")
    if value > most:
        raise SettingError(setting, value, f"must be at most {most:,}")


def check_seed(setting: str, value: object) -> None:
    """Raises SettingError unless ``value`` can seed a random generator: an unsigned integer of 32 bits."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**32:
        raise SettingError(setting, value, "must be a whole number from 0 to 4,294,967,295")


def check_number(
    setting: str, value: object, *, above: float | None = None, least: float | None = None, most: float = MOST_NUMBER
) -> None:
    """Raises SettingError unless ``value`` is a finite number within the bounds that float32 can hold.

    With ``above=0`` it must also be at least ``LEAST_NUMBER``, so that it is not rounded to 0 in a program.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")
    if above is not None and not (is_number and value > above):  # type: ignore[operator]
        raise SettingError(setting, value, f"must be a number above {above}")
    if least is not None and not (is_number and value >= least):  # type: ignore[operator]
        raise SettingError(setting, value, f"must be a number of at least {least}")
    if not is_number or abs(value) > most:  # type: ignore[arg-type]
        raise SettingError(setting, value, f"must be at most {most:g}")
    if above == 0 and value < LEAST_NUMBER:  # type: ignore[operator]
        raise SettingError(setting, value, f"must be a number of at least {LEAST_NUMBER:g}")
