"""Checks of values in a gin file against the annotated types of the settings."""

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union

from swift.errors import SettingError

_PLAIN = {int: "a whole number", float: "a number", str: "a text", bool: "True or False", types.NoneType: "None"}


class Written(str):
    """A value as a gin file writes it, for error messages."""

    __slots__ = ()
    __repr__ = str.__str__


def written(value: Any) -> Any:
    """Returns a value, or the way gin writes it if its ``repr`` would mean nothing to the user."""
    if callable(value) and hasattr(value, "__name__"):
        return Written(f"@{value.__name__}")
    return Written(f"@{type(value).__name__}()") if hasattr(value, "__dataclass_fields__") else value


def checked(kind: Callable, known: Mapping[str, Callable]) -> Callable:
    """Wraps a constructor for gin so that it reports a value of the wrong type as a SettingError.

    The type's own checks come first, since their messages say more.

    Args:
        kind: class or function with annotated parameters.
        known: names that can follow ``@``, for the message.
    """
    parameters, hints = inspect.signature(kind).parameters, typing.get_type_hints(kind)

    @functools.wraps(kind, updated=())
    def create(**settings: Any) -> Any:
        for name, parameter in parameters.items():
            if name not in settings and parameter.default is parameter.empty:
                raise SettingError(f"{kind.__name__}.{name}", Written("(not set)"), "has no default: it has to be set")
        try:
            made = kind(**settings)
        except (TypeError, AttributeError):  # raised by a check that took the type for granted
            _check(kind.__name__, settings, hints, known)
            raise
        _check(kind.__name__, settings, hints, known)
        return made

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
    if origin is tuple:  # gin gives lists, too
        return isinstance(value, tuple | list) and all(_fits(item, arguments[0]) for item in value)
    if origin is not None:
        return isinstance(value, origin)
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    if _is_protocol(hint):
        return _has_members(value, hint)
    return isinstance(value, hint)


def described(hint: Any, known: Mapping[str, Callable]) -> str:
    """Describes the values that an annotated setting takes, such as ``a number or None``."""
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
    """Returns the names that can follow ``@`` in a setting of an annotated type, or all names if none fits."""

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
    # Looked up statically: a property may read a file.
    members = [name for name in vars(protocol) if not name.startswith("_")]
    return all(inspect.getattr_static(value, name, None) is not None for name in members)
