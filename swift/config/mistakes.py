"""Translates gin 0.5's errors into messages about the user's mistake, by matching gin's texts.

gin's message about a statement ends with its position::

    Configurable 'Experiment' doesn't have a parameter named 'num_step'.
      In bindings string line 3
        Experiment.num_step=3
"""

import difflib
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from swift.errors import SettingError, shortened
from swift.typed import SourceText, written

_PLACE = re.compile(r"\n\s+In bindings string line (\d+)\n\s*(.*)")
_PARAMETER = re.compile(r"Configurable '(?:\w+\.)*(\w+)' doesn't have a parameter named '(\w+)'")
_UNKNOWN = re.compile(r"No configurable matching (?:reference )?'@?(?:[\w./]*[./])?(\w+)(?:\(\))?'")
_WORD = re.compile(r"Failed to parse token '(.*)'")
_NO_MACRO = re.compile(r"macro\(\) missing 1 required(?:.|\n)*in scope '([\w./]+)'")


@dataclass(frozen=True)
class Source:
    """The source of a gin text: a file or an override.

    Attributes:
        setting: ``CONFIG`` or ``--set``.
        value: name of the file, or the text of the override.
    """

    setting: str
    value: str

    def at(self, line: int | str) -> str:
        """Returns a position such as ``line 3 `` in a file; empty for an override."""
        return f"line {line} " if self.setting == "CONFIG" else ""


def parse_mistake(
    error: Exception, source: Source, known: Mapping[str, Sequence[str]], values_of: Callable[[str], Iterable[str]]
) -> SettingError:
    """Translates an error that gin raised while parsing.

    Args:
        error: error that gin raised for a text.
        source: source of the text.
        known: known classes, and the settings of each.
        values_of: function that returns the names that may follow ``@`` in a setting.
    """
    # Python's tokenizer counts brackets itself from 3.12 on.
    if isinstance(error, RecursionError | MemoryError) or "too many nested parentheses" in str(error):
        return SettingError(source.setting, source.value, "has more brackets in each other than can be read")
    if isinstance(error, SyntaxError | tokenize.TokenError):
        return SettingError(source.setting, source.value, _no_syntax(error, source))
    location = _PLACE.search(str(error))
    if location is None:
        return SettingError(source.setting, source.value, str(error))
    name, _, value = location[2].partition("=")
    where = f" ({source.value}, line {location[1]})" if source.setting == "CONFIG" else ""
    parameter, unknown = _PARAMETER.search(str(error)), _UNKNOWN.search(str(error))
    if parameter and parameter[1] in known:
        allowed = f"{parameter[1]} has no such setting; {suggest(parameter[2], known[parameter[1]])}{where}"
    elif unknown:
        names = values_of(name.strip()) if value.strip().startswith("@") else known
        allowed = f"there is no {unknown[1]}; {suggest(unknown[1], names)}{where}"
    else:
        message = str(error)[: location.start()]
        return SettingError(source.setting, source.value, f"{source.at(location[1])}cannot be followed: {message}")
    return SettingError(name.strip(), SourceText(value.strip()), allowed)


def build_mistake(error: Exception, path: str) -> SettingError:
    """Translates an error raised while objects are built from settings."""
    if isinstance(error, SettingError):
        # gin raises a subclass of this error, whose text it has extended.
        return SettingError(error.setting, written(error.value), error.allowed)
    if isinstance(error, RecursionError):
        return SettingError("CONFIG", path, "something in it contains itself")
    macro = _NO_MACRO.search(str(error))
    if macro:
        return SettingError("CONFIG", path, f"uses %{macro[1]}, which is set nowhere")
    message = re.split(r"\n  (?:In call to|No values supplied)", str(error))[0]
    if not isinstance(error, ValueError | TypeError | AttributeError | RuntimeError):  # such as KeyError: name it
        name = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
        message = f"making its objects raises {name}: {message}"
    return SettingError("CONFIG", path, message)


@contextmanager
def renamed_errors(translate: Callable[[SettingError], SettingError]) -> Iterator[None]:
    """Translates a SettingError raised in the block, for example into the options that the user has given."""
    try:
        yield
    except SettingError as error:
        raise translate(error) from error


def suggest(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Suggests the nearest known name, or else ``otherwise`` or all names; of a name ``a.b`` only b is compared."""
    names = {full.rpartition(".")[2].lower(): full for full in known}
    near = difflib.get_close_matches(name.lower(), names, n=1)
    return f"did you mean {names[near[0]]}?" if near else otherwise or f"there are {', '.join(names.values())}"


def _no_syntax(error: SyntaxError | tokenize.TokenError, source: Source) -> str:
    if isinstance(error, tokenize.TokenError):
        message, (line, _) = error.args
        return f"{source.at(line)}is not gin: {message}; a bracket or quotation mark may be open"
    word = _WORD.search(error.msg)
    message = f"{shortened(word[1])} is not a value; text goes in quotation marks" if word else error.msg
    return f"{source.at(error.lineno or 1)}is not gin: {message}"
