"""The copy that a rank has of its neighbour's slices: made over the mesh, written behind the next iteration.

Level 1 of MoC-System (arXiv 2408.04307, section 5), with a buddy: every rank's slices go to the memory of the next one
in the ring. A file is complete or not there at all, so what a kill breaks off is never taken for a copy.

Legend: L MoE layers of the model, E classes, K chosen classes of a layer.
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

from swift.checkpoint import CheckpointConfig, Copy, Ledger
from swift.checkpoint.partial import by_name
from swift.elastic.elastic_programs import holder_of
from swift.elastic.membership import Process, Stamp
from swift.elastic.state.copies import Copies, Held, copy_shapes, needed
from swift.mesh import EXPERT_AXIS, RANKED, REPLICATED
from swift.pipeline import StepSpec, TrainState
from swift.pipeline.reconfigure import ExecutableCache
from swift.train.checkpoints import split_of

Neighbour = Callable[..., dict[str, dict[str, jax.Array]]]
"""(dense, experts, chosen classes) -> ``dense`` and ``experts`` of the rank before."""


class NeighbourCopies:
    """The copies that one process makes of another's slices in a generation; the first has all experts.

    Args:
        spec: on the generation's mesh.
        store: of the run's programs.
        copies: in the memory of this node.
        process: which this is.
        processes: of the generation, in the order of their ranks.
        config: how often, and which experts.
    """

    def __init__(
        self,
        spec: StepSpec,
        store: ExecutableCache,
        copies: Copies,
        process: Process,
        processes: Sequence[Process],
        config: CheckpointConfig,
    ):
        self._spec, self._store, self._copies, self._process = spec, store, copies, process
        (self._owner,) = [one for one in processes if holder_of(one, processes) == process]
        self._config, self._split = config, split_of(spec)
        num_layers, num_classes = self._split.num_layers, self._split.num_classes
        self._ledger = Ledger.first(num_layers, num_classes, config.snapshot_k(num_classes))
        self._is_first = True
        self._chosen: dict[Stamp, np.ndarray] = {}  # of the copies that are there, or are being written
        self._programs: dict[int, Neighbour] = {}
        self._thread = ThreadPoolExecutor(1, "buddy")
        self._writing: tuple[Stamp, Future[None]] | None = None

    def count(self, record: Mapping[str, Any]) -> None:
        """Notes an iteration, by its record in ``metrics.jsonl``."""
        self._ledger = self._ledger.counted(record["popularity"], record["dropped"])

    def is_due(self, done: int) -> bool:
        """Whether a copy is to be made after this iteration: the first of a generation is at once.

        All ranks have to agree on that, and on the experts: nothing here depends on what could not be written.
        """
        return self._is_first or done % self._config.snapshot_every == 0

    def make_ready(self) -> None:
        """Compiles what the next copy needs, unless it is there."""
        self._neighbour(self._choice().shape[-1])

    def take(self, stamp: Stamp, state: TrainState) -> None:
        """Makes a copy, for which all ranks have to be there; it is written when this has returned.

        Args:
            stamp: of the state.
            state: on the mesh; it may be given away when this returns.
        """
        chosen_LK = self._choice()
        arrays, like = by_name(state), copy_shapes(self._split, chosen_LK.shape[-1])
        given = [{name: arrays[name] for name in like[kind]} for kind in ("dense", "experts")]
        chosen = self._spec.live.put(chosen_LK, REPLICATED)
        got = jax.block_until_ready(self._neighbour(chosen_LK.shape[-1])(*given, chosen))
        self.settle()
        self._ledger = self._ledger.saved(stamp.step, chosen_LK, self._copied(stamp.step, chosen_LK), {})
        self._is_first, self._chosen[stamp] = False, chosen_LK
        self._writing = stamp, self._thread.submit(self._write, stamp, got | {"chosen": chosen_LK})

    def settle(self) -> None:
        """Waits until the copy that is being written is there; one that cannot be written is done without."""
        if self._writing is None:
            return
        (stamp, writing), self._writing = self._writing, None
        try:
            writing.result()
        except OSError as error:
            print(f"no copy of {self._owner} after iteration {stamp.step}: {error}", file=sys.stderr)
            del self._chosen[stamp]

    def close(self) -> None:
        """After the last copy: nothing of it needs the devices any more."""
        self.settle()
        self._thread.shutdown()

    def _choice(self) -> np.ndarray:
        return self._ledger.choose(self._config.selection, full=False).astype(np.int32)

    def _neighbour(self, num_experts: int) -> Neighbour:
        if num_experts not in self._programs:
            self._programs[num_experts] = compiled_neighbour(self._spec, self._store, num_experts)
        return self._programs[num_experts]

    def _copied(self, step: int, chosen_LK: np.ndarray) -> dict[tuple[int, int], Copy]:
        """What the choice of the next experts has to know of these."""
        contained_LE = self._ledger.tally.contained_LE
        units = [(layer, class_) for layer, classes in enumerate(chosen_LK.tolist()) for class_ in classes]
        return {unit: Copy(step, int(contained_LE[unit]), 0, "", {}) for unit in units}

    def _write(self, stamp: Stamp, got: Mapping[str, Any]) -> None:
        """Writes a copy; only then those before it that nobody needs any more are removed."""
        tree = jax.tree.map(lambda leaf: leaf if isinstance(leaf, np.ndarray) else own_slice(leaf), dict(got))
        num_experts = tree["chosen"].shape[-1]
        self._copies.keep(num_experts, self._process, self._owner).save(stamp, tree)
        kept = needed(self._chosen, self._split.num_classes)
        self._chosen = {stamp: chosen for stamp, chosen in self._chosen.items() if stamp in kept}
        held = [Held(chosen.shape[-1], self._process, self._owner, one) for one, chosen in self._chosen.items()]
        self._copies.forget(self._process, but=held)


def neighbour_slices(spec: StepSpec) -> Wrapped:
    """The jitted function that gives every rank the slices of the one before it in the ring.

    It takes RANKED arrays by name, ``dense`` and ``experts``, and the chosen classes ``[L, K]``, REPLICATED; it returns
    ``dense`` and ``experts``, RANKED, of experts the chosen classes.

    Args:
        spec: on a live mesh of one worker.
    """
    num_ranks = spec.live.num_ranks
    ring = [(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)]

    def per_rank(dense: Any, experts: Any, chosen_LK: jax.Array) -> dict[str, Any]:
        chosen = {name: jnp.take_along_axis(leaf, chosen_LK[:, :, None], axis=1) for name, leaf in experts.items()}
        both = {"dense": dense, "experts": chosen}
        return jax.tree.map(lambda leaf: lax.ppermute(leaf, EXPERT_AXIS, ring), both)

    return jax.jit(spec.live.per_rank(per_rank, (RANKED, RANKED, REPLICATED), RANKED))


def compiled_neighbour(spec: StepSpec, store: ExecutableCache, num_experts: int) -> Neighbour:
    """``neighbour_slices`` of so many experts of every layer; which they are is data.

    Args:
        spec: on a live mesh of one worker.
        store: of the run.
        num_experts: K.
    """
    live = spec.live

    def compile_() -> Compiled:
        split = split_of(spec)
        like = copy_shapes(split, num_experts)
        given = [{name: split.shapes[name] for name in like[kind]} for kind in ("dense", "experts")]
        chosen = jax.ShapeDtypeStruct(like["chosen"].shape, np.int32, sharding=live.shardings(REPLICATED))
        return neighbour_slices(spec).lower(*given, chosen).compile()

    return store.get(neighbour_key(live.num_ranks, num_experts), compile_, list(live.mesh.devices.flat))


def neighbour_key(num_ranks: int, num_experts: int) -> object:
    """What tells such a program from the others of a run."""
    return "neighbour", num_ranks, num_experts


def own_slice(leaf: jax.Array) -> np.ndarray:
    """What this process has of a RANKED array, on the host; on CPU without a copy."""
    (shard,) = leaf.addressable_shards
    return np.asarray(shard.data)
