"""Typed messages as JSON lines: one codec for all messages between processes and between nodes.

A message is a NamedTuple of plain values, collections and other NamedTuples. Its line is an object with the name of its
class, as ``kind``, and its fields; nested tuples are lists. A reader builds only classes that it names itself, and
checks every value against its annotation: received data are never executed.
"""

import json
from collections.abc import Callable, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from swift.errors import RunError

M = TypeVar("M")
_MAX_SHOWN = 200


class Codec(Generic[M]):
    """Writes and reads messages of given kinds.

    Args:
        kinds: the NamedTuple classes of the messages.
        implied: names of fields that are left out of lines, as the reader knows their values.

    >>> from typing import NamedTuple
    >>> class Move(NamedTuple):
    ...     worker: tuple[int, int]
    ...     why: str | None = None
    >>> codec = Codec(Move)
    >>> codec.line(Move((1, 0)))
    '{"kind": "Move", "worker": [1, 0], "why": null}\\n'
    >>> codec.read(codec.line(Move((1, 0), "late")))
    Move(worker=(1, 0), why='late')
    """

    def __init__(self, *kinds: type[M], implied: Sequence[str] = ()):
        self._kinds = {kind.__name__: kind for kind in kinds}
        self._types = {kind: get_type_hints(kind) for kind in kinds}
        self._implied = frozenset(implied)

    def line(self, message: M) -> str:
        """Returns the line of a message."""
        fields: dict[str, Any] = message._asdict()  # type: ignore[attr-defined]
        return self.line_of(type(message), **{name: fields[name] for name in fields.keys() - self._implied})

    def line_of(self, kind: type[M], **fields: Any) -> str:
        """Returns the line of a message of this kind, from all its fields that are not implied."""
        assert kind in self._types, f"{kind.__name__} is not a message of this codec"
        names = [name for name in self._types[kind] if name not in self._implied]
        assert sorted(names) == sorted(fields), f"{kind.__name__} has the fields {names}"
        return json.dumps({"kind": kind.__name__} | {name: fields[name] for name in names}, default=sorted) + "\n"

    def read(self, line: str, **implied: Any) -> M:
        """Reads the message of a line.

        Args:
            line: the line, from any source.
            implied: values of the implied fields; fields that a kind does not have are ignored.

        Raises:
            RunError: the line is not JSON, is of an unknown kind, or a field is missing, unknown or of another type.
        """
        try:
            fields = _dict(json.loads(line), "a message")
            kind = self._kinds.get(_as(str, fields.pop("kind", None), "kind"))
            if kind is None:
                raise ValueError("an unknown kind of message")
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
    """Returns the function that checks and converts a JSON value of a field for an annotation."""
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
        return lambda value, name: origin(_as(arguments[0], one, name) for one in _list(value, name))
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
    return [_as(kind, one, name) for kind, one in zip(kinds, values, strict=True)]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
