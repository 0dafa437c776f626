"""Compiled programs of one configuration on its mesh, each compiled when it is first needed."""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled, Lowered, Wrapped
from jax.typing import DTypeLike
from jaxtyping import Bool

from swift.data.windows import Batch
from swift.mesh.devices import ProgramMemory
from swift.mesh.live import local_row
from swift.mesh.per_rank import RANKED, REPLICATED, SHARED
from swift.pipeline.reconfigure.configuration import Configuration, Plan, batch_of_rows
from swift.pipeline.reconfigure.executables import ExecutableCache
from swift.pipeline.state import DeviceBatch, TrainState
from swift.pipeline.step.metrics import Sums, by_iteration
from swift.pipeline.step.single_worker import (
    sequences_per_rank,
    single_worker_batch,
    single_worker_evaluation,
    single_worker_step,
)
from swift.pipeline.step.spec import StepSpec
from swift.pipeline.step.tick_arrays import table_arrays
from swift.pipeline.step.train_step import barrier_step, evaluation_step, window_step
from swift.schedules.lowering.tick_table import TickTable

StepKind = Literal["window", "single", "evaluate"]


@dataclass(frozen=True)
class WindowResult:
    """Result of a window.

    Attributes:
        state: state after the window.
        metrics: metrics of the window's iterations, on the host; see ``by_iteration``.
        was_discarded: whether the window was discarded and its iterations were repeated one by one.
    """

    state: TrainState
    metrics: list[dict[str, np.ndarray]]
    was_discarded: bool


