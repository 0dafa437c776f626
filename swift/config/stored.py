"""The configuration stored with a run or a model: as data for Swift, and as gin text for people.

    config.json    {"version": 1, "experiment": {"class": "Experiment", "settings": {"num_steps": 300, ...}}}
    config.gin     the same settings, one per line; it is run as a program only if named on the command line

Reading ``config.json`` executes nothing, whatever its origin. Swift's own classes are stored without a module. Other
classes are stored with their module, but it is never imported: the reader only finds classes that it already has.
"""

import dataclasses
import inspect
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from swift.errors import SettingError
from swift.files import replace_file

_NAME, GIN_NAME = "config.json", "config.gin"
"""Names of the two files of a stored configuration."""
_VERSION = 1
_MOST_BYTES, _DEEPEST = 2**20, 50
"""Limits of ``config.json``: its size in bytes, and the depth of nested objects."""
OF_RUN = ("Experiment.planner", "DataConfig.source", "DataConfig.validation_source", "OptimizerConfig.schedule")
"""Settings not needed to read a checkpoint: a user's class in them may no longer exist, or exist only in Python."""
OF_TRAINING = (*OF_RUN, "Experiment.placement", "OptimizerConfig.transformation")
"""Settings not needed to use a run's model: ``OF_RUN``, and settings of training state, which a model lacks."""
_NOT_WRITTEN = "(not written)"
"""Placeholder module for a value of which only the ``repr`` was stored."""
_INSTEAD: Mapping[str, Mapping[str, Any]] = {
    "OptimizerConfig.schedule": {"warmup_steps": 0},
    "DataConfig.source": {"validation_source": None, "locality": 0.0, "domain": None},
}
"""Other settings to replace when a setting falls back to its default: the default schedule has a warm-up, which could
be as long as the run, and the default source is of a different type and has no domains."""


@dataclasses.dataclass(frozen=True)
class StoredObject:
    """An object of a configuration that was read but not yet built.

    Attributes:
        kind: name of its class.
        module: module of a class from outside Swift; empty for Swift's own classes, or if unknown.
        settings: values of the settings by name: plain values, other stored objects, and containers of both.
    """

    kind: str
    module: str
    settings: Mapping[str, Any]


class UnreadableConfig(ValueError):
    """A configuration that cannot be read; the message says why."""


def write_config(directory: Path, experiment: Any) -> None:
    """Writes an experiment to ``config.json``.

    Args:
        directory: directory of the run or the model.
        experiment: dataclass whose settings are plain values, containers of these, or dataclasses. Of any other value,
            only the ``repr`` is stored, which cannot be read back.
    """
    document = {"version": _VERSION, "experiment": _encoded(experiment)}
    replace_file(directory / _NAME, (json.dumps(document, indent=1) + "\n").encode())


def copy_config(source: Path, directory: Path) -> None:
    """Copies the configuration of a run to a model exported from it, including values that cannot be read back.

    Args:
        source: directory of the run.
        directory: directory of the model.
    """
    for name in (_NAME, GIN_NAME):
        if (source / name).is_file():
            replace_file(directory / name, (source / name).read_bytes())


