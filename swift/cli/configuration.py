"""gin at the edge: text -> an Experiment, and an Experiment -> its whole text. Nothing else imports gin.

A gin file is a program: it imports modules and calls what it names. Only files that the user names on the command line
go through gin; the configuration of a run or a model is read as data, see ``load_stored``.

gin names are the names of the frozen dataclasses. The text kept with a run is written from the finished Experiment with
all its settings, so that it does not depend on defaults, and reading it back gives an equal Experiment.
"""

import inspect
import re
import tokenize
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gin

from swift.checkpoint.config import CheckpointConfig
from swift.cli.options.gin_files import gin_texts
from swift.cli.options.kinds import Written, checked, fitting
from swift.cli.options.mistakes import Source, build_mistake, nearest, parse_mistake
from swift.data.config import DataConfig, Mixture
from swift.data.corpus import readings
from swift.data.pipeline.operators import DropDuplicates, Filter, Map, Pack, Shuffle, Stack, Tokenize
from swift.data.pipeline.pipeline import Pipeline
from swift.data.records.array_records import ArrayRecords
from swift.data.records.documents import Documents
from swift.data.records.lines import JsonLines
from swift.data.records.tables import DatasetDirectory, ParquetFiles
from swift.data.sources import StandardLibrary, TextFiles, TokenFile
from swift.data.tokenizer import ByteTokenizer, TokenizerFile
from swift.errors import SettingError
from swift.experts.config import ExpertConfig
from swift.experts.optimizer_config import OptimizerConfig
from swift.experts.placement.flexmoe import FlexMoE
from swift.experts.placement.minmax import MinMax
from swift.experts.placement.packed import Packed
from swift.experts.placement.static import Static
from swift.experts.placement.symi import Symi
from swift.models.config import ModelConfig
from swift.models.sizes import model_size
from swift.topology import Topology
from swift.train.settings.config_text import config_text, own_kinds
from swift.train.settings.experiment import Experiment
from swift.train.settings.stored_config import StoredObject, UnreadableConfig, made, parts, read_config

__all__ = [
    "CONFIGURABLES",
    "config_text",
    "load_experiment",
    "load_pipeline",
    "load_pipelines",
    "load_stored",
]