class Steps:
    """Step functions for a configuration, compiled ahead of their first call; safe to use from several threads.

    Args:
        spec: step spec on the configuration's live mesh.
        configuration: planned failure set.
        num_sequences: sequences of a micro-batch, over all expert ranks.
        store: cache that the processes of a run share, or None for no cache.
        keep_state: whether to leave the state before an iteration unchanged, so that the iteration can be repeated.
    """

    def __init__(
        self,
        spec: StepSpec,
        configuration: Configuration,
        num_sequences: int,
        store: ExecutableCache | None = None,
        *,
        keep_state: bool = False,
    ):
        self.spec, self.configuration, self._num_sequences = spec, configuration, num_sequences
        self._store, self._keeps_state = store, keep_state
        self._compiled: dict[StepKind, Callable[..., Any]] = {}
        self._programs: dict[StepKind, Compiled] = {}
        self._lock = threading.Lock()

    @classmethod
    def of_processes(
        cls,
        spec: StepSpec,
        configuration: Configuration,
        devices_RN: np.ndarray,
        num_sequences: int,
        store: ExecutableCache,
    ) -> Self:
        """Creates the steps for a group of processes; these steps keep the state before an iteration.

        Args:
            spec: step spec, on any mesh.
            configuration: planned failure set.
            devices_RN: devices of the group, in the order of its processes.
            num_sequences: sequences of a micro-batch, over all expert ranks.
            store: cache that the processes share.
        """
        live = configuration.live_mesh(spec.live.topology, devices_RN)
        return cls(spec.at(live), configuration, num_sequences, store, keep_state=True)

    @property
    def main(self) -> StepKind:
        """Program of most iterations: ``window`` if K > 1, unless a sum over peers involves all workers (TPU)."""
        return "window" if self.configuration.window > 1 and not self.spec.sums_need_all else "single"

    @property
    def others(self) -> list[StepKind]:
        """Programs for evaluations, and for iterations that do not fill a window."""
        return ["evaluate"] if self.main == "single" else ["single", "evaluate"]

    @property
    def plan(self) -> Plan:
        """Plan of most iterations."""
        return self.configuration.plans[self.configuration.window if self.main == "window" else 1]

    def put(self, batches: Sequence[Batch]) -> list[DeviceBatch]:
        """Puts host batches on the devices of the workers that run them: a window's together, others one by one."""
        if self.main == "window" and len(batches) > 1:
            return [self.on_devices(batches)]
        return [self.on_devices([batch]) for batch in batches]

    def start(
        self, state: TrainState, batches: Sequence[Batch], device_batches: Sequence[DeviceBatch]
    ) -> Callable[[], WindowResult]:
        """Starts the iterations of a window, or a single iteration.

        If a gradient in a window was not finite or had to be clipped, the iterations are repeated one by one.

        Args:
            state: current state; donated, unless the steps keep states.
            batches: global batches of the iterations, on the host.
            device_batches: the same batches on devices, from ``put``.

        Returns:
            A function that waits for the iterations to finish and returns their result.
        """
        if len(device_batches) == len(batches):
            return self._singles(state, device_batches, was_discarded=False)
        window, metrics, ok = self.run_window(state, device_batches[0])
        # In a list, so that ``finish`` can drop the only reference to the state.
        after = [window]
        del window

        def finish() -> WindowResult:
            if local_row(ok):
                return WindowResult(after[0], by_iteration(metrics), was_discarded=False)
            after.clear()  # frees the discarded state before the iterations are repeated
            return self._singles(state, [self.on_devices([batch]) for batch in batches], was_discarded=True)()

        return finish

    def _singles(
        self, state: TrainState, device_batches: Sequence[DeviceBatch], *, was_discarded: bool
    ) -> Callable[[], WindowResult]:
        """Starts single iterations, one after the other."""
        metrics = []
        for batch in device_batches:
            state, step_metrics = self.run_single(state, batch)
            metrics.append(step_metrics)
        return lambda: WindowResult(
            state, [host for step_metrics in metrics for host in by_iteration(step_metrics)], was_discarded
        )

    def on_devices(self, batches: Sequence[Batch]) -> DeviceBatch:
        """Puts host batches ``[D * M, B, T]`` of a window or an iteration on the devices that run them."""
        return self.spec.live.put(self._host_batch(batches), RANKED)

    def _host_batch(self, batches: Sequence[Batch]) -> Batch:
        live = self.spec.live
        if self.spec.is_single_worker:
            return single_worker_batch(batches[0], live.num_ranks)
        plan, pipeline_D = self.configuration.plans[len(batches)], self.configuration.pipeline_D
        counts_D = plan.schedule.problem.microbatches
        return batch_of_rows(batches, plan.table, pipeline_D, live.num_ranks, counts_D)

    @cached_property
    def read_here(self) -> Bool[np.ndarray, "M B"]:
        """Whether this process's devices read each sequence of an iteration's batch; a host need load only these."""
        live, shape_MB = self.spec.live, (self.spec.num_microbatches, self._num_sequences)
        number_MBT = 1 + np.arange(math.prod(shape_MB), dtype=np.int32).reshape(*shape_MB, 1)
        is_read = np.zeros(number_MBT.size + 1, bool)  # entry 0 stands for padding
        for num_iterations in self.configuration.plans if not self.spec.is_single_worker else (1,):
            numbers = self._host_batch([Batch(number_MBT, number_MBT, number_MBT)] * num_iterations).inputs
            for shard in live.shardings(RANKED).addressable_devices_indices_map(numbers.shape).values():
                is_read[numbers[shard]] = True
        return is_read[1:].reshape(shape_MB)

    def run_window(self, state: TrainState, batch: DeviceBatch) -> tuple[TrainState, dict[str, jax.Array], jax.Array]:
        """Runs K iterations: (new state, metrics ``[worker, K, ...]``, bool[worker]: whether the window counts)."""
        return self.compiled("window")(state, batch)

    def run_single(self, state: TrainState, batch: DeviceBatch) -> tuple[TrainState, dict[str, jax.Array]]:
        """Runs one iteration, which always counts; donates the old state's buffers, unless the steps keep states."""
        return self.compiled("single")(state, batch)

    def evaluate(self, state: TrainState, batch: Batch) -> Sums:
        """Evaluates one iteration's batch; returns its sums on the host."""
        return local_row(self.compiled("evaluate")(state, self.on_devices([batch])))

    def compiled(self, kind: StepKind) -> Callable[..., Any]:
        """Returns the compiled program of a kind, compiling it on first use."""
        with self._lock:
            if kind not in self._compiled:
                self._compiled[kind] = self._compile(kind)
            return self._compiled[kind]

    def is_compiled(self, kind: StepKind) -> bool:
        """Whether the program of a kind is compiled."""
        return kind in self._compiled

    def program_texts(self) -> list[str]:
        """Returns the HLO texts of the programs that are compiled so far; a program without a text is left out."""
        return [text for program in self._programs.values() if (text := program.as_text())]

    def memory(self, kind: StepKind) -> ProgramMemory | None:
        """Returns the ``ProgramMemory`` of a kind's program, compiling it on first use."""
        self.compiled(kind)
        return ProgramMemory.of(self._programs[kind])

    def lowered(self, kind: StepKind) -> Lowered:
        """Lowers the program of a kind from shapes alone, so that its devices need not exist."""
        spec, live = self.spec, self.spec.live
        state = spec.abstract(with_slots=True)
        if spec.is_single_worker:
            batch = self._abstract_batch(kind, (1, spec.num_microbatches))
            step = partial(single_worker_step, keep_state=self._keeps_state)
            build_step = single_worker_evaluation if kind == "evaluate" else step
            return build_step(spec).lower(state, batch)
        table = _table(self.configuration, kind)
        common, columns = table_arrays(table)
        arrays = live.abstract(common, REPLICATED), live.abstract(columns, SHARED)
        return self._function(kind, table).lower(state, *arrays, self._abstract_batch(kind, table.data_Rn.shape[:2]))

    def _compile(self, kind: StepKind) -> Callable[..., Any]:
        spec = self.spec
        call = self._programs[kind] = self._get(kind)
        if spec.is_single_worker:
            return call
        common, columns = table_arrays(_table(self.configuration, kind))
        arrays = spec.live.put(common, REPLICATED), spec.live.put(columns, SHARED)
        return lambda state, batch: call(state, *arrays, batch)

    def _get(self, kind: StepKind) -> Compiled:
        if self._store is None:
            return self.lowered(kind).compile()
        devices = list(self.spec.live.mesh.devices.flat)
        key = program_key(self.configuration, self.spec.live.num_ranks, kind, keep_state=self._keeps_state)
        return self._store.get(key, lambda: self.lowered(kind).compile(), devices)

    def _function(self, kind: StepKind, table: TickTable) -> Wrapped:
        if kind == "window":
            return window_step(self.spec, table, self.configuration.window)
        if kind == "single":
            return barrier_step(self.spec, table, keep_state=self._keeps_state)
        return evaluation_step(self.spec, table)

    def _abstract_batch(self, kind: StepKind, microbatches_Rn: tuple[int, ...]) -> DeviceBatch:
        live, length = self.spec.live, self.spec.gpt.config.sequence_length
        lead = (*microbatches_Rn, live.num_ranks, sequences_per_rank(self._num_sequences, live.num_ranks))

        def abstract(size: int, dtype: DTypeLike) -> Any:
            return jax.ShapeDtypeStruct((*lead, size), dtype, sharding=live.shardings(RANKED))

        keys = abstract(2, jnp.uint32) if self.spec.draws_noise and kind != "evaluate" else None
        weights = abstract(length, jnp.float32) if self.spec.weighs_tokens else None
        tokens = abstract(length, jnp.int32)
        return Batch(tokens, tokens, abstract(length, jnp.bool_), keys, weights)


def program_key(configuration: Configuration, num_ranks: int, kind: StepKind, *, keep_state: bool) -> object:
    """Returns the cache key for a program in a run; configurations with equal keys share the program.

    The key does not depend on which workers have failed, except in configurations with their own cuts: their devices
    are in a different order.
    """
    shape, holdings = _table(configuration, kind).shape, (configuration.roles, configuration.chunks)
    return kind, keep_state, num_ranks, configuration.window, configuration.device_rows, holdings, shape


def _table(configuration: Configuration, kind: StepKind) -> TickTable:
    table = configuration.plans[configuration.window if kind == "window" else 1].table
    return table.forward_only() if kind == "evaluate" else table
