"""Reads run directories, checks that a run may begin or continue in one, and measures runs. Does not import JAX.

Shape suffixes: T steps.
"""

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from swift.errors import SettingError, printable
from swift.runlog.expert_counts import CLASS_COUNTS
from swift.runlog.files import EVENTS, METRICS, Metrics, parse_object, read_events, read_metrics

CONFIG, SUMMARY = "config.gin", "summary.json"
_OF_RUNS = ("config.json", CLASS_COUNTS, "report.html")
"""Other files that a run writes, or that its command writes at the end."""
_NUM_LOSS_STEPS, _NUM_COMPILING_STEPS = 10, 3


@dataclass(frozen=True)
class Run:
    """A run, as read from its directory.

    Attributes:
        path: run directory.
        name: name of the run in ``summary.json``, or else the name of the directory; control characters are escaped.
        config_text: operative configuration, as gin.
        metrics: one record per step, by step.
        events: events such as failures, recoveries and checkpoints; each has ``time``, ``event`` and ``step``.
        summary: content of ``summary.json``, which is written when the run ends; None before that.
    """

    path: Path
    name: str
    config_text: str
    metrics: Metrics
    events: list[dict[str, Any]]
    summary: dict[str, Any] | None


def read_run(path: str | Path, setting: str = "RUN_DIR") -> Run:
    """Reads and checks a run directory; the run may be in progress.

    Args:
        path: run directory.
        setting: argument that named the directory, for errors.

    Raises:
        SettingError: the directory holds no run, or a file in it is damaged. An incomplete last line does not count as
            damage and is skipped: the run died while it wrote the line, or is still writing it.
    """
    path = Path(path)
    config_text, summary = _read_config(path, setting), read_summary(path)
    name = printable(str((summary or {}).get("name") or path.resolve().name))
    return Run(path, name, config_text, read_metrics(path), read_events(path), summary)


def is_run(path: Path) -> bool:
    """Whether a directory holds a run. A directory with only a lease, left by an early interrupt, does not."""
    return (path / CONFIG).is_file()


def check_is_run(path: Path, setting: str = "RUN_DIR") -> None:
    """Raises SettingError if a directory holds no run."""
    if not is_run(path):
        raise SettingError(setting, str(path), f"holds no run: there is no {CONFIG} in it")


def check_new_run(path: Path) -> None:
    """Raises SettingError if a directory already holds a run or its files, or cannot be created or written to."""
    if re.fullmatch(r"[A-Za-z][\w+.-]+:", path.parts[0] if path.parts else ""):  # a Path of gs://bucket begins with gs:
        raise SettingError("--run-dir", str(path), "is a URL; runs are written to directories of this machine")
    present = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not present.is_dir() or not os.access(present, os.W_OK):
        raise SettingError("--run-dir", str(path), f"{present} is not a directory that can be written to")
    if any((path / name).exists() for name in (CONFIG, METRICS, EVENTS, SUMMARY)):
        raise SettingError("--run-dir", str(path), "holds a run already; add --resume to continue it")
    for name in _OF_RUNS:
        if os.path.lexists(path / name) and not (name == "config.json" and _is_stored_config(path / name)):
            allowed = f"holds a file {name}, which a run would replace; choose another directory"
            raise SettingError("--run-dir", str(path), allowed)
    checkpoints = path / "checkpoints"
    if os.path.lexists(checkpoints) and not (checkpoints.is_dir() and not any(checkpoints.iterdir())):
        allowed = "holds checkpoints, and no run; choose another directory"
        raise SettingError("--run-dir", str(path), allowed)


def _is_stored_config(path: Path) -> bool:
    """Whether a file is a run's stored configuration, which a start leaves if it is interrupted before any record."""
    document = parse_object(path.read_bytes()) if path.is_file() and not path.is_symlink() else None
    return document is not None and document.keys() == {"version", "experiment"}


def check_same_run(
    path: Path, config_text: str, may_change: Collection[str] = (), may_lack: Collection[str] = ()
) -> None:
    """Checks that a directory holds a run with the given configuration; does not read the record.

    Args:
        path: run directory.
        config_text: operative configuration with which the run is to continue.
        may_change: settings that may differ from the run's, such as ``Experiment.num_steps``.
        may_lack: settings that the run's configuration may lack, since they are newer than the run and have their
            default value.

    Raises:
        SettingError: the directory holds no run, or a run with another configuration.
    """
    for name, (before, now) in changed_settings(path, config_text).items():
        if name not in may_change and not (before is None and name in may_lack):
            texts = [" ".join((text or f"no {name}").split()) for text in (before, now)]
            allowed = f"the run has `{texts[0]}`, this configuration has `{texts[1]}`"
            raise SettingError("--resume", str(path), f"{allowed}; start a new run in another --run-dir")


def changed_settings(path: Path, config_text: str) -> dict[str, tuple[str | None, str | None]]:
    """Compares a run's configuration with another one.

    Returns:
        For each setting that differs, by name: its statement in the run's configuration, and its statement in the other
        one; None where a configuration lacks the setting.

    Raises:
        SettingError: the directory holds no run.
    """
    before, now = settings_in(_read_config(path, "--run-dir")), settings_in(config_text)
    return {
        name: (before.get(name), now.get(name))
        for name in dict.fromkeys((*before, *now))
        if before.get(name) != now.get(name)
    }


