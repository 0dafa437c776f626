"""A run in one process: emulated failures, checkpoints and records, as ``TrainLoop`` takes them."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import jax

from swift.errors import RunError
from swift.pipeline.reconfigure.compiled_steps import StepKind, Steps
from swift.pipeline.train_state import TrainState
from swift.train.emulated.cluster import EmulatedCluster, StateLost
from swift.train.emulated.run_checkpoints import RunCheckpoints, RunRecord
from swift.train.interrupt import Interrupt
from swift.train.loop import LiveWorkers
from swift.train.options import TrainOptions
from swift.train.settings.experiment import Experiment
from swift.train.start import next_length
from swift.train.step_records import plan_record


@dataclass(frozen=True, kw_only=True)
class EmulatedWorkers(LiveWorkers):
    """The workers of an emulated cluster, as they fail and rejoin.

    Attributes:
        experiment: settings of the run.
        options: options of this invocation.
        cluster: live workers and their engine.
        checkpoints: checkpoints of the run.
        record: record of the run.
        interrupt: signals that stop it.
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
        """Step functions of the present configuration."""
        return self.cluster.engine.steps

    @property
    def period_ratio(self) -> float:
        """Planned time of an iteration, as a multiple of that without failures."""
        return self.cluster.engine.period_ratio

    def window_after(self, done: int) -> int:
        """Number of iterations in the next window, see ``window_length``."""
        return next_length(self.experiment, self.options, done, self.last_step) if done < self.last_step else 0

    def is_over(self, done: int) -> bool:
        """Whether the invocation has run its last iteration."""
        return done >= self.last_step

    def enter(self, state: TrainState, first: int, last: int) -> tuple[TrainState, bool]:
        """Reconfigures the run if other workers are live in these iterations."""
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
        """Compiles a program on all hosts before one of them runs it: gloo gives up on one that comes 30 s late."""
        if not self.steps.is_compiled(kind):
            self.steps.compiled(kind)
            self.options.hosts.gather(None)

    @contextmanager
    def window(self, first: int, last: int) -> Iterator[None]:
        """Traces the iterations that the user asked for; no window begins before them and ends among them.

        Of several hosts, the first traces its own devices.
        """
        traced = self.options.profile if self.options.hosts.is_first else None
        path = self.record.directory.path / "profile"
        if traced and first == traced[0]:
            jax.profiler.start_trace(path)
        with jax.profiler.StepTraceAnnotation("iteration", step_num=first) if traced else nullcontext():
            yield
        self.interrupt.hold()  # now there is an iteration to be saved
        if traced and last == traced[1]:
            jax.profiler.stop_trace()
            self.record.progress.note(f"profiler trace of iterations {traced[0]}-{traced[1]} in {path}")

    def computing(self) -> AbstractContextManager[None]:
        """Empty context: no peer is waited for."""
        return nullcontext()

    def leave(self, state: TrainState, done: int) -> None:
        """Reports what happened in the background; raises KeyboardInterrupt, once the run is saved, after a signal."""
        for why in self.cluster.troubles():
            self.record.directory.log_event("prepare_failed", done, error=why)
            self.record.progress.note(f"could not be prepared {why}")
        self.checkpoints.follow(wait=False)
        if not self.options.hosts.any(self.interrupt.requested):
            return
        # Saved also where a run has no checkpoints otherwise: --resume needs one.
        self.record.progress.note(f"saving iteration {done}")
        self.checkpoints.save_last(state, done)
        self.record.directory.log_event("interrupt", done)
        with self.options.hosts.together():
            self.checkpoints.check_saved()
        self.record.progress.note(f"interrupted after iteration {done}, which is saved; --resume continues from it")
        self.options.hosts.separate()
        raise KeyboardInterrupt
