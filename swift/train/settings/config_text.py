"""An experiment as gin text, one setting per line, and the settings in it that have their defaults."""

import dataclasses
from collections.abc import Iterator
from typing import Any


def config_text(experiment: Any) -> str:
    """Writes a whole experiment as gin, one setting per line; reading it gives an equal experiment."""
    lines = list(_render(experiment))
    imports = sorted({f"import {kind.__module__}" for _, kind in own_kinds(experiment)})
    return "\n".join([*imports, *lines]) + "\n"


def _render(value: Any, scope: str = "") -> Iterator[str]:
    """Yields the settings of a part; of two inner parts of one class, the second gets a scope named by its setting.

    The parts in a tuple have a scope each, with their place in it.
    """
    name, parts = f"{scope}{type(value).__name__}", list[tuple[Any, str]]()
    for field in dataclasses.fields(value):
        if not field.init:
            continue
        setting = getattr(value, field.name)
        if dataclasses.is_dataclass(setting):
            is_second = any(type(part) is type(setting) for part, _ in parts)
            parts.append((setting, f"{field.name}/" if is_second else scope))
            yield f"{name}.{field.name} = @{parts[-1][1]}{type(setting).__name__}()"
        elif isinstance(setting, tuple) and any(map(dataclasses.is_dataclass, setting)):
            scopes = [f"{scope.replace('/', '_')}{field.name}_{place}/" for place in range(len(setting))]
            parts += zip(setting, scopes, strict=True)
            items = (f"@{of}{type(one).__name__}()" for one, of in zip(setting, scopes, strict=True))
            yield f"{name}.{field.name} = ({', '.join(items)},)"
        else:
            yield f"{name}.{field.name} = {setting!r}"
    for part, of in parts:
        yield from _render(part, of)


def defaults_in(value: Any) -> Iterator[str]:
    """Yields the settings of an experiment or of a part that have their default value, such as ``Experiment.seed``."""
    for field in dataclasses.fields(value):
        setting = getattr(value, field.name)
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if field.init and default is not dataclasses.MISSING and setting == default:
            yield f"{type(value).__name__}.{field.name}"
        if dataclasses.is_dataclass(setting):
            yield from defaults_in(setting)


def own_kinds(value: Any) -> Iterator[tuple[str, type]]:
    """Yields the classes in an experiment from outside Swift, by name."""
    kind = type(value)
    if not kind.__module__.startswith("swift."):
        yield kind.__name__, kind
    for field in dataclasses.fields(value):
        setting = getattr(value, field.name)
        for part in setting if isinstance(setting, tuple) else (setting,):
            if dataclasses.is_dataclass(part) and not isinstance(part, type):
                yield from own_kinds(part)
