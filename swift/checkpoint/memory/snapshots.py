"""Snapshots: copies of a state from devices to the host, while training continues and overwrites it."""

import math
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from swift.checkpoint.partial import Snapshot, StateSplit, by_name
from swift.checkpoint.storage import Piece
from swift.mesh import RANKED, SHARED, LiveMesh, move_rows


def begin_snapshot(
    split: StateSplit,
    state: Any,
    live: LiveMesh,
    chosen_LK: Int[np.ndarray, "layers K"],
    room: Snapshot | None = None,
) -> Callable[[], Snapshot]:
    """Starts to copy what a checkpoint saves of a state whose devices all belong to this process.

    Args:
        split: division of a state with one row for each stage.
        state: see ``begin_pieces``.
        live: the mesh.
        chosen_LK: the chosen classes of every MoE layer of the model.
        room: see ``join_pieces``.

    Returns:
        A function that waits for the copy and returns it on the host, for any thread.
    """
    finish = begin_pieces(split, state, live, chosen_LK)
    return lambda: join_pieces(split, finish(), chosen_LK, room)


def begin_pieces(
    split: StateSplit, state: Any, live: LiveMesh, chosen_LK: Int[np.ndarray, "layers K"]
) -> Callable[[], list[Piece]]:
    """Starts to copy what a checkpoint saves of a state: on the devices first, and from there to the host.

    Training does not wait: the devices make their copy after the ops that they have queued. It takes up device memory
    until it is on the host.

    Args:
        split: division of a state with one row for each stage.
        state: arrays ``[worker, ...]`` on ``live``; those that are not in the split are ignored. May be donated after
            this returns.
        live: the mesh, on the devices of one or several processes, each of which calls this.
        chosen_LK: the chosen classes of every MoE layer of the model.

    Returns:
        A function that waits for the copy and returns the pieces that this process has, for any thread. The pieces of
        all processes do not overlap, and together are everything.
    """
    arrays, stages = by_name(state), live.with_rows(tuple(live.rows[row] for row in live.first_rows))
    specs = {name: RANKED if name in split.ranked_names else SHARED for name in split.shapes}
    if not stages.is_here:
        return list  # peers on other hosts have the same state
    if stages.rows != live.rows:
        arrays = move_rows({name: arrays[name] for name in specs}, live, stages, specs, live.first_rows)
    dense = {name: arrays[name] for name in split.dense_shapes}
    experts = {name: arrays[name] for name in split.expert_names}
    chosen = None
    if chosen_LK.shape[-1] < split.num_classes:
        chosen = stages.put(split.by_stage(chosen_LK).astype(np.int32), SHARED)
    ranked = tuple(name for name in dense if name in split.ranked_names)
    copies = _copier(stages, ranked, tuple(dense), tuple(experts))(dense, experts, chosen)
    return partial(_fetch, copies)


def join_pieces(
    split: StateSplit, pieces: Iterable[Piece], chosen_LK: np.ndarray, room: Snapshot | None = None
) -> Snapshot:
    """Puts the pieces of all processes together.

    Args:
        split: division of a state with one row for each stage.
        pieces: pieces that together are everything.
        chosen_LK: the chosen classes of every MoE layer of the model.
        room: an older snapshot, which is overwritten if it has the same size: allocating memory takes longer than the
            copy.

    Raises:
        OSError: they are not everything, and nothing else.
    """
    missing = {name: math.prod(shape.shape) for name, shape in split.shapes.items()}
    for name in split.expert_names:
        missing[name] = missing[name] // split.num_classes * chosen_LK.shape[-1]
    if room is None or room.chosen_LK.shape != chosen_LK.shape:
        dense = {name: np.empty(shape.shape, shape.dtype) for name, shape in split.dense_shapes.items()}
        blocks = split.new_blocks(chosen_LK.shape[-1])
    else:
        dense, blocks = room.dense, room.blocks
    for name, place, values in pieces:
        missing[name] -= values.size
        if name in dense:
            dense[name][place] = values
        else:
            split.put(blocks, name, values, place)
    if any(missing.values()):
        raise OSError(f"not all of the state has come: {', '.join(name for name in missing if missing[name])}")
    return Snapshot(dense, blocks, chosen_LK)


def _fetch(copies: dict[str, jax.Array]) -> list[Piece]:
    shards = [(name, shard) for name, copy in copies.items() for shard in copy.addressable_shards]
    firsts = [(name, shard) for name, shard in shards if shard.replica_id == 0]
    for _, shard in firsts:
        shard.data.copy_to_host_async()
    return [Piece(name, shard.index, np.asarray(shard.data)) for name, shard in firsts]


@lru_cache(maxsize=4)
def _copier(
    stages: LiveMesh, ranked: tuple[str, ...], dense: tuple[str, ...], experts: tuple[str, ...]
) -> Callable[..., dict[str, jax.Array]]:
    """Returns the jitted copy of arrays by name; of experts ``[P, L, N, E, w]`` only those chosen ``[P, L, K]``."""

    def copy(dense: dict[str, jax.Array], experts: dict[str, jax.Array], chosen_LK: jax.Array | None) -> Any:
        if chosen_LK is not None:
            index = chosen_LK[:, :, None]
            experts = {name: jnp.take_along_axis(array_LEw, index, axis=1) for name, array_LEw in experts.items()}
        return jax.tree.map(jnp.copy, dense | experts)

    specs = {name: RANKED if name in ranked else SHARED for name in dense}
    of_experts = dict.fromkeys(experts, RANKED)
    return jax.jit(stages.per_rank(copy, (specs, of_experts, SHARED), specs | of_experts))
