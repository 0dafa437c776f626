"""Reads gin files and overrides into an Experiment or a Pipeline; the only module that imports gin.

A gin file is a program: it imports modules and calls what it names. So only files that the user names on the command
line, and the files they include, go through gin; they are looked up in the working directory and the package. The
configuration of a run or a model is read as data instead, see ``load_stored``.

The names in gin files are the names of the frozen dataclasses. The text kept with a run (``config_text``) is written
from the finished Experiment with all its settings, so it does not depend on defaults, and reading it back gives an
equal Experiment.
"""

import importlib
import inspect
import os
import re
import tokenize
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gin

import swift
from swift.checkpoint.config import CheckpointConfig
from swift.config.experiment import Experiment
from swift.config.mistakes import Source, build_mistake, parse_mistake, suggest
from swift.config.stored import StoredObject, UnreadableConfig, build, parts, read_config, user_classes
from swift.data.config import DataConfig, Mixture
from swift.data.operators import DropDuplicates, Filter, Map, Pack, Shuffle, Stack, Tokenize
from swift.data.pipeline import Pipeline
from swift.data.records import ArrayRecords, Documents, JsonLines
from swift.data.sources import StandardLibrary, TextFiles, TokenFile
from swift.data.tables import DatasetDirectory, ParquetFiles
from swift.data.tokenizer import ByteTokenizer, TokenizerFile
from swift.errors import SettingError, error_line, first_line
from swift.experts.config import ExpertConfig
from swift.experts.optimizer import OptimizerConfig
from swift.experts.placement.flexmoe import FlexMoE
from swift.experts.placement.packed import MinMax, Packed
from swift.experts.placement.policy import Static
from swift.experts.placement.symi import Symi
from swift.models.config import ModelConfig, model_size
from swift.topology import Topology
from swift.typed import SourceText, checked, fitting

_KINDS = (
    *(Experiment, ModelConfig, ExpertConfig, Topology, OptimizerConfig, CheckpointConfig, model_size),
    *(DataConfig, StandardLibrary, TextFiles, TokenFile, ByteTokenizer, TokenizerFile),
    *(Mixture, Pipeline, Documents, JsonLines, ArrayRecords, ParquetFiles, DatasetDirectory),
    *(Map, Filter, DropDuplicates, Tokenize, Shuffle, Pack, Stack),
    *(Static, Symi, MinMax, Packed, FlexMoE),
)
_NAMED = "a setting is named like Experiment.num_steps"
_SCOPE = re.compile(r"@((?:\w+/)+)")
_PARTS = {
    "ExpertConfig": "experts",
    "Topology": "topology",
    "OptimizerConfig": "optimizer",
    "DataConfig": "data",
    "CheckpointConfig": "checkpoint",
}
"""Parts that every experiment has exactly once, with no alternative class: the setting that holds each."""

CONFIGURABLES: Mapping[str, Callable] = {kind.__name__: kind for kind in _KINDS}
"""Classes and functions that a gin file can set, by name."""
_settings = {name: tuple(inspect.signature(kind).parameters) for name, kind in CONFIGURABLES.items()}
_configurable = {
    name: gin.external_configurable(checked(kind, CONFIGURABLES), name=name, module="swift")
    for name, kind in CONFIGURABLES.items()
}


