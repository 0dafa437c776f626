"""From one configuration to the next: plans, programs and state, and what every change costs."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Literal, Self

import jax
import numpy as np

from swift.data import Batch
from swift.mesh import RankKind, live_mesh, move_rows, moved_bytes, source_rows
from swift.pipeline.configuration import Configuration, Planner, PlanSettings
from swift.pipeline.metrics import by_iteration
from swift.pipeline.program import Program, TrainState
from swift.pipeline.stage import DeviceBatch
from swift.pipeline.steps import Steps
from swift.topology import Topology, Worker

Prepare = Literal["none", "next"]
PREPARE: tuple[str, ...] = ("none", "next")


@dataclass(frozen=True)
class Change:
    """What a change of configuration cost.

    Attributes:
        prepared: whether plan and program were there already.
        plan_ms: planning.
        compile_ms: compiling what most iterations need, or waiting for its end.
        move_ms: moving the state, until it is there.
        moved_bytes: from one device to another.
    """

    prepared: bool
    plan_ms: float
    compile_ms: float
    move_ms: float
    moved_bytes: int


@dataclass(frozen=True)
class Outcome:
    """What a window came to.

    Attributes:
        state: after it.
        metrics: of its iterations, on the host; see ``by_iteration``.
        was_discarded: whether it was run again, one iteration after the other.
    """

    state: TrainState
    metrics: list[dict[str, np.ndarray]]
    was_discarded: bool


class Engine:
    """The configurations of a run; a context manager, since it may compile in the background.

    Args:
        program: on any live mesh of its topology.
        settings: of the plans.
        ranks: what the ranks are, see ``live_mesh``.
        num_sequences: of a micro-batch, over all expert ranks.
        prepare: ``next`` plans and compiles, in the background, the configurations that one worker's failure or return
            would lead to.
        failed: the workers that are down at first.
    """

    def __init__(
        self,
        program: Program,
        settings: PlanSettings,
        ranks: RankKind,
        num_sequences: int,
        prepare: Prepare = "none",
        failed: frozenset[Worker] = frozenset(),
    ):
        self._program, self._planner, self._ranks = program, Planner(settings), ranks
        self._num_sequences, self._prepare = num_sequences, prepare
        self._steps: dict[frozenset[Worker], Steps] = {}
        self._planning = threading.Lock()
        self._background = ThreadPoolExecutor(1, "prepare")
        self._pending: list[Future[None]] = []
        self._is_x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]
        self.fault_free = self._planner.configure(frozenset())
        self.steps = self._steps_for(failed)

    def __enter__(self) -> Self:
        self._prepare_next()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._background.shutdown(wait=True, cancel_futures=True)

    @property
    def program(self) -> Program:
        """The program on the present live mesh."""
        return self.steps.program

    @property
    def configuration(self) -> Configuration:
        """The present plan."""
        return self.steps.configuration

    @property
    def num_live(self) -> int:
        """Live workers."""
        return self.program.live.num_rows

    @property
    def period_ratio(self) -> float:
        """The planned time of an iteration, as a multiple of what it is without failures."""
        return self.configuration.period / self.fault_free.period

    def start(self, state: TrainState, batches: Sequence[Batch], rows: Sequence[DeviceBatch]) -> Callable[[], Outcome]:
        """Starts the iterations of a window, or a lone one; a call of the result waits for their end.

        A window in which a gradient was not finite or was to be clipped is run again, one iteration after the other.

        Args:
            state: the present one; given up.
            batches: the iterations' global batches, on the host.
            rows: what ``put`` made of them.
        """
        steps = self.steps
        if len(rows) == len(batches):
            return _singles(steps, state, rows, was_discarded=False)
        window, metrics, ok = steps.run_window(state, rows[0])

        def finish() -> Outcome:
            if jax.device_get(ok).all():
                return Outcome(window, by_iteration(metrics, steps.program.live), was_discarded=False)
            return _singles(steps, state, [steps.put([batch]) for batch in batches], was_discarded=True)()

        return finish

    def put(self, batches: Sequence[Batch]) -> list[DeviceBatch]:
        """Host batches on the devices of the workers that meet them: of a window together, or one by one."""
        if self.steps.main == "window" and len(batches) > 1:
            return [self.steps.put(batches)]
        return [self.steps.put([batch]) for batch in batches]

    def reconfigure(self, state: TrainState, failed: frozenset[Worker]) -> tuple[TrainState, Change]:
        """Goes on with other workers: plan, program, state.

        Args:
            state: the present one; given up.
            failed: the workers that are down from now on.

        Raises:
            SettingError: a stage has no survivor.
        """
        begun = time.perf_counter()
        is_prepared = failed in self._steps and self._steps[failed].is_compiled(self._steps[failed].main)
        steps = self._steps_for(failed)
        planned = time.perf_counter()
        steps.compiled(steps.main)
        compiled = time.perf_counter()
        old, new = self.program.live, steps.program.live
        sources = source_rows(old, new)
        num_bytes = moved_bytes(state, old, new, sources)
        state = jax.block_until_ready(move_rows(state, old, new, steps.program.specs, sources))
        moved = time.perf_counter()
        self.steps = steps
        self._prepare_next()
        plan_ms, compile_ms, move_ms = (1000 * (b - a) for a, b in pairwise((begun, planned, compiled, moved)))
        return state, Change(is_prepared, plan_ms, compile_ms, move_ms, num_bytes)

    def _steps_for(self, failed: frozenset[Worker]) -> Steps:
        with self._planning:
            if failed not in self._steps:
                configuration = self._planner.configure(failed)
                live = live_mesh(self._program.live.topology, self._ranks, failed, configuration.places)
                self._steps[failed] = Steps(self._program.at(live), configuration, self._num_sequences)
            return self._steps[failed]

    def _prepare_next(self) -> None:
        for future in self._pending:
            future.cancel()
        if self._prepare == "next":
            self._pending = [self._background.submit(self._make_ready, failed) for failed in self._neighbours()]

    def _neighbours(self) -> Iterator[frozenset[Worker]]:
        """The failure sets that one return or one failure leads to, but those that leave a stage without a worker."""
        failed, topology = self.configuration.failed, self._program.live.topology
        yield from (failed - {worker} for worker in sorted(failed))
        for worker in topology.workers:
            if worker not in failed and survives(topology, failed | {worker}):
                yield failed | {worker}

    def _make_ready(self, failed: frozenset[Worker]) -> None:
        with jax.enable_x64(self._is_x64):  # which is a setting of a thread
            steps = self._steps_for(failed)
            steps.compiled(steps.main)


def _singles(
    steps: Steps, state: TrainState, rows: Sequence[DeviceBatch], *, was_discarded: bool
) -> Callable[[], Outcome]:
    """Starts iterations one after the other."""
    metrics = []
    for row in rows:
        state, of_one = steps.run_single(state, row)
        metrics.append(of_one)
    live = steps.program.live
    return lambda: Outcome(state, [host for of_one in metrics for host in by_iteration(of_one, live)], was_discarded)


def survives(topology: Topology, failed: frozenset[Worker]) -> bool:
    """Whether every stage has a live worker."""
    return all(any((d, p) not in failed for d in range(topology.num_pipelines)) for p in range(topology.num_stages))
