"""Makes an Experiment or a Pipeline from a gin file and overrides; reads the stored configuration of a run or a model.

Parsing a gin file executes nothing, see ``swift.config.bindings``. Making the experiment imports the modules that the
file names, and calls the classes and functions that it names: use only files that you would run. The configuration of a
run or a model is data alone, see ``load_stored``.

The names in gin files are the names of the frozen dataclasses, and of the classes and functions in imported modules.
A setting applies to every object of its class, wherever the object comes from: ``@ModelConfig()``, the default of
another setting, or a preset such as ``@model_size()``.
"""

import importlib
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import swift
from swift.checkpoint.config import CheckpointConfig
from swift.config.bindings import Bindings, Reference, parse_override, read_file
from swift.config.experiment import Experiment
from swift.config.maker import Maker
from swift.config.stored import StoredObject, UnreadableConfig, build, parts, read_config, user_classes
from swift.data.config import DataConfig, Mixture
from swift.data.operators import Chat, DropDuplicates, Filter, Map, Pack, Shuffle, Stack, Tokenize
from swift.data.pipeline import Pipeline
from swift.data.records import ArrayRecords, Documents, JsonLines
from swift.data.sources import StandardLibrary, TextFiles, TokenFile
from swift.data.tables import DatasetDirectory, ParquetFiles
from swift.data.tokenizer import ByteTokenizer, TokenizerFile
from swift.errors import SettingError, error_line, first_line
from swift.experts.config import ExactCapacity, ExpertConfig, RankCapacity, SlotCapacity
from swift.experts.optimizer import OptimizerConfig
from swift.experts.placement.flexmoe import FlexMoE
from swift.experts.placement.packed import MinMax, Packed
from swift.experts.placement.policy import Static
from swift.experts.placement.symi import Symi
from swift.experts.routers import ExpertChoice, NoisyTopK, Sinkhorn, TopK
from swift.models.config import ModelConfig, model_size
from swift.topology import Topology
from swift.typed import SourceText, checked

_KINDS = (
    *(Experiment, ModelConfig, ExpertConfig, Topology, OptimizerConfig, CheckpointConfig, model_size),
    *(DataConfig, StandardLibrary, TextFiles, TokenFile, ByteTokenizer, TokenizerFile),
    *(Mixture, Pipeline, Documents, JsonLines, ArrayRecords, ParquetFiles, DatasetDirectory),
    *(Map, Filter, DropDuplicates, Tokenize, Chat, Shuffle, Pack, Stack),
    *(SlotCapacity, RankCapacity, ExactCapacity, TopK, NoisyTopK, Sinkhorn, ExpertChoice),
    *(Static, Symi, MinMax, Packed, FlexMoE),
)

CONFIGURABLES: Mapping[str, Callable] = {kind.__name__: kind for kind in _KINDS}
"""Swift's classes and functions that a gin file can name."""


