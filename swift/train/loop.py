"""The training loop, the same for emulated and for real failures.

A window of iterations runs as one program while the batches of the next one are read; then its records are written, and
what is due after it is evaluated and saved. Three parts are handed in: who is live, who keeps states, and who records.
The rules of windows are here, too: how long one may be, and whether each stage's state survives into the next.
"""

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol

import jax

from swift.config.experiment import FAILURES_SETTING, Experiment, FailureList
from swift.data.sources import DataError
from swift.data.windows import Batch
from swift.errors import SettingError
from swift.mesh.live import MeshRow
from swift.models.cuts import Chunks
from swift.pipeline.reconfigure.compiled_steps import StepKind, Steps, WindowResult
from swift.pipeline.reconfigure.engine import Engine
from swift.pipeline.state import DeviceBatch, TrainState
from swift.pipeline.step.metrics import Sums
from swift.topology import Topology, Worker
from swift.train.records import Batches, mean_loss, plan_record, step_record


class LiveWorkers(Protocol):
    """The workers that run the iterations, and how far they run."""

    @property
    def steps(self) -> Steps:
        """Step functions on the present mesh."""

    @property
    def period_ratio(self) -> float:
        """Planned time of an iteration, as a multiple of that without failures."""

    def next_window_length(self, done: int) -> int:
        """Number of iterations in the window after ``done`` iterations; 0 at the end of the run."""

    def should_stop(self, done: int) -> bool:
        """Whether the loop ends after ``done`` iterations."""

    def begin_window(self, state: TrainState, first: int, last: int) -> tuple[TrainState, bool]:
        """Prepares for the iterations ``first`` to ``last``.

        Args:
            state: state before them; given up.
            first: first iteration of the window, from 1.
            last: last iteration of the window.

        Returns:
            The state on the mesh that runs them, and whether that is another mesh than before.
        """

    def compile(self, kind: StepKind) -> None:
        """Compiles a program unless it was before; no part of what may have to wait for a peer."""
        self.steps.compiled(kind)

    def window(self, first: int, last: int) -> AbstractContextManager[None]:
        """Context of a window, from its compilation to its results."""

    def abortable(self) -> AbstractContextManager[None]:
        """Context of whatever may have to wait for a peer."""

    def end_window(self, state: TrainState, done: int) -> None:
        """Ends a window, with its state, once all that was due after it is done."""


class StateStore(Protocol):
    """Keeps states that outlive the devices, and refuses those that must not be kept."""

    def record_window(self, state: TrainState, done: int, records: Sequence[dict[str, Any]]) -> None:
        """Notes the state after a window and the records of its iterations, before anything else is done with them."""

    def check(self, record: dict[str, Any]) -> None:
        """Raises RunError if the record is of an iteration that must not count."""

    def is_due(self, done: int) -> bool:
        """Whether the state after ``done`` iterations is to be saved."""

    def save(self, state: TrainState, done: int, evaluate: Callable[[], float]) -> None:
        """Saves a state.

        Args:
            state: state after ``done`` iterations.
            done: iterations done.
            evaluate: computes the loss of that state on one batch of the validation split.
        """

    def fail_on_data_error(self, state: TrainState | None, done: int, error: DataError) -> NoReturn:
        """Ends the run where its data cannot be read any more.

        Args:
            state: state after ``done`` iterations; None if the loop has run none.
            done: iterations done.
            error: why the data cannot be read.
        """


class _Prefetched(NamedTuple):
    """The batches of the next window, or why they cannot be read, and the seconds that reading them took."""

    batches: list[Batch]
    error: str | None = None
    read_s: float = 0.0


class _Times(NamedTuple):
    """Seconds of an iteration, and those of them in which batches were read."""

    step_s: float
    input_s: float