def load_experiment(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Reads an experiment.

    Args:
        path: gin file.
        overrides: texts ``NAME=VALUE`` from the command line; a bare word as the value is a string.

    Raises:
        SettingError: the file cannot be read, a name is unknown (the message suggests the nearest one), a value
            cannot work, or an override would change nothing.
    """
    return _build("Experiment", path, overrides)


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

    gin.clear_config()
    _parse_file(path)
    names = _bound(gin.config_str())
    if "Pipeline.source" in names and not any(name.startswith(("Experiment.", "DataConfig.")) for name in names):
        return (_build("Pipeline", path, overrides),)
    return training_pipelines(_build("Experiment", path, overrides).data)


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


def _build(kind: str, path: Path, overrides: Sequence[str]) -> Any:
    """Builds an object of a class from a gin file's bindings and ``--set`` overrides."""
    gin.clear_config()  # gin's bindings are global
    _parse_file(path)
    for text in overrides:
        _parse(_binding(text), Source("--set", text))
    try:
        built = _configurable[kind]()
    except Exception as error:  # a user's own class may raise anything
        raise build_mistake(error, str(path)) from error
    _check_used(overrides)
    return built


def _parse_file(path: Path) -> None:
    for text, file in _gin_texts(path):
        _parse(text, Source("CONFIG", str(file)))


def _gin_texts(path: Path, including: tuple[Path, ...] = ()) -> Iterator[tuple[str, Path]]:
    """Yields the texts of a file and the files it includes, in the order in which gin has to parse them.

    An ``include`` is relative to the including file, while gin itself would look in the working directory. Modules that
    a file imports are imported here.

    Args:
        path: gin file.
        including: the chain of files that include it, outermost first.

    Yields:
        (text, with line feeds in front so that gin's errors name the right line; path of its file).

    Raises:
        SettingError: a file cannot be read, includes itself, or imports a module that cannot be imported.
    """
    path = _installed(path)
    lines, first = _read(path, including).splitlines(), 0

    def text(end: int) -> str:
        return "\n" * first + "\n".join(lines[first:end])

    for number, line in enumerate(lines):
        imported = re.fullmatch(r"\s*import\s+([\w.]+)\s*(#.*)?", line)
        if imported:
            _import(imported[1], number + 1, path)
        include = re.fullmatch(r"\s*include\s+['\"](.*)['\"]\s*(#.*)?", line)
        if include:
            yield text(number), path
            yield from _gin_texts(_resolve_include(path, include[1]), (*including, path))
            first = number + 1
    yield text(len(lines)), path


def _resolve_include(path: Path, name: str) -> Path:
    """Resolves an ``include``: relative to the including file, else among the experiments that ship with Swift."""
    included, shipped = path.parent / name, _installed(Path(name))
    return shipped if shipped != Path(name) and not included.exists() else included


def _import(name: str, line: int, path: Path) -> None:
    """Imports a module that a file names, before gin does: gin would report the module's errors as the file's."""
    try:
        importlib.import_module(name)
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename][1:]
        location = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
        reason = f"{location} raises {error_line(error)}" if frames else first_line(error)
        raise SettingError("CONFIG", str(path), f"line {line} cannot be followed: {reason}") from error


def _read(path: Path, including: tuple[Path, ...]) -> str:
    names = " includes ".join(map(str, (*including, path)))
    if os.path.realpath(path) in map(os.path.realpath, including):
        raise SettingError("CONFIG", names, "a file cannot include itself")
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise SettingError("CONFIG", names, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingError("CONFIG", names, f"is not UTF-8 text (byte {error.start})") from error


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

    An unused setting is an error if it is an override, a bare ``name = value``, in a scope that no value names, or in a
    part that every experiment has. Unused settings of an alternative may stay: an included file may set
    ``FlexMoE.interval``, and the including file chooses another policy.
    """
    used, unused = _bound(gin.operative_config_str()), _bound(gin.config_str())
    overridden = [text.partition("=")[0].strip() for text in overrides]
    scopes = {scope.rstrip("/") for value in unused.values() for scope in _SCOPE.findall(value)}
    for name, value in unused.items():
        if any(_is_within(used_name, name) for used_name in used):
            continue
        if "." not in name:
            everything = [f"{owner}.{setting}" for owner, settings in _settings.items() for setting in settings]
            raise SettingError(name, SourceText(value), f"is used nowhere; {suggest(name, everything, _NAMED)}")
        owner = name.rpartition(".")[0]
        scope, _, kind = owner.rpartition("/")
        if scope and (kind in ("Experiment", *_PARTS) or not any(f"{s}/".startswith(f"{scope}/") for s in scopes)):
            raise SettingError(name, SourceText(value), f"would change nothing: this experiment has no @{owner}()")
        if owner in _PARTS:
            allowed = f"would change nothing: the file does not say Experiment.{_PARTS[owner]} = @{owner}()"
            raise SettingError(name, SourceText(value), allowed)
        if name in overridden:
            raise SettingError(name, SourceText(value), f"would change nothing: this experiment has no @{owner}()")


def _is_within(name: str, other: str) -> bool:
    """Whether ``name`` is the same setting as ``other``, in the same scope or in a scope inside it."""
    (scope, _, setting), (other_scope, _, other_setting) = name.rpartition("/"), other.rpartition("/")
    return setting == other_setting and (not other_scope or f"{scope}/".startswith(f"{other_scope}/"))


def _bound(config: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w./]+) = (.*)$", config, re.MULTILINE))
