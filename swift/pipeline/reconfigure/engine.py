"""The engine of a run in one process: changes plan, programs and state from one configuration to the next."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import pairwise
from queue import SimpleQueue
from types import TracebackType
from typing import Literal, Self

import jax

from swift.data.windows import Batch
from swift.models.cuts import Chunks
from swift.pipeline.reconfigure.compiled_steps import Steps, WindowResult
from swift.pipeline.reconfigure.configuration import Configuration, PlanSettings, neighbours
from swift.pipeline.reconfigure.recut import Cuts, PreparedRecut, Recut, check_recut
from swift.pipeline.reconfigure.transfer import DeviceTransfer, move_between_processes
from swift.pipeline.state import DeviceBatch, TrainState
from swift.pipeline.step.metrics import Sums
from swift.pipeline.step.spec import StepSpec
from swift.schedules.planners.names import FAULT_FREE
from swift.tasks import one_thread
from swift.topology import Worker, worker_names

Prepare = Literal["none", "next"]


@dataclass(frozen=True)
class Reconfiguration:
    """Cost of changing the configuration.

    Attributes:
        prepared: whether the plan, the program and the transfer of the state were ready in advance.
        plan_ms: time to plan, ms.
        compile_ms: time to compile the program of most iterations, or to wait for it, ms.
        move_ms: time to move the state, ms.
        moved_bytes: bytes moved between devices.
    """

    prepared: bool
    plan_ms: float
    compile_ms: float
    move_ms: float
    moved_bytes: int


class Engine:
    """Manages the configurations of a run; a context manager, since it may compile in the background.

    Args:
        spec: step spec on the live mesh of all workers.
        settings: settings of all plans.
        num_sequences: sequences of a micro-batch, over all expert ranks.
        prepare: ``next`` plans and compiles, in the background, the configurations that one worker's failure or return
            would lead to.
        failed: workers that are down at the start.

    Raises:
        SettingError: a stage has no survivor, or the planner cannot plan for the failures.
    """

    def __init__(
        self,
        spec: StepSpec,
        settings: PlanSettings,
        num_sequences: int,
        prepare: Prepare = "none",
        failed: frozenset[Worker] = frozenset(),
    ):
        self._num_sequences, self._cuts = num_sequences, Cuts(spec, settings, num_sequences)
        self._recut: Recut | None = None
        self._looks_ahead = prepare == "next" and settings.planner not in FAULT_FREE
        self._steps: dict[tuple[Recut | None, frozenset[Worker]], Steps] = {}
        self._moves: dict[tuple[Steps, Steps], DeviceTransfer] = {}  # with compiled programs
        self._background = one_thread("prepare")
        self._pending: list[Future[None]] = []
        self._troubles: SimpleQueue[str] = SimpleQueue()
        self._is_x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]
        self._fault_free = self.configure(frozenset())
        self.steps = self._steps_for(failed, None)

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def open(self) -> Self:
        """Starts background preparation; ``close`` must follow."""
        self._prepare_next()
        return self

    def close(self, *, wait: bool = True) -> None:
        """Stops the background preparation.

        Args:
            wait: whether to wait for a running compilation, which cannot be interrupted.
        """
        self._background.shutdown(wait=wait, cancel_futures=True)

    @property
    def spec(self) -> StepSpec:
        """Step spec on the current live mesh."""
        return self.steps.spec

    @property
    def own_chunks(self) -> Chunks:
        """Chunks of the run's own cuts, with the stage that holds each."""
        return self._cuts.spec(None).chunks

    @property
    def configuration(self) -> Configuration:
        """Current configuration."""
        return self.steps.configuration

    @property
    def num_live(self) -> int:
        """Number of live workers."""
        return self.spec.live.num_live

    @property
    def period_ratio(self) -> float:
        """Planned time per iteration, as a multiple of the time without failures."""
        plan = self.steps.plan
        fault_free = self._fault_free.plans[plan.schedule.problem.num_iterations]
        return plan.relative_period / fault_free.relative_period

    @property
    def stash_bytes(self) -> int:
        """Bytes that every rank allocates for stashes and messages."""
        return self.steps.plan.stash_bytes(self._cuts.configurator(self._recut).settings.sizes)

    @property
    def bubble_share(self) -> float:
        """Idle share of the live workers' planned time."""
        return self.steps.plan.bubble_share

    def configure(self, failed: frozenset[Worker]) -> Configuration:
        """Returns the configuration for a failure set, with the run's own cuts.

        Raises:
            SettingError: a stage has no survivor, or the planner cannot plan for the failures.
        """
        return self._cuts.configure(None, failed)

    def better_cut(self, failed: frozenset[Worker]) -> PreparedRecut | None:
        """Plans and compiles the best cut for the survivors; returns None if no cut saves time.

        This takes as long as a compilation and may be called from a different thread than the other methods.

        Args:
            failed: workers that are down.

        Raises:
            SettingError: no plan fits into the available memory.
        """
        with jax.enable_x64(self._is_x64):  # each thread has its own setting
            recut = self._cuts.find(failed)
            if recut is None:
                return None
            steps, rerouted = self._steps_for(failed, recut), self._steps_for(failed, None)
            better = PreparedRecut.of(recut, self._cuts.spec(None), steps.plan, rerouted.plan)
            if better is not None:
                steps.compiled(steps.main)
                try:
                    self._prepare_move(rerouted, steps)
                except Exception as error:  # any kind: the cut is still valid; its transfer is compiled when it is used
                    self._troubles.put(f"the move to a better cut: {error}")
            return better

    def settle(self) -> None:
        """Waits until the background preparation has finished."""
        wait(self._pending)

    def background_errors(self) -> list[str]:
        """Returns the errors of the background preparation since the last call."""
        return [self._troubles.get() for _ in range(self._troubles.qsize())]

    def evaluate(self, state: TrainState, batch: Batch) -> Sums:
        """See ``Steps.evaluate``."""
        return self.steps.evaluate(state, batch)

    def start(
        self, state: TrainState, batches: Sequence[Batch], on_devices: Sequence[DeviceBatch]
    ) -> Callable[[], WindowResult]:
        """See ``Steps.start``."""
        return self.steps.start(state, batches, on_devices)

    def put(self, batches: Sequence[Batch]) -> list[DeviceBatch]:
        """See ``Steps.put``."""
        return self.steps.put(batches)

    def reconfigure(
        self, state: TrainState, failed: frozenset[Worker], recut: Recut | None = None
    ) -> tuple[TrainState, Reconfiguration]:
        """Switches plan, program and state to other live workers, or to other cuts and numbers of micro-batches.

        Args:
            state: current state; donated.
            failed: workers that are down from now on.
            recut: cut and number of micro-batches of each pipeline from now on, or None for the run's own.

        Raises:
            SettingError: a stage, or a chunk, has no survivor; or the cuts or micro-batches do not add up.
        """
        start_time = time.perf_counter()
        if recut is not None:
            check_recut(recut, self._cuts.spec(None), failed)
        is_planned = (recut, failed) in self._steps
        steps = self._steps_for(failed, recut)
        is_prepared = is_planned and steps.is_compiled(steps.main)
        planned = time.perf_counter()
        steps.compiled(steps.main)
        compiled = time.perf_counter()
        state, num_bytes, is_move_prepared = self._move(self.spec.in_device_memory(state), steps)
        state = steps.spec.to_resting_memory(state)
        jax.block_until_ready(state)
        moved = time.perf_counter()
        self.steps, self._recut = steps, recut
        self._prepare_next()
        plan_ms, compile_ms, move_ms = (1000 * (b - a) for a, b in pairwise((start_time, planned, compiled, moved)))
        return state, Reconfiguration(is_prepared and is_move_prepared, plan_ms, compile_ms, move_ms, num_bytes)

    def _move(self, state: TrainState, steps: Steps) -> tuple[TrainState, int, bool]:
        """Moves the state to a configuration: (state, moved bytes, whether nothing had to be compiled)."""
        if jax.process_count() > 1:
            return *move_between_processes(state, self.spec, steps.spec), True
        prepared = self._moves.get((self.steps, steps))
        move = prepared or DeviceTransfer(self.spec, steps.spec)
        return *move(state), prepared is not None or not move.has_blocks

    def _prepare_move(self, before: Steps, after: Steps) -> None:
        """Compiles the transfer of the state between two configurations, unless this has been done.

        The result is dropped if the current configuration changes in the meantime.
        """
        is_known = before is after or (before, after) in self._moves
        if jax.process_count() > 1 or is_known or before is not self.steps:
            return
        move = DeviceTransfer(before.spec, after.spec)
        move.prepare()
        if before is self.steps:
            self._moves[before, after] = move

    def _steps_for(self, failed: frozenset[Worker], recut: Recut | None) -> Steps:
        # Without a lock: two threads may compute the same plan, but neither waits for a plan that only the other needs.
        steps = self._steps.get((recut, failed))
        if steps is None:
            full_spec, configuration = self._cuts.spec(recut), self._cuts.configure(recut, failed)
            spec = full_spec.at(full_spec.live.with_rows(configuration.rows))
            steps = self._steps.setdefault((recut, failed), Steps(spec, configuration, self._num_sequences))
        return steps

    def _prepare_next(self) -> None:
        """Drops configurations more than one failure or return away; prepares the others, main programs first."""
        for future in self._pending:
            future.cancel()
        failed, spec = self.configuration.failed, self._cuts.spec(None)
        near = [(None, other) for other in (failed, *neighbours(spec.live.topology, failed, spec.chunks))]
        retained_keys = [*near, (self._recut, failed)]
        for key in list(self._steps):
            if key not in retained_keys and key[1] != failed:
                del self._steps[key]
        self._cuts.keep_only([recut for recut, _ in list(self._steps)])  # a copy: other threads add to it
        self._moves = {pair: move for pair, move in list(self._moves.items()) if pair[0] is self.steps}
        if self._looks_ahead:
            jobs = [(*key, is_main) for is_main in (True, False) for key in dict.fromkeys(retained_keys)]
            self._pending = [self._background.submit(self._make_ready, *job) for job in jobs]

    def _make_ready(self, recut: Recut | None, failed: frozenset[Worker], is_main: bool) -> None:
        """Compiles the main program of a configuration, or all its other programs."""
        try:
            with jax.enable_x64(self._is_x64):  # each thread has its own setting
                if is_main:
                    steps = self._steps_for(failed, recut)
                    steps.compiled(steps.main)
                    self._prepare_move(self.steps, steps)
                elif planned := self._steps.get((recut, failed)):  # if it is missing, the first job reported why
                    for kind in planned.others:
                        planned.compiled(kind)
        except Exception as error:  # any kind: the run continues until it needs this configuration
            down = ", ".join(worker_names(failed)) or "none"
            self._troubles.put(f"with {down} down: {error}")