@dataclass(frozen=True)
class TrainLoop:
    """The iterations of a run, or of one generation of its processes.

    Attributes:
        experiment: settings of the run.
        train: batches of the training split.
        validation: batches of the validation split.
        live: the workers that run the iterations.
        state_store: store of the states.
        record: writes the record of one iteration.
        reads_own: whether ``train`` reads only what the present workers of this process compute on.
    """

    experiment: Experiment
    train: Batches
    validation: Batches
    live: LiveWorkers
    state_store: StateStore
    record: Callable[[dict[str, Any]], None]
    reads_own: bool = False

    def run(self, state: TrainState, done: int) -> int:
        """Runs windows until the live workers end the loop.

        Args:
            state: state after ``done`` iterations; given up.
            done: iterations done.

        Returns:
            Iterations done at the end.
        """
        start, upcoming, device_batches = done, None, list[DeviceBatch]()
        while not self.live.should_stop(done):
            start_time = time.perf_counter()
            batches, error, read_s = upcoming._replace(read_s=0.0) if upcoming else self._read(done)
            if error is not None:
                self.state_store.fail_on_data_error(state if done > start else None, done, DataError(error))
            first, last = done + 1, done + len(batches)
            state, is_moved = self.live.begin_window(state, first, last)
            if is_moved and self.reads_own:
                batches, error, again_s = self._read(done)
                read_s += again_s
                if error is not None:
                    self.state_store.fail_on_data_error(state if done > start else None, done, DataError(error))
            with self.live.window(first, last):
                outcome, upcoming, device_batches = self._compute(
                    state, batches, [] if is_moved else device_batches, last
                )
            done, state = last, outcome.state
            took_s = time.perf_counter() - start_time
            # A share of this window's own time: that of its batches was spent in the window before.
            read_s += upcoming.read_s
            records = self._records(outcome, first, _Times(took_s / len(batches), read_s / len(batches)))
            self.state_store.record_window(state, done, records)
            try:
                self.finish(state, done, records)
            except DataError as trouble:
                self.state_store.fail_on_data_error(state, done, trouble)
            self.live.end_window(state, done)
        return done

    def finish(self, state: TrainState, done: int, records: Sequence[dict[str, Any]]) -> None:
        """Writes records, and evaluates and saves what is due after the last of them.

        Args:
            state: state after ``done`` iterations.
            done: iterations done.
            records: records to write, in order; none where other processes have them.

        Raises:
            DataError: the validation split cannot be read; the records are written.
        """
        for record in records[:-1]:
            self.state_store.check(record)
            self.record(record)
        for record in records[-1:]:
            self.state_store.check(record)
        try:
            if is_due(done, self.experiment.eval_every, self.experiment.num_steps):
                loss = self.evaluate(state, self.experiment.num_eval_batches)
                for record in records[-1:]:
                    record["validation_loss"] = loss  # in place: the store of states may have the record, too
        except DataError:  # unnamed: an error in a variable would keep this frame, and the state, alive
            self._record(records[-1:])
            raise
        self._record(records[-1:])
        if self.state_store.is_due(done):
            self.save(state, done)

    def save(self, state: TrainState, done: int) -> None:
        """Has the state after ``done`` iterations saved."""
        self.state_store.save(state, done, lambda: self.evaluate(state, 1))

    def evaluate(self, state: TrainState, num_batches: int) -> float:
        """Computes the mean loss of a state on the first batches of the validation split, in nats per token."""
        steps = self.live.steps
        self.live.compile("evaluate")

        def evaluate(batch: Batch) -> Sums:
            with self.live.abortable():
                return steps.evaluate(state, batch)

        return mean_loss(evaluate, self.validation, num_batches)

    def _read(self, done: int) -> _Prefetched:
        """Reads the batches of the window after ``done`` iterations; an error is raised when the window begins."""
        start_time = time.perf_counter()
        try:
            batches = [self.train.batch(step) for step in range(done, done + self.live.next_window_length(done))]
        except DataError as error:
            return _Prefetched([], str(error))
        return _Prefetched(batches, None, time.perf_counter() - start_time)

    def _compute(
        self, state: TrainState, batches: Sequence[Batch], device_batches: Sequence[DeviceBatch], last: int
    ) -> tuple[WindowResult, _Prefetched, list[DeviceBatch]]:
        """Runs a window, and reads the batches of the next one and puts them on the devices while these compute."""
        steps = self.live.steps
        self.live.compile("single" if len(batches) == 1 else steps.main)
        with self.live.abortable():
            device_batches = device_batches or steps.put(batches)
            with jax.transfer_guard("disallow"):
                finish = steps.start(state, batches, device_batches)
        upcoming = self._read(last)
        with self.live.abortable():
            device_batches = steps.put(upcoming.batches)
            outcome = finish()
            jax.block_until_ready(outcome.state)
        return outcome, upcoming, device_batches

    def _records(self, outcome: WindowResult, first: int, times: _Times) -> list[dict[str, Any]]:
        """Makes the records of a window's iterations."""
        steps = self.live.steps
        plan_fields = plan_record(steps, self.live.period_ratio, was_discarded=outcome.was_discarded)
        return [
            step_record(step, metrics, times.step_s, steps.spec, times.input_s) | plan_fields
            for step, metrics in enumerate(outcome.metrics, first)
        ]

    def _record(self, records: Sequence[dict[str, Any]]) -> None:
        for record in records:
            self.record(record)


