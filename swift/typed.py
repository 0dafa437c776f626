"""Checks values against annotated types: messages as JSON lines, and settings in a gin file.

One codec serves all messages between processes and between nodes. A message is a NamedTuple of plain values,
collections and other NamedTuples. Its line is a JSON object with the class name, as ``kind``, and the fields; nested
tuples become lists. A reader builds only classes that it names itself, and checks every value against its annotation:
received data are never executed.
"""

import functools
import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from swift.errors import RunError, SettingError

_M = TypeVar("_M")
_MAX_SHOWN = 200

_PLAIN = {int: "a whole number", float: "a number", str: "a text", bool: "True or False", types.NoneType: "None"}


class Codec(Generic[_M]):
    """Writes messages as lines of JSON and reads them back, for given classes.

    Args:
        kinds: the NamedTuple classes of the messages.
        implied: names of fields that are left out of lines, since the reader knows their values.

    >>> from typing import NamedTuple
    >>> class Move(NamedTuple):
    ...     worker: tuple[int, int]
    ...     reason: str | None = None
    >>> codec = Codec(Move)
    >>> codec.line(Move((1, 0)))
    '{"kind": "Move", "worker": [1, 0], "reason": null}\\n'
    >>> codec.read(codec.line(Move((1, 0), "late")))
    Move(worker=(1, 0), reason='late')
    """

    def __init__(self, *kinds: type[_M], implied: Sequence[str] = ()):
        self._kinds = {kind.__name__: kind for kind in kinds}
        self._types = {kind: get_type_hints(kind) for kind in kinds}
        self._implied = frozenset(implied)

    def line(self, message: _M) -> str:
        """Encodes a message as a line."""
        fields: dict[str, Any] = message._asdict()  # type: ignore[attr-defined]
        return self.line_of(type(message), **{name: fields[name] for name in fields.keys() - self._implied})

    def line_of(self, kind: type[_M], **fields: Any) -> str:
        """Encodes a message of this class as a line, from all its fields that are not implied."""
        assert kind in self._types, f"{kind.__name__} is not a message of this codec"
        names = [name for name in self._types[kind] if name not in self._implied]
        assert sorted(names) == sorted(fields), f"{kind.__name__} has the fields {names}"
        return json.dumps({"kind": kind.__name__} | {name: fields[name] for name in names}, default=sorted) + "\n"

    def read(self, line: str, **implied: Any) -> _M:
        """Decodes a line into a message.

        Args:
            line: the line, from any source.
            implied: values of the implied fields; a class without such a field ignores it.

        Raises:
            RunError: the line is not JSON or of an unknown type, or a field is missing, unknown or of the wrong
                type.
        """
        try:
            fields = _dict(json.loads(line), "a message")
            kind = self._kinds.get(_as(str, fields.pop("kind", None), "kind"))
            if kind is None:
                raise ValueError("an unknown type of message")
            types = self._types[kind]
            for name in types.keys() & self._implied:
                fields[name] = implied[name]
            if types.keys() != fields.keys():
                raise ValueError(f"{kind.__name__} has the fields {', '.join(types)}")
            values = {
                name: fields[name] if name in self._implied else _as(kind_of, fields[name], name)
                for name, kind_of in types.items()
            }
        except (ValueError, RecursionError) as error:
            raise RunError(f"a line that is not a message between processes: {error}: {_shown(line)}") from error
        return kind(**values)


def _as(kind: Any, value: Any, name: str) -> Any:
    """Converts a JSON value to an annotated type; raises ValueError if it does not fit."""
    return _reader(kind)(value, name)


@cache
def _reader(kind: Any) -> Callable[[Any, str], Any]:
    """Returns a function that checks a field's JSON value against an annotation, and converts it."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value, _: value
    if kind in (str, bool, int, float, NoneType):
        return lambda value, name: _plain(kind, value, name)
    if origin in (Union, UnionType):
        return lambda value, name: _union(arguments, value, name)
    if origin is Literal:
        return lambda value, name: _literal(arguments, value, name)
    if origin is dict:
        assert arguments == (str, Any), f"{kind} is not supported"
        return _dict
    if origin in (list, frozenset) or (origin is tuple and arguments[-1] is Ellipsis):
        return lambda value, name: origin(_as(arguments[0], element, name) for element in _list(value, name))
    if origin is tuple:
        return lambda value, name: tuple(_fixed(arguments, value, name))
    assert issubclass(kind, tuple), f"{kind} is not supported"
    types = tuple(get_type_hints(kind).values())
    return lambda value, name: kind(*_fixed(types, value, name))


def _plain(kind: type, value: Any, name: str) -> Any:
    """Checks a plain value; an int may stand for a float, but a bool only for a bool."""
    if type(value) is kind or (kind is float and type(value) is int):
        return value
    raise ValueError(f"{name} is {_shown(value)}, not of type {kind.__name__}")


def _union(kinds: Sequence[Any], value: Any, name: str) -> Any:
    for kind in kinds:
        try:
            return _as(kind, value, name)
        except ValueError as error:
            reason = error
    raise reason


def _literal(choices: Sequence[Any], value: Any, name: str) -> Any:
    if value not in choices:
        raise ValueError(f"{name} is {_shown(value)}, not one of {choices}")
    return value


def _dict(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {_shown(value)}, not an object")
    return value


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name} is {_shown(value)}, not a list")
    return value


def _fixed(kinds: Sequence[Any], value: Any, name: str) -> list[Any]:
    values = _list(value, name)
    if len(values) != len(kinds):
        raise ValueError(f"{name} is {_shown(value)}, not a list of {len(kinds)}")
    return [_as(kind, element, name) for kind, element in zip(kinds, values, strict=True)]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


class SourceText(str):
    """A value as written in a gin file: shown in error messages without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


