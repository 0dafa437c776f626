"""gin at the edge: text -> an Experiment, and an Experiment -> its whole text. Nothing else imports gin.

gin names are the names of the frozen dataclasses. The text that is kept with a run is written from the finished
Experiment, every setting of it, so it does not depend on what was left at its default, and reading it back gives an
equal Experiment.
"""

import dataclasses
import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gin

from swift.data import ByteTokenizer, DataConfig, StandardLibrary, TextFiles, TokenFile, TokenizerFile
from swift.errors import SettingError
from swift.experts import ExpertConfig
from swift.experts.optimizer import OptimizerConfig
from swift.experts.placement import FlexMoE, MinMax, Static, Symi
from swift.mesh import Topology
from swift.models import ModelConfig, model_size
from swift.train import Experiment

_CONFIGURABLES = (
    *(Experiment, ModelConfig, ExpertConfig, Topology, OptimizerConfig, model_size),
    *(DataConfig, StandardLibrary, TextFiles, TokenFile, ByteTokenizer, TokenizerFile),
    *(Static, Symi, MinMax, FlexMoE),
)
_configurable = {c.__name__: gin.external_configurable(c, module="swift") for c in _CONFIGURABLES}


def load_experiment(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Reads an experiment.

    Args:
        path: a gin file.
        overrides: ``NAME=VALUE`` of the command line; a bare word as a value is a string.

    Raises:
        SettingError: the file cannot be read, a name is not known (the nearest one is named), or a value cannot work.
    """
    gin.clear_config()
    try:
        _parse_file(path)
        gin.parse_config([_binding(text) for text in overrides])
        return _configurable["Experiment"]()
    except SettingError:
        raise
    except SyntaxError as error:
        raise SettingError("CONFIG", str(path), f"line {error.lineno} is not gin: {error.msg}") from error
    except (OSError, ValueError, TypeError, AttributeError, ImportError, RuntimeError) as error:
        raise _explained(error, path) from error


def _parse_file(path: Path) -> None:
    """Parses a gin file; ``include`` names a file beside it, where gin would look in the working directory."""
    lines, first = path.read_text(encoding="utf-8").splitlines(), 0
    for number, line in enumerate([*lines, "include ''"]):
        include = re.fullmatch(r"\s*include\s+['\"](.*)['\"]\s*(#.*)?", line)
        if include is None:
            continue
        gin.parse_config("\n" * first + "\n".join(lines[first:number]))  # so that errors name the right line
        first = number + 1
        if include[1]:
            _parse_file(path.parent / include[1])


def _binding(text: str) -> str:
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[\w./]+", name.strip()):
        raise SettingError("--set", text, "must be NAME=VALUE, such as Experiment.num_steps=100")
    try:
        gin.config.parse_value(value.strip())
    except (SyntaxError, ValueError):
        value = repr(value.strip())
    return f"{name.strip()} = {value}"


def _explained(error: Exception, path: Path) -> SettingError:
    """The user's mistake behind one of gin's errors."""
    original = _innermost_setting_error(error)
    if original is not None:
        return original
    message = " ".join(str(error).split())
    parameter = re.search(r"onfigurable '?([\w.]+)'? doesn't have a parameter named '(\w+)'", message)
    if parameter:
        owner, name = parameter[1].split(".")[-1], parameter[2]
        return SettingError(f"{owner}.{name}", "?", _nearest(name, _parameters(owner), "a setting"))
    unknown = re.search(r"No configurable matching (?:reference )?'?@?([\w./]+)'?", message)
    if unknown:
        return SettingError(unknown[1].rstrip("."), "?", _nearest(unknown[1], _configurable, "a name"))
    if isinstance(error, OSError):
        return SettingError("CONFIG", str(path), "no such file, or it cannot be read")
    return SettingError("CONFIG", str(path), message.split(" In call to ")[0])


def _innermost_setting_error(error: BaseException | None) -> SettingError | None:
    # gin re-raises a constructor's error as a subclass of its own making, with a longer text.
    while error is not None:
        if isinstance(error, SettingError):
            return SettingError(error.setting, error.value, error.allowed)
        error = error.__cause__ or error.__context__
    return None


def _parameters(owner: str) -> list[str]:
    kind = _configurable.get(owner)
    return [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else ["name"]


def _nearest(name: str, known: Any, what: str) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"is not {what}; did you mean {near[0]}?" if near else f"is not {what}; known are {', '.join(known)}"


def config_text(experiment: Experiment) -> str:
    """The whole experiment as gin, one setting a line; reading it gives an equal experiment."""
    lines = list(_render(experiment))
    imports = sorted({f"import {module}" for module in _foreign_modules(experiment)})
    return "\n".join([*imports, *lines]) + "\n"


def _render(value: Any) -> Iterator[str]:
    name, parts = type(value).__name__, []
    for field in dataclasses.fields(value):
        if not field.init:
            continue
        setting = getattr(value, field.name)
        if dataclasses.is_dataclass(setting):
            yield f"{name}.{field.name} = @{type(setting).__name__}()"
            parts.append(setting)
        else:
            yield f"{name}.{field.name} = {setting!r}"
    for part in parts:
        yield from _render(part)


def _foreign_modules(value: Any) -> Iterator[str]:
    module = type(value).__module__
    if not module.startswith("swift."):
        yield module
    for field in dataclasses.fields(value):
        part = getattr(value, field.name)
        if dataclasses.is_dataclass(part):
            yield from _foreign_modules(part)