def window_length(
    window: int, done: int, last_step: int, periods: Collection[int], breaks: Collection[int] = ()
) -> int:
    """Number of iterations that run next as one program: a window, or one if something is due before the window's end.

    Args:
        window: K, iterations of a window.
        done: iterations done.
        last_step: last iteration of this invocation, after which something is due.
        periods: periods, in iterations, of what is due regularly; 0: never.
        breaks: iterations after which something else is due.

    >>> [window_length(3, done, 20, periods=(7, 0)) for done in (0, 3, 6, 7, 18)]
    [3, 3, 1, 3, 1]
    """
    inside = range(done + 1, done + window)
    is_cut = done + window > last_step or any(
        step in breaks or any(period and step % period == 0 for period in periods) for step in inside
    )
    return 1 if is_cut else window


def is_due(done: int, every: int, num_steps: int) -> bool:
    """Whether something is due now that is due every ``every`` iterations and after the last one; 0: never.

    >>> [done for done in range(1, 8) if is_due(done, 3, 7)], is_due(7, 0, 7)
    ([3, 6, 7], False)
    """
    return bool(every) and (done % every == 0 or done == num_steps)


def lost_stages(
    topology: Topology,
    rows: Collection[MeshRow],
    before: frozenset[Worker],
    failed: frozenset[Worker],
    chunks: Chunks,
    run_chunks: Chunks,
) -> list[int]:
    """Returns the stages without a live worker, and those that hold a block without one or of which the state is lost.

    A worker may have another's place. A worker that rejoins has copied the state of its stage before any other fails.

    Args:
        topology: whole cluster.
        rows: workers and the places that they have had so far.
        before: workers that were down.
        failed: workers that are down from now on.
        chunks: what the workers hold in these places.
        run_chunks: what they hold in their own, from now on.
    """
    live = set(topology.workers) - failed
    surviving_roles = {row.role for row in rows if row.worker not in failed}
    lost = set(range(topology.num_stages)) - {stage for _, stage in live}
    for held_D, stage_D in zip(chunks.stage_DB.T.tolist(), run_chunks.stage_DB.T.tolist(), strict=True):
        holders = set(enumerate(stage_D))
        has_state = not surviving_roles.isdisjoint(enumerate(held_D)) or not holders.isdisjoint(before - failed)
        if holders.isdisjoint(live) or not has_state:
            lost.update(stage_D)
    return sorted(lost)


def check_failures(engine: Engine, failures: FailureList, window: int) -> None:
    """Plans for all failures of a list, before anything has run.

    Raises:
        SettingError: a stage's state is lost, or there is no plan for some of the failures.
    """
    topology, before, run_chunks = engine.spec.live.topology, frozenset[Worker](), engine.own_chunks
    rows = engine.configure(before).rows
    for step in sorted({event.step for event in failures.events}):
        failed = failures.failed(step, step + window - 1)
        for stage in lost_stages(topology, rows, before, failed, run_chunks, run_chunks):
            allowed = f"leave no worker with the state of stage {stage} at step {step}"
            raise SettingError(
                FAILURES_SETTING, ["{} {}:{}".format(event.kind, *event.worker) for event in failures.events], allowed
            )
        rows, before = engine.configure(failed).rows, failed
