"""Copies of each rank's slices at its neighbour: transferred over the mesh, written during the next iteration.

The first level of MoC-System's checkpoints (arXiv 2408.04307, section 5), but in the neighbour's memory: every rank's
slices go to the memory of the next rank in the ring. A file is complete or does not exist, so an interrupted copy is
never taken for a complete one.

Legend: L MoE layers of the model, E experts, K chosen experts of a layer.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.stages import Compiled, Wrapped

from swift.checkpoint.config import CheckpointConfig
from swift.checkpoint.partial.expert_units import by_name
from swift.checkpoint.storage.manifest import Copy, Ledger
from swift.elastic.elastic_ranks import neighbour_of
from swift.elastic.membership.members import Process, Stamp
from swift.elastic.state.slice_copies import SliceCopies, SliceCopy, copy_shapes, needed
from swift.mesh.per_rank import EXPERT_AXIS, RANKED, REPLICATED
from swift.pipeline.reconfigure.executable_cache import ExecutableCache
from swift.pipeline.runtime.step_spec import StepSpec
from swift.pipeline.train_state import TrainState
from swift.train.checkpoints.saved_state import split_of

NeighbourProgram = Callable[..., dict[str, dict[str, jax.Array]]]
"""(dense, experts, chosen experts) -> ``dense`` and ``experts`` of the rank before."""


class NeighbourCopies:
    """The copies that one process keeps of another's slices during a generation; the first has all experts.

    Args:
        spec: step spec on the generation's mesh.
        executables: executable cache of the run.
        copies: copies in the memory of this node.
        process: this process.
        processes: processes of the generation, in the order of their ranks.
        config: settings of copies: how often, and of how many experts.
    """

    def __init__(
        self,
        spec: StepSpec,
        executables: ExecutableCache,
        copies: SliceCopies,
        process: Process,
        processes: Sequence[Process],
        config: CheckpointConfig,
    ):
        self._spec, self._executables, self._copies, self._process = spec, executables, copies, process
        (self._owner,) = [one for one in processes if neighbour_of(one, processes) == process]
        self._config, self._split = config, split_of(spec)
        num_layers, num_classes = self._split.num_layers, self._split.num_classes
        self._ledger = Ledger.first(num_layers, num_classes, config.snapshot_k(num_classes))
        self._is_first = True
        self._chosen: dict[Stamp, np.ndarray] = {}  # experts of the copies that exist, or are being written
        self._programs: dict[int, NeighbourProgram] = {}
        self._thread = ThreadPoolExecutor(1, "neighbour")
        self._writing: tuple[Stamp, Future[None]] | None = None

    def count(self, record: Mapping[str, Any]) -> None:
        """Counts the token updates of an iteration, from its record in ``metrics.jsonl``."""
        self._ledger = self._ledger.counted(record["popularity"], record["dropped"])

    def is_due(self, done: int) -> bool:
        """Returns whether to copy after this iteration; always after the first of a generation.

        All ranks have to agree on when to copy and on which experts, so neither may depend on whether writing worked.
        """
        return self._is_first or done % self._config.snapshot_every == 0

    def prepare(self) -> None:
        """Compiles the program of the next copy, unless it is compiled."""
        self._program(self._choice().shape[-1])

    def copy(self, stamp: Stamp, state: TrainState) -> None:
        """Transfers a copy, together with all other ranks, and begins to write it.

        Args:
            stamp: stamp of the state.
            state: state on the mesh; it may be donated once this returns.
        """
        chosen_LK = self._choice()
        arrays, like = by_name(state), copy_shapes(self._split, chosen_LK.shape[-1])
        given = [{name: arrays[name] for name in like[kind]} for kind in ("dense", "experts")]
        chosen = self._spec.live.put(chosen_LK, REPLICATED)
        received = jax.block_until_ready(self._program(chosen_LK.shape[-1])(*given, chosen))
        self.settle()
        self._ledger = self._ledger.saved(stamp.step, chosen_LK, self._copied(stamp.step, chosen_LK), {})
        self._is_first, self._chosen[stamp] = False, chosen_LK
        self._writing = stamp, self._thread.submit(self._write, stamp, received | {"chosen": chosen_LK})

    def settle(self) -> None:
        """Waits until the copy in progress is written; if it cannot be written, the run continues without it."""
        if self._writing is None:
            return
        (stamp, writing), self._writing = self._writing, None
        try:
            writing.result()
        except OSError as error:
            print(f"no copy of {self._owner} after iteration {stamp.step}: {error}", file=sys.stderr)
            del self._chosen[stamp]

    def close(self) -> None:
        """Finishes the last copy, which no longer needs the devices."""
        self.settle()
        self._thread.shutdown()

    def _choice(self) -> np.ndarray:
        return self._ledger.choose(self._config.selection, full=False).astype(np.int32)

    def _program(self, num_experts: int) -> NeighbourProgram:
        if num_experts not in self._programs:
            self._programs[num_experts] = compiled_neighbour(self._spec, self._executables, num_experts)
        return self._programs[num_experts]

    def _copied(self, step: int, chosen_LK: np.ndarray) -> dict[tuple[int, int], Copy]:
        """Returns the entries of the ledger for these copies, on which the next choice depends."""
        contained_LE = self._ledger.tally.contained_LE
        units = [(layer, class_) for layer, classes in enumerate(chosen_LK.tolist()) for class_ in classes]
        return {unit: Copy(step, int(contained_LE[unit]), 0, "", {}) for unit in units}

    def _write(self, stamp: Stamp, received: Mapping[str, Any]) -> None:
        """Writes a copy, and only then removes earlier ones that are no longer needed."""
        tree = jax.tree.map(lambda leaf: leaf if isinstance(leaf, np.ndarray) else own_slice(leaf), dict(received))
        num_experts = tree["chosen"].shape[-1]
        self._copies.store(num_experts, self._process, self._owner).save(stamp, tree)
        kept = needed(self._chosen, self._split.num_classes)
        self._chosen = {stamp: chosen for stamp, chosen in self._chosen.items() if stamp in kept}
        copies = [SliceCopy(chosen.shape[-1], self._process, self._owner, one) for one, chosen in self._chosen.items()]
        self._copies.keep_only(self._process, copies)


def neighbour_slices(spec: StepSpec) -> Wrapped:
    """Returns the jitted function that sends every rank's slices to the next rank in the ring.

    It takes RANKED arrays by name, ``dense`` and ``experts``, and the chosen experts ``[L, K]``, REPLICATED; it returns
    ``dense`` and the chosen ``experts`` of the rank before, RANKED.

    Args:
        spec: step spec on a live mesh of one worker.
    """
    num_ranks = spec.live.num_ranks
    ring = [(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)]

    def per_rank(dense: Any, experts: Any, chosen_LK: jax.Array) -> dict[str, Any]:
        chosen = {name: jnp.take_along_axis(leaf, chosen_LK[:, :, None], axis=1) for name, leaf in experts.items()}
        both = {"dense": dense, "experts": chosen}
        return jax.tree.map(lambda leaf: lax.ppermute(leaf, EXPERT_AXIS, ring), both)

    return jax.jit(spec.live.per_rank(per_rank, (RANKED, RANKED, REPLICATED), RANKED))


def compiled_neighbour(spec: StepSpec, executables: ExecutableCache, num_experts: int) -> NeighbourProgram:
    """Returns ``neighbour_slices`` compiled for K experts of every layer; the choice of experts is data.

    Args:
        spec: step spec on a live mesh of one worker.
        executables: executable cache of the run.
        num_experts: number of experts of every layer, K.
    """
    live = spec.live

    def compile_() -> Compiled:
        split = split_of(spec)
        like = copy_shapes(split, num_experts)
        given = [{name: split.shapes[name] for name in like[kind]} for kind in ("dense", "experts")]
        chosen = jax.ShapeDtypeStruct(like["chosen"].shape, np.int32, sharding=live.shardings(REPLICATED))
        return neighbour_slices(spec).lower(*given, chosen).compile()

    return executables.get(neighbour_key(live.num_ranks, num_experts), compile_, list(live.mesh.devices.flat))


def neighbour_key(num_ranks: int, num_experts: int) -> object:
    """Returns the key of such a program in the executable cache."""
    return "neighbour", num_ranks, num_experts


def own_slice(leaf: jax.Array) -> np.ndarray:
    """Returns this process's slice of a RANKED array, on the host; on CPU without a copy."""
    (shard,) = leaf.addressable_shards
    return np.asarray(shard.data)
