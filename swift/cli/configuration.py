"""gin at the edge: text -> an Experiment, and an Experiment -> its whole text. Nothing else imports gin.

A gin file is a program: it imports modules and calls what it names. Only files that the user names on the command line
go through gin; the configuration of a run or a model is read as data, see ``load_stored``.

gin names are the names of the frozen dataclasses. The text kept with a run is written from the finished Experiment with
all its settings, so that it does not depend on defaults, and reading it back gives an equal Experiment.
"""

import inspect
import re
import tokenize
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gin

from swift.checkpoint import CheckpointConfig
from swift.cli.options import Source, Written, build_mistake, checked, nearest, parse_mistake
from swift.data import ByteTokenizer, DataConfig, StandardLibrary, TextFiles, TokenFile, TokenizerFile
from swift.errors import SettingError
from swift.experts import ExpertConfig, OptimizerConfig
from swift.experts.placement import FlexMoE, MinMax, Packed, Static, Symi
from swift.models import ModelConfig, model_size
from swift.topology import Topology
from swift.train import Experiment
from swift.train.settings import StoredObject, UnreadableConfig, config_text, made, own_kinds, parts, read_config

__all__ = ["config_text", "load_experiment", "load_stored"]

_CONFIGURABLES = (
    *(Experiment, ModelConfig, ExpertConfig, Topology, OptimizerConfig, CheckpointConfig, model_size),
    *(DataConfig, StandardLibrary, TextFiles, TokenFile, ByteTokenizer, TokenizerFile),
    *(Static, Symi, MinMax, Packed, FlexMoE),
)
_NAMED = "a setting is named like Experiment.num_steps"
_known = {kind.__name__: kind for kind in _CONFIGURABLES}
_settings = {name: tuple(inspect.signature(kind).parameters) for name, kind in _known.items()}
_configurable = {
    name: gin.external_configurable(checked(kind, _known), name=name, module="swift") for name, kind in _known.items()
}
# Parts of which every experiment has exactly one, without alternatives.
_PARTS = {
    "ExpertConfig": "experts",
    "Topology": "topology",
    "OptimizerConfig": "optimizer",
    "DataConfig": "data",
    "CheckpointConfig": "checkpoint",
}


def load_experiment(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Reads an experiment.

    Args:
        path: gin file.
        overrides: texts ``NAME=VALUE`` of the command line; a bare word as a value is a string.

    Raises:
        SettingError: the file cannot be read, a name is not known (the nearest one is named), a value cannot work, or
            an override would change nothing.
    """
    gin.clear_config()
    _parse_file(path)
    for text in overrides:
        _parse(_binding(text), Source("--set", text))
    try:
        experiment = _configurable["Experiment"]()
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise build_mistake(error, str(path)) from error
    _check_used(overrides)
    return experiment


def load_stored(directory: Path, setting: str, config: Path | None, spared: Sequence[str] = ()) -> Experiment:
    """Reads the experiment of a run or a model as data.

    Args:
        directory: directory of the run or the model.
        setting: name of the argument that gave it, for errors.
        config: gin file whose experiment has the user's own classes that this one has; or None.
        spared: settings that may keep their defaults if they are of such a class.

    Raises:
        SettingError: the configuration is damaged, not plain data, or has an unknown class.
    """
    own = {} if config is None else dict(own_kinds(load_experiment(config)))

    def find(part: StoredObject) -> Callable[..., Any] | None:
        kind = None if part.module else _known.get(part.kind)
        return checked(kind, _known) if isinstance(kind, type) else own.get(part.kind)

    try:
        part = read_config(directory)
        missing = next((one for one in parts(part, spared) if find(one) is None), None)
        if missing is None:
            return made(part, find, spared)
    except UnreadableConfig as error:
        raise SettingError(setting, str(directory), str(error)) from error
    name = ".".join(filter(None, (missing.module, missing.kind)))
    if config is not None:
        raise SettingError(
            "--config", str(config), f"its experiment has no @{missing.kind}(), and {directory} needs {name}"
        )
    allowed = f"needs {name}, which is not Swift's own: name a gin file whose experiment has it with --config FILE"
    raise SettingError(setting, str(directory), allowed)


def _parse_file(path: Path, including: tuple[Path, ...] = ()) -> None:
    """Parses a gin file; ``include`` names a file beside it, while gin would look in the working directory."""
    lines, first = _read(path, including).splitlines(), 0
    for number, line in enumerate(lines):
        include = re.fullmatch(r"\s*include\s+['\"](.*)['\"]\s*(#.*)?", line)
        if include:
            _parse_lines(lines, first, number, path)
            _parse_file(path.parent / include[1], (*including, path))
            first = number + 1
    _parse_lines(lines, first, len(lines), path)


def _read(path: Path, including: tuple[Path, ...]) -> str:
    names = " includes ".join(map(str, (*including, path)))
    if path.resolve() in [other.resolve() for other in including]:
        raise SettingError("CONFIG", names, "a file cannot include itself")
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingError("CONFIG", names, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingError("CONFIG", names, f"is not UTF-8 text (byte {error.start})") from error


def _parse_lines(lines: Sequence[str], first: int, end: int, path: Path) -> None:
    # Line feeds in front, so that errors name the right line.
    _parse("\n" * first + "\n".join(lines[first:end]), Source("CONFIG", str(path)))


def _parse(text: str, source: Source) -> None:
    try:
        gin.parse_config(text)
    except (SyntaxError, tokenize.TokenError, ValueError, ImportError) as error:
        raise parse_mistake(error, source, _settings) from error


def _binding(text: str) -> str:
    binding = re.fullmatch(r"\s*([\w./]+)\s*=\s*(.*?)\s*", text)
    if not binding:
        raise SettingError("--set", text, "must be NAME=VALUE, such as Experiment.num_steps=100")
    name, value = binding[1], binding[2]
    if not value.startswith(("@", "%", "'", '"', "(", "[", "{")):
        try:
            gin.config.parse_value(value)
        except SyntaxError:
            value = repr(value)
    return f"{name} = {value}"


def _check_used(overrides: Sequence[str]) -> None:
    """Refuses settings that would be ignored silently.

    These are an override, a bare ``name = value``, or a setting of a part that every experiment has, if it is not used.
    Settings of one choice among several may stay: an included file sets ``FlexMoE.interval``, and the file that
    includes it chooses another policy.
    """
    used, unused = _bound(gin.operative_config_str()), _bound(gin.config_str())
    overridden = [text.partition("=")[0].strip() for text in overrides]
    for name, value in unused.items():
        if name in used:
            continue
        if "." not in name:
            everything = [f"{owner}.{setting}" for owner, settings in _settings.items() for setting in settings]
            raise SettingError(name, Written(value), f"is used nowhere; {nearest(name, everything, _NAMED)}")
        owner = name.rpartition(".")[0]
        if owner in _PARTS:
            allowed = f"would change nothing: the file does not say Experiment.{_PARTS[owner]} = @{owner}()"
            raise SettingError(name, Written(value), allowed)
        if name in overridden:
            raise SettingError(name, Written(value), f"would change nothing: this experiment has no @{owner}()")


def _bound(config: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w./]+) = (.*)$", config, re.MULTILINE))
