"""``swift settings`` and ``swift config``: print all settings with their meanings, or one experiment's settings."""

import argparse
import dataclasses
import inspect
import json
import re
import shutil
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from swift.config.gin_reader import CONFIGURABLES, load_experiment
from swift.config.stored import config_text
from swift.errors import SettingError, suggest
from swift.typed import described

_SECTION = re.compile(r"^(?:Args|Attributes):\n(.*?)(?=^\S|\Z)", re.DOTALL | re.MULTILINE)
_ENTRY = re.compile(r"^    (\w+): (.*?)(?=^    \w|\Z)", re.DOTALL | re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class _Setting:
    """A setting as shown by ``swift settings``.

    Attributes:
        name: full name, such as ``Experiment.num_steps``.
        type: allowed values, in words.
        default: default value as written in a gin file, or None if the setting has no default.
        doc: meaning of the setting, from the docstring of the class.
    """

    name: str
    type: str
    default: str | None
    doc: str


def settings(options: argparse.Namespace) -> None:
    """Runs ``swift settings [NAME]``."""
    groups = {kind.__name__: list(_settings_of(kind)) for kind in CONFIGURABLES.values()}
    every = [setting for group in groups.values() for setting in group]
    chosen = every if options.name is None else _named(options.name, groups, every)
    if options.format == "json":
        print(json.dumps([dataclasses.asdict(setting) for setting in chosen]))
        return
    width = min(shutil.get_terminal_size().columns, 120)
    lines = []
    for name, kind in CONFIGURABLES.items():
        kind_settings = [setting for setting in chosen if setting.name.partition(".")[0] == name]
        if kind_settings or options.name == name:
            meaning = (inspect.getdoc(kind) or "").partition("\n")[0]  # None with python -OO
            lines += [f"@{name}(): {meaning}".rstrip(": "), "", *_shown(kind_settings, width), ""]
    sys.stdout.write("\n".join(lines[:-1]) + "\n")


def config(options: argparse.Namespace) -> None:
    """Runs ``swift config CONFIG.gin``: prints every setting of an experiment, including defaults, as gin."""
    sys.stdout.write(config_text(load_experiment(options.config, options.set)))


def _named(name: str, groups: dict[str, list[_Setting]], every: Sequence[_Setting]) -> list[_Setting]:
    """Finds settings by the name of their class, or by their own name with or without the class."""
    bare = name.removeprefix("@").removesuffix("()")
    if bare in groups:
        return groups[bare]
    if bare.endswith(".gin"):
        raise SettingError("NAME", name, f"there is no such setting; `swift config {name}` shows those of a file")
    matching = [setting for setting in every if bare in (setting.name, setting.name.partition(".")[2])]
    if not matching:
        known = [*groups, *(setting.name for setting in every)]
        allowed = suggest(bare.rpartition(".")[2], known, "`swift settings` lists all")
        raise SettingError("NAME", name, f"there is no such setting; {allowed}")
    return matching


def _settings_of(kind: Callable) -> Iterator[_Setting]:
    hints, docs = typing.get_type_hints(kind), _docs_of(kind)
    fields: dict[str, Any] = {}
    if dataclasses.is_dataclass(kind):
        fields = {field.name: field for field in dataclasses.fields(kind)}
    for name, parameter in inspect.signature(kind).parameters.items():
        default: Any = parameter.default
        if name in fields and fields[name].default_factory is not dataclasses.MISSING:
            default = fields[name].default_factory()
        text = None if default is parameter.empty else _written(default)
        yield _Setting(f"{kind.__name__}.{name}", described(hints[name], CONFIGURABLES), text, docs.get(name, ""))


def _docs_of(kind: Callable) -> dict[str, str]:
    section = _SECTION.search(inspect.getdoc(kind) or "")
    return {name: " ".join(doc.split()) for name, doc in _ENTRY.findall(section[1])} if section else {}


def _written(value: Any) -> str:
    return f"@{type(value).__name__}()" if dataclasses.is_dataclass(value) else repr(value)


def _shown(settings: Sequence[_Setting], width: int) -> Iterator[str]:
    for setting in settings:
        default = "has to be set" if setting.default is None else f"default {setting.default}"
        yield f"  {setting.name}"
        kind = setting.type.removeprefix("must be ")
        yield from textwrap.wrap(f"{kind}; {default}", width, initial_indent="      ", subsequent_indent="      ")
        yield from textwrap.wrap(setting.doc, width, initial_indent="      ", subsequent_indent="      ")
