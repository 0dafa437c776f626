"""Bindings of settings, parsed from gin text: parsing executes nothing and needs no class.

The text is parsed by gin's own parser. ``swift.config.maker`` makes objects of the bindings.

    include 'base.gin'                   # bindings of another file, which later ones replace
    import my_policies                   # classes and functions of a module may be named
    STEPS = 300                          # a macro
    Experiment.num_steps = %STEPS
    Experiment.placement = @FlexMoE()
    FlexMoE.interval = 10
    web/TextFiles.pattern = '*.html'     # of the object that @web/TextFiles() makes
"""

import re
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import realpath
from pathlib import Path
from typing import Any, NamedTuple

from gin.config_parser import BindingStatement, ConfigParser, ImportStatement, IncludeStatement, ParserDelegate

from swift.errors import SettingError, shortened
from swift.typed import SourceText

_WORD = re.compile(r"Failed to parse token '(.*)'")


class Reference(NamedTuple):
    """A value such as ``@web/TextFiles()``: an object that a class or function makes, or without brackets itself.

    Attributes:
        name: name of the class or function.
        scope: scope of the settings that it gets, such as ``web``; empty: the scope in which it is used.
        is_call: whether it is called.
    """

    name: str
    scope: str
    is_call: bool

    def __repr__(self) -> str:
        return f"@{_scoped(self.scope, self.name)}{'()' * self.is_call}"


class Macro(NamedTuple):
    """A value such as ``%STEPS``: the value of the macro with that name."""

    name: str

    def __repr__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True)
class Binding:
    """A setting with its value, or a macro.

    Attributes:
        scope: scope, such as ``web``; empty: any object of the class.
        owner: class or function that has the setting; of a macro, its name.
        name: name of the setting; empty for a macro.
        value: plain value; or a ``Reference`` or ``Macro``, also within tuples, lists and dictionaries.
        file: name of the file; None for an override from the command line.
        line: line of the file, from 1.
    """

    scope: str
    owner: str
    name: str
    value: Any
    file: str | None = None
    line: int = 0

    @property
    def setting(self) -> str:
        """The setting as it is written, such as ``web/TextFiles.pattern``."""
        return ".".join(filter(None, (_scoped(self.scope, self.owner), self.name)))

    def error(self, allowed: str) -> SettingError:
        """Makes the error for a value that cannot work, with its file and line."""
        return SettingError(self.setting, SourceText(repr(self.value)), self.located(allowed))

    def located(self, allowed: str) -> str:
        """Adds the file and line to an error's text, unless it has them."""
        place = "" if self.file is None else f" ({self.file}, line {self.line})"
        return f"{allowed.removesuffix(place)}{place}"


@dataclass
class Bindings:
    """All bindings from a file, from the files that it includes, and from overrides.

    Attributes:
        by_setting: bindings by setting as it is written; of several for one setting, the last.
        macros: names of macros that some binding refers to, also one that was replaced.
        modules: modules to import by the file and line that first name them, in order.
    """

    by_setting: dict[str, Binding] = field(default_factory=dict)
    macros: set[str] = field(default_factory=set)
    modules: dict[str, tuple[str, int]] = field(default_factory=dict)

    def add(self, binding: Binding) -> None:
        """Adds a binding, which replaces an earlier one for the same setting."""
        self.by_setting.pop(binding.setting, None)
        self.by_setting[binding.setting] = binding
        self.macros |= {value.name for value in references(binding.value) if isinstance(value, Macro)}

    def find(self, scope: str, setting: str) -> list[Binding]:
        """Finds the bindings for a setting of an object that is made in a scope, the most specific one last.

        >>> bindings = Bindings()
        >>> for scope in ("", "a", "b"):
        ...     bindings.add(Binding(scope, "Topology", "num_stages", 1))
        >>> [binding.setting for binding in bindings.find("a/c", "Topology.num_stages")]
        ['Topology.num_stages', 'a/Topology.num_stages']
        """
        names = scope.split("/") if scope else []
        scopes = ("/".join(names[:length]) for length in range(len(names) + 1))
        bindings = (self.by_setting.get(_scoped(outer, setting)) for outer in scopes)
        return [binding for binding in bindings if binding is not None]