def read_config(directory: Path, optional_settings: Collection[str] = ()) -> StoredObject:
    """Reads the configuration of a run or a model.

    Args:
        directory: directory of the run or the model.
        optional_settings: settings, such as ``DataConfig.source``, that may have a value of which only the ``repr`` was
            stored. Such a value is read as an object of an unknown class.

    Raises:
        UnreadableConfig: the configuration is missing, damaged, or not plain data.
    """
    try:
        with (directory / _NAME).open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise UnreadableConfig(f"is longer than {_MOST_BYTES} bytes")
        text = content.decode("utf-8")
        return _read_json(text, optional_settings)
    except FileNotFoundError as error:
        raise UnreadableConfig(f"has no {_NAME}") from error
    except OSError as error:
        raise UnreadableConfig(f"its {_NAME} cannot be read: {error.strerror}") from error
    except UnreadableConfig as error:
        raise UnreadableConfig(f"its {_NAME} {error}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise UnreadableConfig(f"its {_NAME} is damaged: {error}") from error


def build(
    part: StoredObject,
    find: Callable[[StoredObject], Callable[..., Any] | None],
    optional_settings: Collection[str] = (),
) -> Any:
    """Builds the object that a stored object describes, including all stored objects within it.

    Args:
        part: stored object, as read from ``config.json``.
        find: returns the constructor for a stored object's class, or None if the reader has no such class.
        optional_settings: settings, such as ``Experiment.planner``, that keep their defaults if ``find`` returns None
            for a stored object within them.

    Raises:
        UnreadableConfig: a class or a setting is unknown, or an object cannot be built from its settings.
        SettingError: a setting has a value that cannot work.
    """
    create = find(part)
    if create is None:
        raise UnreadableConfig(f"has a class {part.kind}, which is not known")
    known = inspect.signature(create).parameters
    settings, instead = dict[str, Any](), dict[str, Any]()
    for name, value in part.settings.items():
        if name not in known:
            raise UnreadableConfig(f"sets {part.kind}.{name}, and {part.kind} has no such setting")
        setting = f"{part.kind}.{name}"
        inner: list[StoredObject] = []
        _filled(value, inner.append)
        is_spared = setting in optional_settings and any(find(p) is None for child in inner for p in parts(child))
        if is_spared:
            instead |= _INSTEAD.get(setting, {})
        else:
            settings[name] = _filled(value, lambda inner: build(inner, find, optional_settings))
    try:
        return create(**settings | instead)
    except SettingError:
        raise
    except Exception as error:  # a class may raise anything for values that it did not expect
        raise UnreadableConfig(f"has settings of {part.kind} that do not work: {error}") from error


def parts(part: StoredObject, optional_settings: Collection[str] = ()) -> Iterator[StoredObject]:
    """Yields a stored object and all stored objects within it, except those within optional settings."""
    inner: list[StoredObject] = []
    yield part
    for name, value in part.settings.items():
        if f"{part.kind}.{name}" not in optional_settings:
            _filled(value, inner.append)
    for child in inner:
        yield from parts(child, optional_settings)


def _filled(value: Any, fill: Callable[[StoredObject], Any]) -> Any:
    """Replaces each outermost stored object within a setting's value by what ``fill`` returns for it."""
    if isinstance(value, StoredObject):
        return fill(value)
    if isinstance(value, list | tuple):
        return type(value)(_filled(item, fill) for item in value)
    return {key: _filled(item, fill) for key, item in value.items()} if isinstance(value, dict) else value


def _stored_fields(value: Any) -> list[dataclasses.Field]:
    """Returns the settings of an object, without those that are no part of a run, such as its observers."""
    return [field for field in dataclasses.fields(value) if field.init and field.metadata.get("is_stored", True)]


def _encoded(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        settings = {f.name: _encoded(getattr(value, f.name)) for f in _stored_fields(value)}
        module = {} if kind.__module__.startswith("swift.") else {"module": kind.__module__}
        return {"class": kind.__name__, **module, "settings": settings}
    if isinstance(value, Mapping):
        return {"mapping": {str(key): _encoded(item) for key, item in value.items()}}
    if isinstance(value, tuple):
        return {"tuple": [_encoded(item) for item in value]}
    if isinstance(value, list):
        return [_encoded(item) for item in value]
    is_plain = value is None or isinstance(value, bool | int | float | str)
    return value if is_plain else {"unreadable": repr(value)}


def _read_json(text: str, optional_settings: Collection[str]) -> StoredObject:
    document = json.loads(text)
    if not isinstance(document, dict) or document.get("version") != _VERSION:
        raise UnreadableConfig(f"is damaged, or not of version {_VERSION}")
    part = _decoded(document.get("experiment"), optional_settings)
    if not isinstance(part, StoredObject) or part.kind != "Experiment" or part.module:
        raise UnreadableConfig("has no Experiment")
    return part


def _decoded(value: Any, optional_settings: Collection[str], depth: int = 0, is_spared: bool = False) -> Any:
    _check_depth(depth)

    def inner(item: Any, setting: str = "") -> Any:
        return _decoded(item, optional_settings, depth + 1, is_spared or setting in optional_settings)

    if isinstance(value, list):
        return [inner(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"class": str(kind), "settings": dict(settings)} if value.keys() <= {"class", "module", "settings"}:
            module = value.get("module", "")
            if isinstance(module, str):
                return StoredObject(
                    kind, module, {name: inner(item, f"{kind}.{name}") for name, item in settings.items()}
                )
        case {"mapping": dict(items)} if len(value) == 1:
            return {key: inner(item) for key, item in items.items()}
        case {"tuple": list(items)} if len(value) == 1:
            return tuple(inner(item) for item in items)
        case {"unreadable": str(text)} if len(value) == 1 and is_spared:
            return StoredObject(text, _NOT_WRITTEN, {})
        case {"unreadable": str(text)} if len(value) == 1:
            raise UnreadableConfig(f"has a value that was not written, {text}: only dataclasses and plain values are")
    raise UnreadableConfig(f"is damaged: it has an object with {', '.join(map(repr, value))}")


def _check_depth(depth: int) -> None:
    if depth > _DEEPEST:
        raise UnreadableConfig("has too many objects within each other")


def config_text(experiment: Any) -> str:
    """Formats an experiment as gin, one setting per line; reading the text back gives an equal experiment."""
    lines = list(_render(experiment))
    imports = sorted({f"import {kind.__module__}" for _, kind in user_classes(experiment)})
    return "\n".join([*imports, *lines]) + "\n"


def _render(value: Any, scope: str = "") -> Iterator[str]:
    """Yields an object's settings, and those of the objects within it, as gin lines.

    Of two inner objects of the same class, the second gets a scope named after its setting. The objects in a tuple get
    one scope each, numbered by position.
    """
    name, parts = f"{scope}{type(value).__name__}", list[tuple[Any, str]]()
    for field in _stored_fields(value):
        setting = getattr(value, field.name)
        if dataclasses.is_dataclass(setting):
            is_second = any(type(part) is type(setting) for part, _ in parts)
            parts.append((setting, f"{field.name}/" if is_second else scope))
            yield f"{name}.{field.name} = @{parts[-1][1]}{type(setting).__name__}()"
        elif isinstance(setting, tuple) and any(map(dataclasses.is_dataclass, setting)):
            scopes = [f"{scope.replace('/', '_')}{field.name}_{index}/" for index in range(len(setting))]
            parts += zip(setting, scopes, strict=True)
            items = (f"@{prefix}{type(element).__name__}()" for element, prefix in zip(setting, scopes, strict=True))
            yield f"{name}.{field.name} = ({', '.join(items)},)"
        else:
            yield f"{name}.{field.name} = {setting!r}"
    for part, part_scope in parts:
        yield from _render(part, part_scope)


def defaults_in(value: Any) -> Iterator[str]:
    """Yields the names of settings at their default value, such as ``Experiment.seed``, also in inner objects."""
    for field in _stored_fields(value):
        setting = getattr(value, field.name)
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if default is not dataclasses.MISSING and setting == default:
            yield f"{type(value).__name__}.{field.name}"
        if dataclasses.is_dataclass(setting):
            yield from defaults_in(setting)


def user_classes(value: Any) -> Iterator[tuple[str, type]]:
    """Yields (name, class) for each class from outside Swift that an experiment uses, possibly repeated."""
    kind = type(value)
    if not kind.__module__.startswith("swift."):
        yield kind.__name__, kind
    for field in _stored_fields(value):
        setting = getattr(value, field.name)
        for part in setting if isinstance(setting, tuple) else (setting,):
            if dataclasses.is_dataclass(part) and not isinstance(part, type):
                yield from user_classes(part)