def settings_in(config_text: str) -> dict[str, str]:
    """Splits the text of a gin file into statements, by the name that each binds.

    An indented line continues the line above.
    """
    statements: list[str] = []
    for line in config_text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if line[0].isspace() and statements:
            statements[-1] += "\n" + line
        else:
            statements.append(line)
    return {statement.partition("=")[0].strip(): statement for statement in statements}


def _read_config(path: Path, setting: str) -> str:
    """Reads the operative configuration of a run; raises SettingError if the directory holds none."""
    check_is_run(path, setting)
    try:
        return (path / CONFIG).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SettingError(str(path / CONFIG), f"byte {error.start}", "is damaged: not UTF-8 text") from error


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """Reads the summary of a run; None if the run has not reached its end. Raises SettingError if it is damaged."""
    path = run_dir / SUMMARY
    if not path.exists():
        return None
    summary = parse_object(path.read_bytes())
    if summary is None:
        raise SettingError("summary", str(path), "is damaged: not a JSON object")
    return summary


def measure(run: Run, target_loss: float | None) -> dict[str, Any]:
    """Computes summary figures of a run from its metrics.

    Args:
        run: run, finished or in progress.
        target_loss: target in nats per token, for ``steps_to_target``; None if the run has no target.

    Returns:
        The figures by name; None for a value that the run does not have. ``final_loss`` is the mean loss of the last 10
        steps, in nats per token. ``dropped_percent`` is the percentage of all routed tokens that were dropped.
        ``steps_to_target`` is the step at which the loss reaches the target, see :func:`steps_to_target`.
        ``median_step_ms`` excludes the first 3 steps, which compile. ``discarded_percent`` is the percentage of steps
        whose window was run again step by step. ``validation_loss`` and ``validation_bits_per_byte`` are the newest.

    Raises:
        SettingError: the metrics are damaged.
    """
    losses_T, step_ms_T = (scalars(run, name) for name in ("loss", "step_ms"))
    dropped, routed = (np.nansum(scalars(run, name)) for name in ("tokens_dropped", "tokens_routed"))
    num_to_target = steps_to_target(losses_T, target_loss)
    discarded_T = scalars(run, "was_discarded")
    discarded_T = discarded_T[np.isfinite(discarded_T)]
    return {
        "final_loss": _finite(np.mean(losses_T[-_NUM_LOSS_STEPS:])) if losses_T.size else None,
        "dropped_percent": _finite(100 * ratio(dropped, routed)),
        "steps_to_target": int(run.metrics.steps_T[num_to_target - 1]) if num_to_target else None,
        "median_step_ms": _median(step_ms_T[_NUM_COMPILING_STEPS:]),
        "discarded_percent": _finite(100 * np.mean(discarded_T)) if discarded_T.size else None,
        **{name: newest(scalars(run, name)) for name in ("validation_loss", "validation_bits_per_byte")},
    }


def newest(values_T: np.ndarray) -> float | None:
    """Returns the last finite value; None if there is none."""
    values = values_T[np.isfinite(values_T)]
    return float(values[-1]) if values.size else None


def steps_to_target(losses_T: np.ndarray, target_loss: float | None) -> int | None:
    """Counts the steps until the mean loss of 10 consecutive steps is at most the target.

    Args:
        losses_T: float64[T], loss of each step in nats per token; NaN if it was not finite.
        target_loss: target in nats per token; None if the run has no target.

    Returns:
        Number of steps up to and including the first one that reaches the target; None if no step does.
    """
    if target_loss is None:
        return None
    reached_T = running_mean(losses_T, _NUM_LOSS_STEPS) <= target_loss
    return int(reached_T.argmax()) + 1 if reached_T.any() else None


def scalars(run: Run, name: str) -> np.ndarray:
    """Returns one metric over the run's steps, float64[T], see ``Metrics.scalars``."""
    return run.metrics.scalars(name)


def ratio(counts: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Returns ``counts / totals``; NaN where a total is 0."""
    totals = np.broadcast_to(totals, counts.shape)
    return np.divide(counts, totals, out=np.full(counts.shape, np.nan), where=totals != 0)


def running_mean(values_T: np.ndarray, window: int) -> np.ndarray:
    """Computes the mean of the last ``window`` values at each step.

    Returns:
        float64[T]; NaN in the first ``window - 1`` steps, and where one of the values is NaN.
    """
    means_T = np.full(len(values_T), np.nan)
    if len(values_T) >= window:
        means_T[window - 1 :] = np.lib.stride_tricks.sliding_window_view(values_T, window).mean(axis=-1)
    return means_T


def _median(values: np.ndarray) -> float | None:
    values = values[np.isfinite(values)]
    return float(np.median(values)) if values.size else None


def _finite(value: np.ndarray) -> float | None:
    return float(value) if np.isfinite(value) else None
