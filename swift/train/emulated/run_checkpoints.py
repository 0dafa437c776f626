"""Record and checkpoints of a run in one process, as ``TrainLoop`` keeps them."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from swift.checkpoint.storage.directory import checkpoint_steps
from swift.data.files import DataError
from swift.data.loader import Loader
from swift.errors import RunError
from swift.experts.placement.soundness import unsound_placement
from swift.mesh.live import own_rows
from swift.pipeline.reconfigure.compiled_steps import Steps
from swift.pipeline.train_state import TrainState
from swift.runlog.run_directory import RunDirectory
from swift.train.checkpoints.checkpointer import Checkpointer
from swift.train.display.progress import ProgressDisplay
from swift.train.emulated.cluster import EmulatedCluster
from swift.train.loop import StateKeeper
from swift.train.options import TrainOptions
from swift.train.settings.experiment import Experiment
from swift.train.step_records import Utilization, plan_facts
from swift.train.window_rules import is_due

_MENDED = "once the data are repaired"
_REMEDY = "a lower OptimizerConfig.peak_learning_rate or a smaller OptimizerConfig.clip_norm"


@dataclass(frozen=True)
class RunRecord:
    """The record of a run and its display.

    Attributes:
        directory: its run directory.
        progress: its progress on the terminal.
        utilization: share of a peak that the run reaches.
    """

    directory: RunDirectory
    progress: ProgressDisplay
    utilization: Utilization

    def step(self, record: dict[str, Any]) -> None:
        """Writes and shows the record of an iteration."""
        record = record | self.utilization.mfu(record)
        self.directory.log_step(record)
        self.progress.update(record)

    def plan(self, step: int, steps: Steps) -> None:
        """Writes the plan that runs from the next iteration on; a single worker has none."""
        if not steps.spec.is_single_worker:
            self.directory.log_event("plan", step, **plan_facts(steps))


@dataclass(frozen=True, kw_only=True)
class RunCheckpoints(StateKeeper):
    """The checkpoints of a run, and the errors that end it.

    Attributes:
        experiment: settings of the run.
        options: options of this invocation.
        cluster: live workers.
        checkpointer: writer of checkpoints and snapshots.
        record: record of the run.
        train: batches of the training split, whose position a checkpoint holds.
    """

    experiment: Experiment
    options: TrainOptions
    cluster: EmulatedCluster
    checkpointer: Checkpointer
    record: RunRecord
    train: Loader

    def computed(self, state: TrainState, done: int, records: Sequence[dict[str, Any]]) -> None:  # noqa: ARG002
        """Counts the tokens of every expert, for the choice of those to save."""
        for record in records:
            self.checkpointer.count(record)

    def check(self, record: dict[str, Any]) -> None:
        """Raises RunError if a placement was not sound or a number is not finite."""
        self._check_placed(record["step"], record.get("misplaced"))
        self._check_finite(record["step"], loss=record["loss"], grad_norm=record["grad_norm"])

    def is_due(self, done: int) -> bool:
        """Whether a checkpoint is due, as it is at the end of every invocation that stops early."""
        every, num_steps = self.experiment.checkpoint.every, self.experiment.num_steps
        return is_due(done, every, num_steps) or done == self.options.stop_at

    def save(self, state: TrainState, done: int, evaluate: Callable[[], float]) -> None:
        """Begins a checkpoint, unless its state is of no use."""
        # A record holds the loss and the placement before the update; a checkpoint holds those after it.
        self._check_placed(done, self._misplaced(state))
        self._check_finite(done, loss_after=evaluate())
        self.follow(wait=True)  # one at a time
        self._save(state, done, full=done in (self.experiment.num_steps, self.options.stop_at))

    def end_without_data(self, state: TrainState | None, done: int, error: DataError) -> NoReturn:
        """Saves the last iteration, and raises RunError."""
        if state is not None:
            if self.options.hosts.count == 1:  # no host holds a whole state where there are several
                self.save_last(state, done)
            self.record.directory.log_event("data_lost", done, error=str(error))
        raise RunError(f"{error}: stopped; {self.advice()}, {_MENDED}") from error

    def follow(self, *, wait: bool) -> None:
        """Reports the checkpoint in progress; one that failed is tried again, or left to the next.

        Args:
            wait: whether to wait until it is written.

        Raises:
            RunError: its values are not finite.
        """
        lines = self.checkpointer.follow(wait=wait)
        if self.checkpointer.is_spoilt:
            raise RunError(f"{lines[-1]}: stopped; {self.advice(_REMEDY)}")
        for line in lines:
            self.record.progress.note(line)
        if self.experiment.checkpoint.every:
            self.record.progress.saved(self.checkpointer.newest)

    def save_last(self, state: TrainState, done: int) -> None:
        """Saves the last iteration of an invocation, on all hosts, unless it is saved."""
        self.follow(wait=True)
        if self.options.hosts.of_first(done not in checkpoint_steps(self.record.directory.checkpoints_path)):
            self._save(state, done, full=True)
            self.follow(wait=True)

    def finish(self) -> None:
        """Waits for the last checkpoint while attempts are left; raises RunError if it is not saved."""
        while self.checkpointer.is_busy:
            self.checkpointer.wait(1.0)
            self.follow(wait=False)
        with self.options.hosts.together():
            self.check_saved()

    def check_saved(self) -> None:
        """Raises RunError if the last checkpoint was not saved, after keeping its state elsewhere."""
        kept = self.checkpointer.keep_unsaved()
        if kept is not None:
            raise RunError(f"the last checkpoint was not saved: stopped; {kept}; {self._newest()}")

    def failed(self, error: OSError | RunError) -> RunError:
        """Returns the error that ends a run, after keeping its unsaved state where that is possible."""
        with suppress(OSError, RunError):
            self.checkpointer.follow(wait=True)
        if isinstance(error, OSError):
            return RunError(f"{error}: stopped; {self.advice()}")
        kept = self.checkpointer.keep_unsaved()
        return error if kept is None else RunError(f"{error}; {kept}")

    def advice(self, remedy: str = "") -> str:
        """Returns a phrase on what is saved and how to continue, with a remedy if one is given."""
        kept = self.checkpointer.keep_unsaved()
        if kept is not None:
            return f"{kept}; {self._newest()}" + (f"; resume with {remedy}" if remedy else "")
        steps = checkpoint_steps(self.record.directory.checkpoints_path)
        if not steps:
            return "there is no checkpoint yet; start again in another --run-dir" + (
                f" with {remedy}" if remedy else ""
            )
        how = f"continue with --run-dir {self.options.run_dir} --resume" + (f" and {remedy}" if remedy else "")
        return f"the checkpoint of iteration {steps[-1]} is kept; {how}"

    def _save(self, state: TrainState, done: int, *, full: bool) -> None:
        position = self.train.state() | {"next_step": done}
        self.checkpointer.save(self.cluster.engine.spec, state, position, done, full=full)

    def _newest(self) -> str:
        newest = max(checkpoint_steps(self.record.directory.checkpoints_path), default=None)
        return "no other checkpoint is there" if newest is None else f"the checkpoint of iteration {newest} is there"

    def _check_finite(self, step: int, **measured: float) -> None:
        if all(map(np.isfinite, measured.values())):
            return
        self.checkpointer.follow(wait=True)
        self.record.directory.log_event("not_finite", step, **measured)
        values = ", ".join(f"{name} = {value}" for name, value in measured.items())
        raise RunError(f"{values} at iteration {step}: stopped; {self.advice(_REMEDY)}")

    def _check_placed(self, step: int, flaw: str | None) -> None:
        if flaw is None:
            return
        self.checkpointer.follow(wait=True)
        self.record.directory.log_event("misplaced", step, why=flaw)
        policy, remedy = self.experiment.placement, "a policy that gives every class a slot"
        raise RunError(f"Experiment.placement = {policy!r}: {flaw} at iteration {step}: stopped; {self.advice(remedy)}")

    def _misplaced(self, state: TrainState) -> str | None:
        placement_PLNS = np.concatenate(own_rows(state.placement))
        layers = placement_PLNS.reshape(-1, *placement_PLNS.shape[2:])
        return unsound_placement(layers, self.experiment.experts.num_classes)