def read_file(path: Path, resolve: Callable[[Path], Path]) -> Bindings:
    """Reads a gin file, and the files that it includes.

    An ``include`` is relative to the including file, while gin itself would look in the working directory.

    Args:
        path: gin file.
        resolve: function that returns where a file is, given the path that the user has written.

    Raises:
        SettingError: a file cannot be read, is not gin, or includes itself.
    """
    bindings = Bindings()
    _add_file(bindings, path, resolve, ())
    return bindings


def parse_override(text: str) -> Binding:
    """Parses an override from the command line; a bare word as its value is a text.

    >>> parse_override("Experiment.ranks=virtual").value, parse_override("Experiment.placement=@Symi()").value
    ('virtual', @Symi())

    Raises:
        SettingError: the text is not ``NAME=VALUE``.
    """
    match = re.fullmatch(r"\s*([\w./]+)\s*=\s*(.*?)\s*", text, re.DOTALL)
    if not match:
        raise SettingError("--set", text, "must be NAME=VALUE, such as Experiment.num_steps=100")
    name, value = match[1], match[2]
    is_quoted = value.startswith(("@", "%", "'", '"', "(", "[", "{"))
    try:
        try:
            statements = list(_statements(f"{name} = {value}"))
        except _PARSE_ERRORS:
            if is_quoted:
                raise
            statements = list(_statements(f"{name} = {value!r}"))
    except _PARSE_ERRORS as error:
        raise SettingError("--set", text, _mistake(error, has_lines=False)) from error
    if len(statements) > 1:
        raise SettingError("--set", text, "must be a single NAME=VALUE")
    (statement,) = statements
    return Binding(statement.scope, statement.selector, statement.arg_name, statement.value)


def references(value: Any) -> Iterator[Reference | Macro]:
    """Yields the references and macros in a value, at any depth."""
    if isinstance(value, Reference | Macro):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from references(item)
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from references(pair)


def _add_file(bindings: Bindings, path: Path, resolve: Callable[[Path], Path], including: Sequence[Path]) -> None:
    path = resolve(path)
    names = " includes ".join(map(str, (*including, path)))
    if realpath(path) in map(realpath, including):
        raise SettingError("CONFIG", names, "a file cannot include itself")
    text = _read(path, names)
    try:
        for statement in _statements(text):
            line = statement.location.line_num
            if isinstance(statement, IncludeStatement):
                included = path.parent / statement.filename
                shipped = resolve(Path(statement.filename))
                has_shipped = shipped != Path(statement.filename) and not included.exists()
                _add_file(bindings, shipped if has_shipped else included, resolve, (*including, path))
            elif isinstance(statement, ImportStatement):
                if statement.is_from or statement.alias:
                    raise SettingError("CONFIG", str(path), f"line {line} must be `import MODULE`")
                bindings.modules.setdefault(statement.module, (str(path), line))
            elif isinstance(statement, BindingStatement):
                scope, owner, name, value, _ = statement
                bindings.add(Binding(scope, owner, name, value, str(path), line))
    except _PARSE_ERRORS as error:
        raise SettingError("CONFIG", str(path), _mistake(error)) from error


def _read(path: Path, names: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise SettingError("CONFIG", names, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingError("CONFIG", names, f"is not UTF-8 text (byte {error.start})") from error


class _Delegate(ParserDelegate):
    """Makes the values that are no Python literals."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        scope, _, name = scoped_configurable_name.rpartition("/")
        return Reference(name, scope, evaluate)

    def macro(self, macro_name: str) -> Macro:
        return Macro(macro_name)


_PARSE_ERRORS = (SyntaxError, tokenize.TokenError, RecursionError, MemoryError)


def _statements(text: str) -> Iterator[Any]:
    return iter(ConfigParser(text, _Delegate()))


def _mistake(error: Exception, *, has_lines: bool = True) -> str:
    """Describes an error from the parser, or from Python's tokenizer, which counts brackets itself from 3.12 on."""
    if isinstance(error, RecursionError | MemoryError) or "too many nested parentheses" in str(error):
        return "has more brackets in each other than can be read"
    if isinstance(error, tokenize.TokenError):
        message, (line, _) = error.args
        message += "; a bracket or quotation mark may be open"
    else:
        assert isinstance(error, SyntaxError)
        word, line = _WORD.search(error.msg), error.lineno or 1
        message = f"{shortened(word[1])} is not a value; text goes in quotation marks" if word else error.msg
    return f"{f'line {line} ' if has_lines else ''}is not gin: {message}"


def _scoped(scope: str, name: str) -> str:
    return f"{scope}/{name}" if scope else name
