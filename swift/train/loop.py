"""The training loop, shared by runs with emulated and with real failures.

A window of iterations runs as one program while the host reads the batches of the next window. After each window, the
loop writes the records, and evaluates and saves if due. The caller supplies the live workers, the state store and a
function that writes records. This module also decides how long a window may be, and whether every stage's state
survives the failures before the next window.
"""

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import jax

from swift.config.experiment import FAILURES_SETTING, Experiment
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
from swift.train.records import Batches, ValidationBatches, plan_record, step_record, validation_record

if TYPE_CHECKING:
    from swift.config.failures import FailureList


class LiveWorkers(Protocol):
    """The workers that run the iterations; they also decide the window lengths and when the loop ends."""

    @property
    def steps(self) -> Steps:
        """Step functions on the current mesh."""

    @property
    def period_ratio(self) -> float:
        """Planned duration of an iteration, relative to an iteration without failures."""

    def next_window_length(self, done: int) -> int:
        """Returns the next window's length after ``done`` iterations; 0 at the end of the run."""

    def should_stop(self, done: int) -> bool:
        """Returns whether the loop ends after ``done`` iterations."""

    def begin_window(self, state: TrainState, first: int, last: int) -> tuple[TrainState, bool]:
        """Prepares the mesh and state for the iterations ``first`` to ``last``.

        Args:
            state: state before the window; consumed.
            first: first iteration of the window, from 1.
            last: last iteration of the window.

        Returns:
            The state on the mesh that runs the window, and whether the mesh has changed.
        """

    def compile(self, kind: StepKind) -> None:
        """Compiles a program unless it is already compiled; never waits for a peer, so it needs no ``abortable``."""
        self.steps.compiled(kind)

    def window(self, first: int, last: int) -> AbstractContextManager[None]:
        """Context manager around a window, from its compilation to its results."""

    def abortable(self) -> AbstractContextManager[None]:
        """Context manager around work that may wait for a peer, and must be aborted if the peer is dead."""

    def end_window(self, state: TrainState, done: int) -> None:
        """Ends a window, after the evaluation and the save that are due after it."""


class StateStore(Protocol):
    """Stores states so that they survive the loss of a device.

    It may reject iterations whose loss or gradient norm is not finite, or whose placement is invalid.
    """

    def record_window(self, state: TrainState, done: int, records: Sequence[dict[str, Any]]) -> None:
        """Receives the state after a window and the window's records, before the loop writes or saves anything."""

    def check(self, record: dict[str, Any]) -> None:
        """Raises RunError if a record shows an invalid iteration, such as one whose loss is not finite."""

    def validated(self, done: int, loss: float) -> None:
        """Receives the validation loss of the state after ``done`` iterations, before the state is saved."""

    def is_due(self, done: int) -> bool:
        """Returns whether the state after ``done`` iterations is to be saved."""

    def save(self, state: TrainState, done: int, evaluate: Callable[[], float]) -> None:
        """Saves a state.

        Args:
            state: state after ``done`` iterations.
            done: iterations done.
            evaluate: function that computes the state's loss on one batch of the validation split.
        """

    def fail_on_data_error(self, state: TrainState | None, done: int, error: DataError) -> NoReturn:
        """Ends a run whose data can no longer be read.

        Args:
            state: state after ``done`` iterations; None if the loop has run none.
            done: iterations done.
            error: error that says why the data cannot be read.
        """


class _Prefetched(NamedTuple):
    """The batches of the next window or the reason why they cannot be read, and the time spent reading, in seconds."""

    batches: list[Batch]
    error: str | None = None
    read_s: float = 0.0


class _Times(NamedTuple):
    """Duration of an iteration, and the time within it that the host spent reading batches, in seconds."""

    step_s: float
    input_s: float


