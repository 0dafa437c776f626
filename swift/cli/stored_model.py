"""Finds and loads a model from a run's checkpoint or from a model directory."""

import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from swift.checkpoint.reader import RestorePlan
from swift.config.experiment import Experiment
from swift.config.gin_reader import load_stored
from swift.config.stored import OF_RUN, OF_TRAINING
from swift.errors import SettingError
from swift.models.gpt import GPT, Weights
from swift.runlog.files import METRICS
from swift.train.model_directory import is_model, load_exported


@dataclass(frozen=True)
class StoredModel:
    """A model on disk: the checkpoint of a run, or a model directory.

    Attributes:
        path: directory of the run or the model.
        experiment: settings of the run or the model.
        is_run: whether ``path`` is a run directory.
        asked_step: requested iteration of the checkpoint, ``best`` for the one with the lowest validation loss, or None
            for the newest intact one.
    """

    path: Path
    experiment: Experiment
    is_run: bool
    asked_step: int | Literal["best"] | None

    @cached_property
    def plan(self) -> RestorePlan | None:
        """The plan for restoring the checkpoint; None for a model directory.

        Raises:
            SettingError: there is no such checkpoint, or it is damaged.
        """
        if not self.is_run:
            return None
        from swift.hub.exporting import find_checkpoint

        return find_checkpoint(self.experiment, self.path, self.asked_step)

    @property
    def step(self) -> int | None:
        """Iteration of the checkpoint; None for a model directory."""
        return None if self.plan is None else self.plan.step

    def load(self) -> tuple[GPT, Weights]:
        """Loads the weights into host memory; prints which damaged checkpoints were skipped."""
        if self.plan is None:
            return load_exported(self.experiment, self.path)
        from swift.hub.exporting import load_weights

        for reason in self.plan.passed_over:
            print(f"passed over: {reason}", file=sys.stderr)
        return load_weights(self.experiment, self.path, self.plan)


def find_model(path: Path, setting: str, config: Path | None, step: int | Literal["best"] | None) -> StoredModel:
    """Finds a model and reads its settings.

    Args:
        path: directory of a run or a model.
        setting: name of the command-line argument that gave the path, for errors.
        config: gin file with the user's own classes, or None.
        step: iteration of a run's checkpoint, or ``best``, or None for the newest intact one.

    Raises:
        SettingError: there is no model, or its settings are damaged.
    """
    is_run = (path / METRICS).exists()
    if step is not None and not is_run:
        raise SettingError("--step", step, f"is for a run, and {path} is {'a model' if is_model(path) else 'none'}")
    return StoredModel(
        path, load_stored(path, setting, config, optional_settings=OF_RUN if is_run else OF_TRAINING), is_run, step
    )
