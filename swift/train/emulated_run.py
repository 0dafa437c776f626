"""The parts that ``TrainLoop`` needs for a run in one process: emulated workers, checkpoints, and the record.

``EmulatedWorkers`` manages the live workers. ``RunCheckpoints`` saves states, and ends a run whose values are not
finite or whose placement is invalid. Both write to the ``RunRecord``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import jax
import numpy as np

from swift.checkpoint.manifest import checkpoint_steps
from swift.checkpoint.saver import newest_text
from swift.config.experiment import Experiment
from swift.data.loader import Loader, state_at
from swift.data.sources import DataError
from swift.errors import RunError
from swift.experts.placement.replicas import placement_error
from swift.mesh.live import local_rows
from swift.pipeline.reconfigure.compiled_steps import StepKind, Steps
from swift.pipeline.state import TrainState
from swift.runlog.run_directory import RunDirectory
from swift.train.checkpointer import Checkpointer
from swift.train.display import ProgressDisplay
from swift.train.emulated import EmulatedCluster, StateLost
from swift.train.interrupt import Interrupt
from swift.train.loop import LiveWorkers, StateStore, is_due
from swift.train.records import Utilization, plan_facts, plan_record
from swift.train.start import TrainOptions, next_length

_MENDED = "once the data are repaired"
_REMEDY = "a lower OptimizerConfig.peak_learning_rate or a smaller OptimizerConfig.clip_norm"


@dataclass(frozen=True)
class RunRecord:
    """The record of a run, and its display.

    Attributes:
        directory: run directory.
        progress: display on the terminal.
        utilization: FLOPs and peak from which the run's MFU is computed.
        last_lines: functions that yield lines to show after the run, when no other host waits for this one.
    """

    directory: RunDirectory
    progress: ProgressDisplay
    utilization: Utilization
    last_lines: list[Callable[[], Iterator[str]]] = field(default_factory=list)

    def show_last_lines(self) -> None:
        """Shows the lines that take long to compute."""
        for lines in self.last_lines:
            for line in lines():
                self.progress.note(line)

    def step(self, record: dict[str, Any]) -> None:
        """Writes and shows the record of an iteration."""
        record = record | self.utilization.mfu(record)
        self.directory.log_step(record)
        self.progress.update(record)

    def plan(self, step: int, steps: Steps) -> None:
        """Writes the plan for the iterations after ``step``; a single worker has no plan."""
        if not steps.spec.is_single_worker:
            self.directory.log_event("plan", step, **plan_facts(steps))


@dataclass(frozen=True, kw_only=True)
class RunCheckpoints(StateStore):
    """The checkpoints of a run, and the errors that end the run.

    Attributes:
        experiment: settings of the run.
        options: options of this invocation.
        cluster: live workers and their engine.
        checkpointer: writer of checkpoints and snapshots.
        record: record of the run.
        train: loader of the training split, whose position is saved in checkpoints.
    """

    experiment: Experiment
    options: TrainOptions
    cluster: EmulatedCluster
    checkpointer: Checkpointer
    record: RunRecord
    train: Loader

    def record_window(self, state: TrainState, done: int, records: Sequence[dict[str, Any]]) -> None:  # noqa: ARG002
        """Counts every expert's token updates, which decide what the next checkpoint saves."""
        for record in records:
            self.checkpointer.count(record)

    def check(self, record: dict[str, Any]) -> None:
        """Raises RunError if the placement is invalid, or the loss or the gradient's norm is not finite."""
        self._check_placed(record["step"], record.get("invalid_placement"))
        self._check_finite(record["step"], loss=record["loss"], grad_norm=record["grad_norm"])

    def validated(self, done: int, loss: float) -> None:
        """Counts the evaluations since the validation loss has improved."""
        self.checkpointer.validations = self.checkpointer.validations.with_loss(done, loss)

    def is_due(self, done: int) -> bool:
        """Returns whether a checkpoint is due; one is always due at ``stop_at``, and where the run stops early."""
        every, num_steps = self.experiment.checkpoint.every, self.experiment.num_steps
        return (
            is_due(done, every, num_steps)
            or done == self.options.stop_at
            or self.checkpointer.validations.ends_early(self.experiment)
        )

    def save(self, state: TrainState, done: int, evaluate: Callable[[], float]) -> None:
        """Begins a checkpoint; raises RunError if the state is not finite or its placement is invalid."""
        # The records have the loss and placement before the update, but a checkpoint has the state after it.
        self._check_placed(done, _invalid_placement(state, self.experiment.experts.num_classes))
        self._check_finite(done, loss_after=evaluate())
        self.follow(wait=True)  # one at a time
        is_last = done in (self.experiment.num_steps, self.options.stop_at)
        self._save(state, done, full=is_last or self.checkpointer.validations.ends_early(self.experiment))

    def fail_on_data_error(self, state: TrainState | None, done: int, error: DataError) -> NoReturn:
        """Saves the last iteration if the loop ran on a single host, then raises RunError."""
        if state is not None:
            if self.options.hosts.count == 1:  # of several hosts, none holds a whole state
                self.save_last(state, done)
            self.record.directory.log_event("data_unreadable", done, error=str(error))
        raise RunError(f"{error}: stopped; {self.advice()}, {_MENDED}") from error

    def follow(self, *, wait: bool) -> None:
        """Reports the progress of the current checkpoint; failed attempts are shown and do not end the run.

        Args:
            wait: whether to wait until the checkpoint has ended.

        Raises:
            RunError: the values of the checkpoint are not finite.
        """
        lines = self.checkpointer.follow(wait=wait)
        if self.checkpointer.is_spoilt:
            raise RunError(f"{lines[-1]}: stopped; {self.advice(_REMEDY)}")
        for line in lines:
            self.record.progress.note(line)
        if self.experiment.checkpoint.every:
            self.record.progress.saved(self.checkpointer.newest)

    def save_last(self, state: TrainState, done: int) -> None:
        """Saves the last iteration of an invocation on all hosts, unless it is already saved."""
        self.follow(wait=True)
        if self.options.hosts.broadcast(done not in checkpoint_steps(self.record.directory.checkpoints_path)):
            self._save(state, done, full=True)
            self.follow(wait=True)

    def finish(self) -> None:
        """Waits for the last checkpoint, including retries; raises RunError if it could not be saved."""
        while self.checkpointer.is_busy:
            self.checkpointer.wait(1.0)
            self.follow(wait=False)
        with self.options.hosts.all_or_none():
            self.check_saved()

    def check_saved(self) -> None:
        """If the last checkpoint was not saved, writes it to a fallback directory and raises RunError."""
        fallback_text = self.checkpointer.keep_unsaved()
        if fallback_text is not None:
            raise RunError(
                f"the last checkpoint was not saved: stopped; {fallback_text}; {_newest(self.record.directory)}"
            )

    def failed(self, error: OSError | RunError) -> RunError:
        """Returns the error that ends a run, after writing its unsaved state to a fallback directory if possible."""
        with suppress(OSError, RunError):
            self.checkpointer.follow(wait=True)
        if isinstance(error, OSError):
            return RunError(f"{error}: stopped; {self.advice()}")
        fallback_text = self.checkpointer.keep_unsaved()
        return error if fallback_text is None else RunError(f"{error}; {fallback_text}")

    def advice(self, remedy: str = "") -> str:
        """Returns a phrase that names the newest saved state and says how to continue, with ``remedy`` if given."""
        fallback_text = self.checkpointer.keep_unsaved()
        if fallback_text is not None:
            return f"{fallback_text}; {_newest(self.record.directory)}" + (f"; resume with {remedy}" if remedy else "")
        steps = checkpoint_steps(self.record.directory.checkpoints_path)
        if not steps:
            return "there is no checkpoint yet; start again in another --run-dir" + (
                f" with {remedy}" if remedy else ""
            )
        command = f"continue with --run-dir {self.options.run_dir} --resume" + (f" and {remedy}" if remedy else "")
        return f"the checkpoint of iteration {steps[-1]} is kept; {command}"

    def _save(self, state: TrainState, done: int, *, full: bool) -> None:
        position = state_at(self.train.state(), done)
        self.checkpointer.save(self.cluster.engine.spec, state, position, done, full=full)

    def _check_finite(self, step: int, **measured: float) -> None:
        if all(map(np.isfinite, measured.values())):
            return
        self.checkpointer.follow(wait=True)
        self.record.directory.log_event("non_finite", step, **measured)
        values = ", ".join(f"{name} = {value}" for name, value in measured.items())
        raise RunError(f"{values} at iteration {step}: stopped; {self.advice(_REMEDY)}")

    def _check_placed(self, step: int, flaw: str | None) -> None:
        if flaw is None:
            return
        self.checkpointer.follow(wait=True)
        self.record.directory.log_event("invalid_placement", step, reason=flaw)
        policy, remedy = self.experiment.placement, "a policy that gives every class a slot"
        raise RunError(f"Experiment.placement = {policy!r}: {flaw} at iteration {step}: stopped; {self.advice(remedy)}")