_KINDS = (
    *(Experiment, ModelConfig, ExpertConfig, Topology, OptimizerConfig, CheckpointConfig, model_size),
    *(DataConfig, StandardLibrary, TextFiles, TokenFile, ByteTokenizer, TokenizerFile),
    *(Mixture, Pipeline, Documents, JsonLines, ArrayRecords, ParquetFiles, DatasetDirectory),
    *(Map, Filter, DropDuplicates, Tokenize, Shuffle, Pack, Stack),
    *(Static, Symi, MinMax, Packed, FlexMoE),
)
_NAMED = "a setting is named like Experiment.num_steps"
CONFIGURABLES: Mapping[str, Callable] = {kind.__name__: kind for kind in _KINDS}
"""Classes and functions that a gin file can set, by name."""
_SCOPE = re.compile(r"@((?:\w+/)+)")
_settings = {name: tuple(inspect.signature(kind).parameters) for name, kind in CONFIGURABLES.items()}
_configurable = {
    name: gin.external_configurable(checked(kind, CONFIGURABLES), name=name, module="swift")
    for name, kind in CONFIGURABLES.items()
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
    return _built("Experiment", path, overrides)


def load_pipeline(path: Path, overrides: Sequence[str] = ()) -> Pipeline:
    """Reads the one pipeline of a file, see ``load_pipelines``.

    Raises:
        SettingError: see ``load_pipelines``; or there are several.
    """
    pipelines = load_pipelines(path, overrides)
    if len(pipelines) > 1:
        allowed = (
            f"has {len(pipelines)} sources of documents: name one, as with --set DataConfig.source=@NAME/Pipeline()"
        )
        raise SettingError("DataConfig.source", Written("@Mixture()"), allowed)
    return pipelines[0]


def load_pipelines(path: Path, overrides: Sequence[str] = ()) -> tuple[Pipeline, ...]:
    """Reads the pipelines of an experiment's training data, see ``readings``; or the one that a file has alone.

    Args:
        path: gin file.
        overrides: see ``load_experiment``.

    Raises:
        SettingError: see ``load_experiment``; or the data are not documents.
    """
    gin.clear_config()
    _parse_file(path)
    names = _bound(gin.config_str())
    if "Pipeline.source" in names and not any(name.startswith(("Experiment.", "DataConfig.")) for name in names):
        return (_built("Pipeline", path, overrides),)
    return readings(_built("Experiment", path, overrides).data)


def _built(kind: str, path: Path, overrides: Sequence[str]) -> Any:
    """Makes what a file and overrides say of a class."""
    gin.clear_config()
    _parse_file(path)
    for text in overrides:
        _parse(_binding(text), Source("--set", text))
    try:
        made = _configurable[kind]()
    except Exception as error:  # of any kind, by a class of the user's own
        raise build_mistake(error, str(path)) from error
    _check_used(overrides)
    return made


def load_stored(
    directory: Path,
    setting: str,
    config: Path | None,
    spared: Sequence[str] = (),
    *,
    option: str = "--config",
    beside: Experiment | None = None,
) -> Experiment:
    """Reads the experiment of a run or a model as data.

    Args:
        directory: directory of the run or the model.
        setting: name of the argument that gave it, for errors.
        config: gin file whose experiment has the user's own classes that this one has; or None.
        spared: settings that may keep their defaults if they are of such a class.
        option: name of the argument that gives ``config``, for errors.
        beside: experiment that has such classes where no file is named.

    Raises:
        SettingError: the configuration is damaged, not plain data, or has an unknown class.
    """
    named = beside if config is None else load_experiment(config)
    own = {} if named is None else dict(own_kinds(named))

    def find(part: StoredObject) -> Callable[..., Any] | None:
        kind = None if part.module else CONFIGURABLES.get(part.kind)
        return checked(kind, CONFIGURABLES) if isinstance(kind, type) else own.get(part.kind)

    try:
        part = read_config(directory, spared)
        missing = next((one for one in parts(part, spared) if find(one) is None), None)
        if missing is None:
            return _with_own_tokenizer(made(part, find, spared), directory)
    except UnreadableConfig as error:
        raise SettingError(setting, str(directory), str(error)) from error
    name = ".".join(filter(None, (missing.module, missing.kind)))
    if config is not None:
        raise SettingError(
            option, str(config), f"its experiment has no @{missing.kind}(), and {directory} needs {name}"
        )
    allowed = f"needs {name}, which is not Swift's own: name a gin file whose experiment has it with {option} FILE"
    raise SettingError(setting, str(directory), allowed)


def _with_own_tokenizer(experiment: Experiment, directory: Path) -> Experiment:
    """The experiment with the tokenizer's file of its directory, where the one it names is gone: models are moved."""
    data = experiment.data
    if not isinstance(data.tokenizer, TokenizerFile) or Path(data.tokenizer.path).is_file():
        return experiment
    own = (directory / Path(data.tokenizer.path).name).resolve()
    if not own.is_file():
        return experiment
    return replace(experiment, data=replace(data, tokenizer=replace(data.tokenizer, path=str(own))))


def _parse_file(path: Path) -> None:
    for text, file in gin_texts(path):
        _parse(text, Source("CONFIG", str(file)))


def _parse(text: str, source: Source) -> None:
    try:
        gin.parse_config(text)
    except (SyntaxError, tokenize.TokenError, ValueError, ImportError, RecursionError, MemoryError) as error:
        raise parse_mistake(error, source, _settings, _values_of) from error


def _values_of(setting: str) -> list[str]:
    """Returns the names that can follow ``@`` in a setting such as ``Experiment.placement``."""
    owner, _, name = setting.rpartition(".")
    kind = CONFIGURABLES.get(owner.rpartition(".")[2].rpartition("/")[2])
    return fitting(typing.get_type_hints(kind).get(name) if kind else None, CONFIGURABLES)


def _binding(text: str) -> str:
    binding = re.fullmatch(r"\s*([\w./]+)\s*=\s*(.*?)\s*", text)
    if not binding:
        raise SettingError("--set", text, "must be NAME=VALUE, such as Experiment.num_steps=100")
    name, value = binding[1], binding[2]
    if not value.startswith(("@", "%", "'", '"', "(", "[", "{")):
        try:
            gin.config.parse_value(value)
        except (SyntaxError, RecursionError, MemoryError):
            value = repr(value)
    return f"{name} = {value}"


def _check_used(overrides: Sequence[str]) -> None:
    """Refuses settings that would be ignored silently.

    These are an override, a bare ``name = value``, a setting of a scope that no value names, or one of a part that
    every experiment has, if it is not used. Settings of one choice among several may stay: an included file sets
    ``FlexMoE.interval``, and the file that includes it chooses another policy.
    """
    used, unused = _bound(gin.operative_config_str()), _bound(gin.config_str())
    overridden = [text.partition("=")[0].strip() for text in overrides]
    scopes = {scope.rstrip("/") for value in unused.values() for scope in _SCOPE.findall(value)}
    for name, value in unused.items():
        if any(_is_within(one, name) for one in used):
            continue
        if "." not in name:
            everything = [f"{owner}.{setting}" for owner, settings in _settings.items() for setting in settings]
            raise SettingError(name, Written(value), f"is used nowhere; {nearest(name, everything, _NAMED)}")
        owner = name.rpartition(".")[0]
        scope, _, kind = owner.rpartition("/")
        if scope and (kind in ("Experiment", *_PARTS) or not any(f"{one}/".startswith(f"{scope}/") for one in scopes)):
            raise SettingError(name, Written(value), f"would change nothing: this experiment has no @{owner}()")
        if owner in _PARTS:
            allowed = f"would change nothing: the file does not say Experiment.{_PARTS[owner]} = @{owner}()"
            raise SettingError(name, Written(value), allowed)
        if name in overridden:
            raise SettingError(name, Written(value), f"would change nothing: this experiment has no @{owner}()")


def _is_within(name: str, other: str) -> bool:
    """Whether a setting, by its name, is another one in the same scope or one inside that."""
    (scope, _, setting), (other_scope, _, other_setting) = name.rpartition("/"), other.rpartition("/")
    return setting == other_setting and (not other_scope or f"{scope}/".startswith(f"{other_scope}/"))


def _bound(config: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w./]+) = (.*)$", config, re.MULTILINE))