@dataclass(frozen=True)
class TrainLoop:
    """The loop over a run's iterations, or over those in one generation of processes.

    Attributes:
        experiment: settings of the run.
        train: batches of the training split.
        validation: batches of the validation split.
        live: the workers that run the iterations.
        state_store: store for the states.
        record: function that writes the record of one iteration.
        reads_own: whether ``train`` reads only the sequences of this process's current workers. In that case, batches
            are read again after a change of the mesh.
    """

    experiment: Experiment
    train: Batches
    validation: ValidationBatches
    live: LiveWorkers
    state_store: StateStore
    record: Callable[[dict[str, Any]], None]
    reads_own: bool = False

    def run(self, state: TrainState, done: int) -> int:
        """Runs windows until ``live.should_stop`` ends the loop.

        Args:
            state: state after ``done`` iterations; consumed.
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
            if is_moved and self.reads_own:  # these workers need other sequences than the ones read ahead
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
            # The next window's reading time belongs to this window: it was spent while this window computed.
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
        """Writes a window's records, and evaluates and saves if due after its last iteration.

        Args:
            state: state after ``done`` iterations.
            done: iterations done.
            records: records to write, in order; empty if other processes write them.

        Raises:
            DataError: the validation split cannot be read; the records are written nevertheless.
        """
        for record in records[:-1]:
            self.state_store.check(record)
            self.record(record)
        for record in records[-1:]:  # written below, with the validation loss
            self.state_store.check(record)
        try:
            if is_due(done, self.experiment.eval_every, self.experiment.num_steps):
                validation = self.validate(state)
                self.state_store.validated(done, validation["validation_loss"])
                for record in records[-1:]:
                    record.update(validation)  # in place, as the state store may hold the same record
        except DataError:  # not bound to a name, which would keep this frame and the state alive
            self._record(records[-1:])
            raise
        self._record(records[-1:])
        if self.state_store.is_due(done):
            self.save(state, done)

    def save(self, state: TrainState, done: int) -> None:
        """Saves the state after ``done`` iterations."""
        self.state_store.save(state, done, lambda: self._first_loss(state))

    def validate(self, state: TrainState) -> dict[str, float]:
        """Evaluates a state on the first batches of the validation split, see ``validation_record``."""
        return validation_record(self._evaluator(state), self.validation, self.experiment.num_eval_batches)

    def _first_loss(self, state: TrainState) -> float:
        """Evaluates a state on a single batch, which shows whether it is finite."""
        sources = self.validation.parts[:1]
        return validation_record(self._evaluator(state), self.validation, 1, sources)["validation_loss"]

    def _evaluator(self, state: TrainState) -> Callable[[Batch], Sums]:
        steps = self.live.steps
        self.live.compile("evaluate")

        def evaluate(batch: Batch) -> Sums:
            with self.live.abortable():
                return steps.evaluate(state, batch)

        return evaluate

    def _read(self, done: int) -> _Prefetched:
        """Reads the batches of the window after ``done`` iterations; keeps an error until that window begins."""
        start_time = time.perf_counter()
        try:
            batches = [self.train.batch(step) for step in range(done, done + self.live.next_window_length(done))]
        except DataError as error:
            return _Prefetched([], str(error))
        return _Prefetched(batches, None, time.perf_counter() - start_time)

    def _compute(
        self, state: TrainState, batches: Sequence[Batch], device_batches: Sequence[DeviceBatch], last: int
    ) -> tuple[WindowResult, _Prefetched, list[DeviceBatch]]:
        """Runs a window; while the devices compute, reads the next window's batches and moves them to the devices."""
        steps = self.live.steps
        self.live.compile("single" if len(batches) == 1 else steps.main)
        with self.live.abortable():
            device_batches = device_batches or steps.put(batches)
            # The batches are on the devices already: an implicit transfer here would be a mistake that stalls them.
            with jax.transfer_guard("disallow"):
                finish = steps.start(state, batches, device_batches)
        upcoming = self._read(last)
        with self.live.abortable():
            device_batches = steps.put(upcoming.batches)
            outcome = finish()
            jax.block_until_ready(outcome.state)
        return outcome, upcoming, device_batches

    def _records(self, outcome: WindowResult, first: int, times: _Times) -> list[dict[str, Any]]:
        """Builds the records of a window's iterations."""
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
    """Returns how many iterations run next as one program: ``window``, or 1 if something is due within the window.

    A window cannot be interrupted. Before work that is due within a window, iterations run one at a time, so that only
    two programs are compiled.

    Args:
        window: number of iterations in a window.
        done: iterations done.
        last_step: last iteration of this invocation; a window does not extend past it.
        periods: periods of recurring work, in iterations; 0 for never.
        breaks: other iterations that a window must not extend past.

    >>> [window_length(3, done, 20, periods=(7, 0)) for done in (0, 3, 6, 7, 18)]
    [3, 3, 1, 3, 1]
    """
    inside = range(done + 1, done + window)
    is_cut = done + window > last_step or any(
        step in breaks or any(period and step % period == 0 for period in periods) for step in inside
    )
    return 1 if is_cut else window


def is_due(done: int, every: int, num_steps: int) -> bool:
    """Returns whether work is due that recurs every ``every`` iterations and after the last one; never if it is 0.

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
    """Returns the stages that cannot continue, because they have no live worker or a block whose state is lost.

    A worker may have taken over a role other than its own. A worker that rejoins has copied its stage's state before
    any other worker fails.

    Args:
        topology: topology of the whole cluster.
        rows: workers and their roles before the change.
        before: workers that were down before the change.
        failed: workers that are down after the change.
        chunks: blocks that each role held before the change.
        run_chunks: blocks that each worker holds in its own role after the change.
    """
    live = set(topology.workers) - failed
    surviving_roles = {row.role for row in rows if row.worker not in failed}
    lost = set(range(topology.num_stages)) - {stage for _, stage in live}
    # For each block and pipeline: the stage that held the block before, and the stage that holds it afterwards.
    for held_D, stage_D in zip(chunks.stage_DB.T.tolist(), run_chunks.stage_DB.T.tolist(), strict=True):
        holders = set(enumerate(stage_D))
        # The state survives in a live worker, or in one that has rejoined and copied it.
        has_state = not surviving_roles.isdisjoint(enumerate(held_D)) or not holders.isdisjoint(before - failed)
        if holders.isdisjoint(live) or not has_state:
            lost.update(stage_D)
    return sorted(lost)


def check_failures(engine: Engine, failures: "FailureList", window: int) -> None:
    """Plans for every failure of a list, so that a run that cannot survive them is refused before it starts.

    Args:
        engine: engine of the run.
        failures: listed failures.
        window: number of iterations in a window.

    Raises:
        SettingError: a stage would lose its state, or there is no plan for some of the failures.
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
