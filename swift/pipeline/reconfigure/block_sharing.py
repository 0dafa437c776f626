"""Copying a state between the mesh rows of several processes, chunk by chunk and bit for bit.

A process that joins has no state. Each chunk that it holds comes from a worker that has it, over the mesh: where
pipelines are cut differently, its blocks may come from several workers. In one process, which has all devices, states
move otherwise, see ``state_move``.

C chunks, R mesh rows, T rounds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec

from swift.errors import RunError
from swift.mesh.live import LiveMesh, own_rows
from swift.mesh.peer_reduce import PeerSum, how_unequal
from swift.mesh.per_rank import RANKED, SHARED, map_specs
from swift.mesh.process_shards import copy_bits
from swift.models.cuts.chunks import Chunks
from swift.pipeline.chunk_rounds import NONE, Rounds
from swift.pipeline.reconfigure.executable_cache import ExecutableCache
from swift.pipeline.runtime.chunk_layers import ChunkLayers, group_of
from swift.pipeline.runtime.step_spec import StepSpec
from swift.pipeline.train_state import EMBEDDING_AND_HEAD, TrainState

Share = Callable[[TrainState], tuple[TrainState, jax.Array]]
"""A function from a state to one in which every row has its chunks, and bool[worker]: whether they have arrived."""


def saving_rows(spec: StepSpec) -> tuple[int, ...]:
    """Rows of the mesh whose states together have every chunk; where a chunk is a stage, the lowest of each stage."""
    chosen: list[int] = []
    for rows in spec.peers_C:
        if not set(rows) & set(chosen):
            chosen.append(rows[0])
    return tuple(chosen)


def share_blocks(old: StepSpec, new: StepSpec, has_R: Sequence[bool]) -> Share:
    """Makes a function, to be jitted, that gives every row all chunks that it is to hold.

    Args:
        old: spec of the state that rows have.
        new: spec of the state that they get, for the same workers on the same devices; the same unless they hold other
            blocks.
        has_R: whether each row has its state; every chunk needs a row that has.

    Returns:
        A function from the state of ``old`` to (that of ``new``, bool[worker]: True where all that was received has the
        checksum of what was sent).
    """
    routes = Routes.of(old, new, has_R)
    is_same = old.is_held_as(new)

    def per_rank(state: TrainState) -> tuple[TrainState, jax.Array]:
        row = new.live.row_index()
        shared = state if is_same else jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), routes.shapes)
        num_wrong = jnp.int32(0)
        for turn in range(len(routes.sums)):
            shared, wrong = routes.take(turn, row, state, shared)
            num_wrong += wrong
        return shared, num_wrong == 0

    return new.live.per_rank(per_rank, (old.specs,), (new.specs, SHARED))


def move_between_processes(state: TrainState, old: StepSpec, new: StepSpec) -> tuple[TrainState, int]:
    """Moves a state to the live mesh of another spec in the same chunks, as each of several processes has some rows.

    Workers that keep their role keep their arrays; any other one gets the state of its chunks over the mesh. All
    processes call this at the same place, and return together.

    Args:
        state: arrays ``[worker, ...]`` on the mesh of ``old``, with slots; donated.
        old: spec of the state.
        new: spec of the state to make; every process has a device of its mesh.

    Returns:
        The state on the mesh of ``new``, and the number of bytes copied.

    Raises:
        RunError: what has arrived is not what was sent.
    """
    before = set(old.live.rows)
    has_R = [row in before for row in new.live.rows]
    kept = on_mesh(state, new.live, new.specs, has_R)
    share = None if all(has_R) else jax.jit(share_blocks(new, new, has_R), donate_argnums=0).lower(kept).compile()
    # Collectives among some devices begin with all that take part: gloo waits for 30 s, and others may still compile.
    multihost_utils.sync_global_devices("reconfigured")
    if share is None:
        return kept, 0
    kept, is_right = share(kept)
    if not np.concatenate(own_rows(is_right)).all():
        raise RunError("a state that was copied to a worker has not arrived as it was sent")
    return kept, has_R.count(False) * new.live.num_ranks * new.state_bytes


def on_mesh(state: TrainState, live: LiveMesh, specs: Any, has_R: Sequence[bool] | None = None) -> TrainState:
    """A state that devices have, as arrays of another mesh: nothing is copied.

    Args:
        state: arrays ``[worker, ...]``.
        live: mesh on which it is to be; its devices have the shards of this process, but for rows without state.
        specs: RANKED or SHARED for each array, or a prefix tree of them.
        has_R: whether each row has its state; the others get zeros. None: all have.
    """

    has_state = has_R or [True] * live.num_live

    def moved(spec: PartitionSpec, leaf: jax.Array) -> jax.Array:
        shard_on = {shard.device: shard.data for shard in leaf.addressable_shards}
        empty = None if all(has_state) else np.zeros(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
        shards = [
            shard_on[device] if has else jax.device_put(empty, device)
            for has, devices in zip(has_state, live.mesh.devices, strict=True)
            for device in devices
            if device.process_index == jax.process_index()
        ]
        shape = (live.num_live, *leaf.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, live.shardings(spec), shards)

    return map_specs(moved, specs, state)


@dataclass(frozen=True, eq=False)
class Routes:
    """The rows that give and get each chunk, in rounds in which a row has a single chunk to do with.

    Attributes:
        old, new: see ``share_blocks``, both in the same chunks: those that are whole before and after.
        giver_C: row that gives each chunk.
        chunk_RT: chunk that each row gives or gets in each round, int32; ``NONE`` where it does neither.
        takes_RC: whether each row gets each chunk; a row that gives it and holds it gets it, too.
        sums: sum over the rows that a chunk has to do with, of each round.
    """

    old: StepSpec
    new: StepSpec
    giver_C: tuple[int, ...]
    chunk_RT: np.ndarray
    takes_RC: np.ndarray
    sums: tuple[PeerSum, ...]

    @classmethod
    def of(cls, old: StepSpec, new: StepSpec, has_R: Sequence[bool]) -> "Routes":
        """The routes on which the lowest row that has a chunk gives it."""
        if old.chunks != new.chunks:
            old, new = (
                replace(one, chunks=chunks) for one, chunks in zip((old, new), _in_common(old, new), strict=True)
            )
        had_RC = old.chunks.holds_HC[old.holding_R] & np.array(has_R)[:, None]
        takes_RC = new.chunks.holds_HC[new.holding_R]
        missing = np.flatnonzero(~had_RC.any(axis=0)).tolist()
        assert not missing, f"no row has the chunks {missing}"
        giver_C = had_RC.argmax(axis=0)
        concerns_RC = takes_RC.copy()
        concerns_RC[giver_C, np.arange(len(giver_C))] = True
        groups = [np.flatnonzero(rows).tolist() for rows in concerns_RC.T]
        rounds = Rounds.of(groups, concerns_RC, how_unequal(new.live.mesh.devices.flat[0].platform))
        return cls(old, new, tuple(giver_C.tolist()), rounds.chunk_HT, takes_RC, rounds.sums)

    @property
    def shapes(self) -> TrainState:
        """Shapes of the state of a row, as a per-rank function sees it."""

        def shape(spec: PartitionSpec, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            dims = (leaf.shape[0], *leaf.shape[2:]) if spec == RANKED else leaf.shape
            return jax.ShapeDtypeStruct(dims, leaf.dtype)

        return map_specs(shape, self.new.specs, self.new.worker_shapes)

    def take(self, turn: int, row: jax.Array, state: TrainState, shared: TrainState) -> tuple[TrainState, jax.Array]:
        """``shared`` with the chunks of a round, from ``state``; and on how many ranks they have not arrived."""
        chunk = jnp.asarray(self.chunk_RT[:, turn])[row]
        gives = jnp.asarray(self._gives_R(turn))[row]
        takes = (chunk != NONE) & jnp.asarray(self.takes_RC)[row, chunk]
        before, after = (ChunkLayers(spec, jnp.asarray(spec.holding_R)[row]) for spec in (self.old, self.new))
        of_chunk = before.state(state, chunk)
        leaves, tree = jax.tree_util.tree_flatten_with_path(of_chunk)
        is_sent = [self._is_sent(group_of(path), turn) for path, _ in leaves]
        sent = [leaf for (_, leaf), is_so in zip(leaves, is_sent, strict=True) if is_so]
        given, num_wrong = copy_bits(sent, gives, self.sums[turn])
        arrived = iter(given)
        merged = [next(arrived) if is_so else leaf for (_, leaf), is_so in zip(leaves, is_sent, strict=True)]
        of_chunk = jax.tree.unflatten(tree, merged)
        if self.new.chunks.are_single:  # the chunk is all that a row has
            return jax.tree.map(lambda new, old: jnp.where(takes, new, old), of_chunk, shared), num_wrong
        # Only what has arrived is written: a state has many chunks, and each takes a round.
        taken = jnp.where(takes, chunk, NONE)
        with_chunk = after.put_state(shared, of_chunk, taken, ends_iteration=takes)

        def arrived_only(path: Sequence[Any], new: jax.Array, old: jax.Array) -> jax.Array:
            return new if self._is_sent(group_of(path), turn) else old

        return jax.tree_util.tree_map_with_path(arrived_only, with_chunk, shared), num_wrong

    def _gives_R(self, turn: int) -> np.ndarray:
        chunk_R = self.chunk_RT[:, turn]
        return (chunk_R != NONE) & (np.array(self.giver_C)[chunk_R] == np.arange(len(chunk_R)))

    def _is_sent(self, group: str | None, turn: int) -> bool:
        """Whether a group of parameters goes with the chunks of a round; embedding and head with one chunk each.

        A tied embedding is in use in every worker, so it goes with every chunk.
        """
        if group == "embedding" and self.new.ties_stages:
            return True
        last = len(self.giver_C) - 1
        return group not in EMBEDDING_AND_HEAD or {"embedding": 0, "head": last}[group] in self.chunk_RT[:, turn]


def _in_common(old: StepSpec, new: StepSpec) -> tuple[Chunks, Chunks]:
    """The chunks of two specs, cut finer where needed, so that those of both are the same blocks."""
    ends = sorted({end for spec in (old, new) for end in accumulate(spec.chunks.sizes)})
    sizes = tuple(end - begin for begin, end in pairwise([0, *ends]))

    def finer(chunks: Chunks) -> Chunks:
        chunk_of = np.searchsorted(list(accumulate(chunks.sizes)), ends)
        stages = tuple(tuple(stage_C[chunk] for chunk in chunk_of.tolist()) for stage_C in chunks.stage_DC)
        return Chunks(chunks.moe_layers, sizes, stages)

    return finer(old.chunks), finer(new.chunks)


def compiled_share(
    old: StepSpec, new: StepSpec, store: ExecutableCache, has_R: Sequence[bool], device_rows: Sequence[int]
) -> Share:
    """The program that gives every row the blocks that it is to hold, see ``share_blocks``.

    Args:
        old: step spec of the state that rows have, on the live mesh.
        new: step spec of the state that they get, for the same workers on the same devices.
        store: cache of the run.
        has_R: whether each row has the state; one that holds it has to, for every chunk.
        device_rows: see ``Configuration``.
    """
    share = jax.jit(share_blocks(old, new, has_R))
    state, devices = old.abstract(with_slots=True), list(new.live.mesh.devices.flat)
    return store.get(share_key(old, new, has_R, device_rows), lambda: share.lower(state).compile(), devices)


def share_key(old: StepSpec, new: StepSpec, has_R: Sequence[bool], device_rows: Sequence[int]) -> object:
    """The cache key of the program of ``compiled_share``: it depends on the rows that give, not on those that take."""
    holds = [(spec.chunks.sizes, spec.chunks.stage_DC, spec.holding_R.tolist()) for spec in (old, new)]
    return "share", new.live.num_ranks, holds, tuple(device_rows), Routes.of(old, new, has_R).giver_C