def _newest(directory: RunDirectory) -> str:
    return newest_text(max(checkpoint_steps(directory.checkpoints_path), default=None))


def _invalid_placement(state: TrainState, num_classes: int) -> str | None:
    placement_PLNS = np.concatenate(local_rows(state.placement))
    layers = placement_PLNS.reshape(-1, *placement_PLNS.shape[2:])
    return placement_error(layers, num_classes)


@dataclass(frozen=True, kw_only=True)
class EmulatedWorkers(LiveWorkers):
    """The workers of an emulated cluster, which fail and rejoin.

    Attributes:
        experiment: settings of the run.
        options: options of this invocation.
        cluster: live workers and their engine.
        checkpoints: checkpoints of the run.
        record: record of the run.
        interrupt: handler of Ctrl-C and SIGTERM.
        last_step: last iteration of this invocation.
    """

    experiment: Experiment
    options: TrainOptions
    cluster: EmulatedCluster
    checkpoints: RunCheckpoints
    record: RunRecord
    interrupt: Interrupt
    last_step: int

    @property
    def steps(self) -> Steps:
        """Step functions of the current configuration."""
        return self.cluster.engine.steps

    @property
    def period_ratio(self) -> float:
        """Planned duration of an iteration, relative to an iteration without failures."""
        return self.cluster.engine.period_ratio

    def next_window_length(self, done: int) -> int:
        """Returns the next window's length, see ``window_length``; 0 at the end of the invocation."""
        return next_length(self.experiment, self.options, done, self.last_step) if done < self.last_step else 0

    def should_stop(self, done: int) -> bool:
        """Returns whether the invocation has run its last iteration, or the validation loss no longer improves."""
        validations = self.checkpoints.checkpointer.validations
        return done >= self.last_step or validations.ends_early(self.experiment)

    def begin_window(self, state: TrainState, first: int, last: int) -> tuple[TrainState, bool]:
        """Reconfigures the run if workers fail or rejoin in these iterations, or if a better cut is ready."""
        self.checkpoints.checkpointer.snapshot(self.steps.spec, state, first - 1)
        down = self.cluster.change(first, last)
        if down is None:
            return state, False
        self.checkpoints.follow(wait=True)
        directory, checkpointer = self.record.directory, self.checkpoints.checkpointer
        try:
            followed = self.cluster.follow(state, down, first, checkpointer)
        except StateLost as lost:
            directory.log_event(lost.event, first, **lost.facts)
            raise RunError(f"{lost}: stopped; {self.checkpoints.advice(lost.remedy)}") from None
        engine = self.cluster.engine
        checkpointer.snapshot(engine.spec, followed.state, first - 1)
        directory.log_event(
            "reconfigure",
            first,
            **followed.facts,
            **plan_record(engine.steps, engine.period_ratio),
            live_workers=engine.num_live,
            live_ranks=engine.spec.live.num_ranks,
            stash_bytes_per_rank=engine.stash_bytes,
        )
        self.record.plan(first, engine.steps)
        for line in followed.lines:
            self.record.progress.note(f"iteration {first}: {line}")
        return followed.state, True

    def compile(self, kind: StepKind) -> None:
        """Compiles a program on all hosts before any host runs it, since gloo times out on a host that is 30 s late."""
        if not self.steps.is_compiled(kind):
            self.steps.compiled(kind)
            self.options.hosts.gather(None)

    @contextmanager
    def window(self, first: int, last: int) -> Iterator[None]:
        """Traces the iterations of ``--profile``; ``next_length`` ends windows where the trace begins and ends.

        With several hosts, only the first traces, and only its own devices.
        """
        from swift.train.trace_parts import part_lines, trace_line  # a run without a trace does not need it

        traced = self.options.profile if self.options.hosts.is_first else None
        path = self.record.directory.path / "profile"
        if traced and first == traced[0]:
            jax.profiler.start_trace(path)
        with jax.profiler.StepTraceAnnotation("iteration", step_num=first) if traced else nullcontext():
            yield
        self.interrupt.hold()  # before the first window, there is nothing to save, and a signal ends the run at once
        if traced and last == traced[1]:
            jax.profiler.stop_trace()
            self.record.progress.note(trace_line(path, traced))
            self.record.last_lines.append(partial(part_lines, path, traced, self.steps.program_texts))

    def abortable(self) -> AbstractContextManager[None]:
        """Returns an empty context: emulated workers never wait for a peer."""
        return nullcontext()

    def end_window(self, state: TrainState, done: int) -> None:
        """Reports background work. After a signal, saves the run and raises KeyboardInterrupt."""
        for reason in self.cluster.background_errors():
            self.record.directory.log_event("compile_failed", done, error=reason)
            self.record.progress.note(f"could not be prepared {reason}")
        self.checkpoints.follow(wait=False)
        if not self.options.hosts.any(self.interrupt.requested):
            return
        # Save even if the run is configured without checkpoints, as --resume needs one.
        self.record.progress.note(f"saving iteration {done}")
        self.checkpoints.save_last(state, done)
        self.record.directory.log_event("interrupt", done)
        with self.options.hosts.all_or_none():
            self.checkpoints.check_saved()
        self.record.progress.note(f"interrupted after iteration {done}, which is saved; --resume continues from it")
        self.options.hosts.separate()
        raise KeyboardInterrupt
