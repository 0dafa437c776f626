"""Snapshots: copies of a state from devices to the host, while training continues and overwrites it."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from swift.checkpoint.partial import Snapshot, StateSplit, by_name
from swift.mesh import RANKED, SHARED, LiveMesh, move_rows


def begin_snapshot(
    split: StateSplit,
    state: Any,
    live: LiveMesh,
    chosen_LK: Int[np.ndarray, "layers K"],
    room: Snapshot | None = None,
) -> Callable[[], Snapshot]:
    """Starts to copy what a checkpoint saves of a state: on the devices first, and from there to the host.

    Training does not wait: the devices make their copy after the ops that they have queued. It takes up device memory
    until it is on the host.

    Args:
        split: division of a state with one row for each stage.
        state: arrays ``[worker, ...]`` on ``live``; those that are not in the split are ignored. May be donated after
            this returns.
        live: the mesh, all devices of which belong to this process.
        chosen_LK: the chosen classes of every MoE layer of the model.
        room: an older snapshot, which is overwritten if it has the same size: allocating memory takes longer than the
            copy.

    Returns:
        A function that waits for the copy and returns it on the host, for any thread.
    """
    arrays, stages = by_name(state), live.with_rows(tuple(live.rows[row] for row in live.first_rows))
    specs = {name: RANKED if name in split.ranked_names else SHARED for name in split.shapes}
    if stages.rows != live.rows:
        arrays = move_rows({name: arrays[name] for name in specs}, live, stages, specs, live.first_rows)
    dense = {name: arrays[name] for name in split.dense_shapes}
    experts = {name: arrays[name] for name in split.expert_names}
    chosen = None
    if chosen_LK.shape[-1] < split.num_classes:
        chosen = jax.device_put(split.by_stage(chosen_LK).astype(np.int32), stages.shardings(SHARED))
    ranked = tuple(name for name in dense if name in split.ranked_names)
    copies = _copier(stages, ranked, tuple(dense), tuple(experts))(dense, experts, chosen)
    return partial(_fetch, split, copies, chosen_LK, room)


def _fetch(split: StateSplit, copies: dict[str, jax.Array], chosen_LK: np.ndarray, room: Snapshot | None) -> Snapshot:
    if room is None or room.chosen_LK.shape != chosen_LK.shape:
        dense = {name: np.empty(shape.shape, shape.dtype) for name, shape in split.dense_shapes.items()}
        blocks = split.new_blocks(chosen_LK.shape[-1])
    else:
        dense, blocks = room.dense, room.blocks
    for copy in copies.values():
        copy.copy_to_host_async()
    for name, copy in copies.items():
        for shard in copy.addressable_shards:
            if shard.replica_id == 0 and name in dense:
                dense[name][shard.index] = shard.data
            elif shard.replica_id == 0:
                split.put(blocks, name, np.asarray(shard.data), shard.index)
    return Snapshot(dense, blocks, chosen_LK)


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
