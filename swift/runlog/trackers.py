"""Experiment trackers as observers: Weights & Biases and MLflow, each an optional dependency (extra).

Server, account and project are configured by the trackers' own environment variables and files.
"""

import importlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from swift.errors import SettingError
from swift.files import replace_file
from swift.runlog.observers import Observer, grouped_scalars

_AXIS = "train/step"
"""W&B metric that holds the iteration: the x-axis of all charts."""
_DEFAULT_EXPERIMENT = "0"
_MOST_METRICS = 1000  # of one call
"""MLflow's experiment for runs that name no experiment."""


class WandB(Observer):
    """Logs a run to Weights & Biases, under its directory's name; a resumed run continues there.

    Raises:
        SettingError: the package ``wandb`` is not installed.
    """

    def __init__(self) -> None:
        self._wandb = _package("wandb")
        self._run: Any = None

    def begin(self, run_dir: Path, step: int, config: str) -> None:
        """See Observer."""
        del step
        self._run = self._wandb.init(
            name=run_dir.name,
            id=_known_id(run_dir / "wandb.id"),
            resume="allow",
            dir=str(run_dir),
            config=_pairs(config),
        )
        # W&B drops values below its own step counter, such as iterations that a resumed run repeats. A separate metric
        # as the x-axis avoids that.
        self._run.define_metric(_AXIS)
        self._run.define_metric("*", step_metric=_AXIS)

    def on_step(self, record: Mapping[str, Any]) -> None:
        """See Observer."""
        self._run.log({**grouped_scalars(record), _AXIS: record["step"]})

    def end(self) -> None:
        """See Observer."""
        self._run.finish()


class MLflow(Observer):
    """Logs a run to MLflow, under its directory's name; a resumed run continues there.

    Raises:
        SettingError: the package ``mlflow`` is not installed.
    """

    def __init__(self) -> None:
        self._mlflow = _package("mlflow")
        self._client: Any = self._mlflow.MlflowClient()
        self._run_id = ""

    def begin(self, run_dir: Path, step: int, config: str) -> None:
        """See Observer."""
        del step
        known = run_dir / "mlflow.id"
        if known.exists():
            self._run_id = known.read_text()
            self._client.update_run(self._run_id, status="RUNNING")
            return
        self._run_id = self._client.create_run(self._experiment_id(), run_name=run_dir.name).info.run_id
        replace_file(known, self._run_id.encode())
        param = self._mlflow.entities.Param
        params = [param(name.replace("@", ""), value) for name, value in _pairs(config).items()]
        self._client.log_batch(self._run_id, params=params)

    def on_step(self, record: Mapping[str, Any]) -> None:
        """See Observer."""
        metric, now_ms = self._mlflow.entities.Metric, int(1000 * time.time())
        metrics = [metric(tag, value, now_ms, record["step"]) for tag, value in grouped_scalars(record).items()]
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + _MOST_METRICS])

    def _experiment_id(self) -> str:
        """Returns the ID of the experiment named by MLflow's environment variables, which its client does not read.

        Like ``mlflow.start_run``, creates the experiment if its name is new.
        """
        chosen, name = (os.environ.get(f"MLFLOW_EXPERIMENT_{what}") for what in ("ID", "NAME"))
        if chosen or not name:
            return chosen or _DEFAULT_EXPERIMENT
        experiment = self._client.get_experiment_by_name(name)
        return self._client.create_experiment(name) if experiment is None else experiment.experiment_id

    def end(self) -> None:
        """See Observer."""
        self._client.set_terminated(self._run_id)


TRACKERS: Mapping[str, Callable[[], Observer]] = {"wandb": WandB, "mlflow": MLflow}
"""Trackers, by the values of ``--logger``."""


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise SettingError("--logger", name, f"is not installed: pip install 'swift-moe[{name}]'") from None


def _known_id(path: Path) -> str:
    """Returns a run's ID in a tracker, from a file; the first call generates the ID and writes the file."""
    if not path.exists():
        replace_file(path, uuid4().hex.encode())
    return path.read_text()


def _pairs(config: str) -> dict[str, str]:
    """Splits a configuration into settings and their values."""
    statements = (line.partition(" = ") for line in config.splitlines())
    return {name: value for name, separator, value in statements if separator}