NOT_SET = SourceText("(not set)")
"""Value of a setting that has no value, for errors."""


def written(value: Any) -> Any:
    """Returns a value for an error message: as gin writes it, if its ``repr`` would mean nothing to users."""
    if type(value) in (list, tuple):
        return type(value)(map(written, value))
    value = value.func if isinstance(value, functools.partial) else value  # a class with settings, but without ()
    if callable(value) and hasattr(value, "__name__"):
        return SourceText(f"@{value.__name__}")
    return SourceText(f"@{type(value).__name__}()") if hasattr(value, "__dataclass_fields__") else value


def checked(kind: Callable, known: Mapping[str, Callable]) -> Callable:
    """Wraps a constructor for gin so that a value of the wrong type raises a SettingError.

    The constructor's own checks come first, since their messages say more.

    Args:
        kind: class or function with annotated parameters.
        known: names that may follow ``@``, for the message.
    """
    parameters, hints = inspect.signature(kind).parameters, typing.get_type_hints(kind)

    @functools.wraps(kind, updated=())
    def create(**settings: Any) -> Any:
        for name, parameter in parameters.items():
            if name not in settings and parameter.default is parameter.empty:
                raise SettingError(f"{kind.__name__}.{name}", NOT_SET, "has no default: it has to be set")
        try:
            result = kind(**settings)
        except (TypeError, AttributeError):  # the constructor's own check may have failed on the wrong type
            _check(kind.__name__, settings, hints, known)
            raise
        _check(kind.__name__, settings, hints, known)
        return result

    return create


def _check(owner: str, settings: Mapping[str, Any], hints: Mapping[str, Any], known: Mapping[str, Callable]) -> None:
    for name, value in settings.items():
        if not _fits(value, hints[name]):
            raise SettingError(f"{owner}.{name}", written(value), f"must be {described(hints[name], known)}")


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple:  # gin also passes lists
        return isinstance(value, tuple | list) and all(_fits(item, arguments[0]) for item in value)
    if origin is not None:
        return isinstance(value, origin)
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    if _is_protocol(hint):  # a class has the members of its objects, but is none of them
        return not isinstance(value, type) and _has_members(value, hint)
    return isinstance(value, hint)


def described(hint: Any, known: Mapping[str, Callable]) -> str:
    """Describes the values that an annotated setting accepts, such as ``a number or None``."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(described(argument, known) for argument in arguments)
    if origin is Literal:
        return f"one of {', '.join(arguments)}"
    if origin is tuple:
        return f"a list, each item {described(arguments[0], known)}"
    if origin is not None:
        return "a dictionary, such as {'b1': 0.9}"
    if _is_protocol(hint):
        fitting = " or ".join(f"@{name}()" for name, kind in known.items() if _has_members(kind, hint))
        return fitting or f"@YOURS() (see {hint.__name__})"
    return _PLAIN.get(hint) or f"@{hint.__name__}()"


def fitting(hint: Any, known: Mapping[str, Callable]) -> list[str]:
    """Returns the names that may follow ``@`` in a setting of an annotated type; all names if none fits."""

    def makes(kind: Callable) -> Any:
        return kind if isinstance(kind, type) else typing.get_type_hints(kind)["return"]

    def fits(kind: Any, hint: Any) -> bool:
        if typing.get_origin(hint) in (Union, types.UnionType):
            return any(fits(kind, argument) for argument in typing.get_args(hint))
        return _has_members(kind, hint) if _is_protocol(hint) else isinstance(hint, type) and issubclass(kind, hint)

    return [name for name, kind in known.items() if fits(makes(kind), hint)] or list(known)


def _is_protocol(hint: Any) -> bool:
    return bool(getattr(hint, "_is_protocol", False))


def _has_members(value: Any, protocol: Any) -> bool:
    # Without evaluating properties, which may read files.
    members = [name for name in vars(protocol) if not name.startswith("_")]
    return all(inspect.getattr_static(value, name, None) is not None for name in members)