def load_experiment(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Reads an experiment.

    Args:
        path: gin file.
        overrides: texts ``NAME=VALUE`` from the command line, where NAME is ``OptimizerConfig.clip_norm`` or the path
            ``optimizer.clip_norm``; a bare word as the value is a text.

    Raises:
        SettingError: the file cannot be read, a name is unknown (the message suggests the nearest one), a value
            cannot work, or a setting would change nothing.
    """
    return _make("Experiment", path, _read(path), overrides)


def load_pipeline(path: Path, overrides: Sequence[str] = ()) -> Pipeline:
    """Reads the only pipeline of a file, see ``load_pipelines``.

    Raises:
        SettingError: see ``load_pipelines``; or the file has several pipelines.
    """
    pipelines = load_pipelines(path, overrides)
    if len(pipelines) > 1:
        allowed = (
            f"has {len(pipelines)} sources of documents: name one, as with --set DataConfig.source=@NAME/Pipeline()"
        )
        raise SettingError("DataConfig.source", SourceText("@Mixture()"), allowed)
    return pipelines[0]


def load_pipelines(path: Path, overrides: Sequence[str] = ()) -> tuple[Pipeline, ...]:
    """Reads the pipelines of an experiment's training data, or the only pipeline in a file without experiment.

    Args:
        path: gin file.
        overrides: see ``load_experiment``.

    Raises:
        SettingError: see ``load_experiment``; or the training data do not come from documents.
    """
    from swift.data.corpus import training_pipelines

    bindings = _read(path)
    settings = bindings.by_setting
    if "Pipeline.source" in settings and not any(name.startswith(("Experiment.", "DataConfig.")) for name in settings):
        return (_make("Pipeline", path, bindings, overrides),)
    return training_pipelines(_make("Experiment", path, bindings, overrides).data)


def load_stored(
    directory: Path,
    setting: str,
    config: Path | None,
    optional_settings: Sequence[str] = (),
    *,
    option: str = "--config",
    beside: Experiment | None = None,
) -> Experiment:
    """Reads the experiment of a run or a model as data, without executing anything.

    Args:
        directory: directory of the run or the model.
        setting: argument that named the directory, for errors.
        config: gin file with an experiment that uses the same classes of the user's own; None: no such file.
        optional_settings: settings that keep their defaults if their class is a user's own and is not found.
        option: argument that names ``config``, for errors.
        beside: experiment to take the user's own classes from if no file is named.

    Raises:
        SettingError: the configuration is damaged, not plain data, or has an unknown class.
    """
    named = beside if config is None else load_experiment(config)
    classes = {} if named is None else dict(user_classes(named))

    def find(part: StoredObject) -> Callable[..., Any] | None:
        kind = None if part.module else CONFIGURABLES.get(part.kind)
        return checked(kind, CONFIGURABLES) if isinstance(kind, type) else classes.get(part.kind)

    try:
        part = read_config(directory, optional_settings)
        missing = next((inner for inner in parts(part, optional_settings) if find(inner) is None), None)
        if missing is None:
            return _with_own_tokenizer(build(part, find, optional_settings), directory)
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
    """Replaces a lost tokenizer file by the copy in the directory, if there is one: models get moved."""
    data = experiment.data
    if not isinstance(data.tokenizer, TokenizerFile) or Path(data.tokenizer.path).is_file():
        return experiment
    tokenizer_path = (directory / Path(data.tokenizer.path).name).resolve()
    if not tokenizer_path.is_file():
        return experiment
    return replace(experiment, data=replace(data, tokenizer=replace(data.tokenizer, path=str(tokenizer_path))))


def all_installed(paths: Sequence[Path]) -> list[Path]:
    """Resolves paths of experiments; a pattern that the shell did not expand refers to the package's experiments."""
    all_paths = []
    for path in paths:
        folder = _installed(path.parent)
        matching = sorted(folder.glob(path.name)) if "*" in path.name and folder != path.parent else []
        all_paths += matching or [path]
    return all_paths


def _installed(path: Path) -> Path:
    """Resolves ``experiments/...``: in the working directory, or else among the experiments that ship with Swift."""
    package = Path(swift.__file__).parent
    if path.exists() or path.parts[:1] != ("experiments",):
        return path
    return next((root / path for root in (package, package.parent) if (root / path).exists()), path)


def _read(path: Path) -> Bindings:
    return read_file(path, _installed)


def _make(kind: str, path: Path, bindings: Bindings, overrides: Sequence[str]) -> Any:
    """Makes an object of a class from a file's bindings and ``--set`` overrides, and checks an experiment."""
    modules = [_import(name, line, file) for name, (file, line) in bindings.modules.items()]
    maker = Maker.of(kind, bindings, map(parse_override, overrides), _names(modules), CONFIGURABLES, str(path))
    with maker.locating_errors():
        made = maker.make(Reference(kind, "", True))
        if isinstance(made, Experiment):
            from swift.config.checks import check  # here, since it cuts and plans, which stored models do not need

            check(made)
    maker.check_used()
    return made


def _import(name: str, line: int, path: str) -> ModuleType:
    """Imports a module that a file names."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename][1:]
        location = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
        reason = f"{location} raises {error_line(error)}" if frames else first_line(error)
        raise SettingError("CONFIG", path, f"line {line} cannot be followed: {reason}") from error


def _names(modules: Sequence[ModuleType]) -> dict[str, Callable]:
    """Returns the classes and functions that a file can name: Swift's, and those of the imported modules' packages.

    Each has two names, such as ``Trapezoid`` and ``my_optimizer.Trapezoid``. The short name of something of Swift's
    always means that; a short name that would stand for two others stands for none.
    """
    qualified = dict[str, Callable]()
    for module in modules:
        package = module.__name__.partition(".")[0]
        for name, value in vars(module).items():
            defined_in = str(getattr(value, "__module__", ""))
            if callable(value) and name[0] != "_" and defined_in.partition(".")[0] == package:
                qualified[f"{module.__name__}.{name}"] = value
    kinds = defaultdict[str, list[Callable]](list)
    for name, kind in qualified.items():
        kinds[name.rpartition(".")[2]].append(kind)
    short = {name: kind for name, (kind, *others) in kinds.items() if all(kind is other for other in others)}
    own = {f"swift.{name}": kind for name, kind in CONFIGURABLES.items()}
    return own | qualified | short | dict(CONFIGURABLES)
