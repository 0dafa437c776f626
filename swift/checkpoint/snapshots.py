"""From devices to the host: what a checkpoint saves, copied so that training may go on and overwrite it."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from swift.checkpoint.split import Snapshot, Split, by_name
from swift.mesh import RANKED, SHARED, LiveMesh


def device_snapshot(
    split: Split, state: Any, live: LiveMesh, chosen_LK: np.ndarray, room: Snapshot | None = None
) -> Snapshot:
    """Copies what a checkpoint saves of a state on devices; only chosen experts leave them.

    Args:
        split: of a state of one row for each stage.
        state: arrays ``[worker, ...]`` on ``live``; others than those of the split are left aside.
        live: the mesh, of which this process has all devices.
        chosen_LK: the classes of every MoE layer of the model.
        room: an older snapshot that nobody needs any more: written over where it is as large, since new memory costs
            more than the copy.
    """
    arrays, chosen_PLK = by_name(state), split.by_stage(chosen_LK)
    experts, index = [arrays[name] for name in split.expert_names], None
    if chosen_LK.shape[-1] < split.num_classes:
        if live.mesh.devices.flat[0].platform == "cpu":
            index = chosen_PLK  # the host reads the devices' own memory: it takes what it wants
        else:
            chosen_RLK = live.put(chosen_PLK[live.stage_R].astype(np.int32), SHARED)
            experts = _picker(live)(experts, chosen_RLK)
    if room is None or room.chosen_LK.shape != chosen_LK.shape:
        dense = {name: np.empty(shape.shape, shape.dtype) for name, shape in split.dense_shapes.items()}
        blocks = split.new_blocks(chosen_LK.shape[-1])
    else:
        dense, blocks = room.dense, room.blocks
    for name, copy in dense.items():
        _copy_rows(arrays[name], live, copy)
    for name, array in zip(split.expert_names, experts, strict=True):
        _copy_rows(array, live, split.view(blocks, name), index)
    return Snapshot(dense, blocks, chosen_LK)


def _copy_rows(array: jax.Array, live: LiveMesh, room: np.ndarray, chosen_PLK: np.ndarray | None = None) -> None:
    """Copies the rows that speak for the stages to the host.

    Args:
        array: ``[R, ...]``.
        live: its mesh.
        room: ``[P, ...]``, for the copy.
        chosen_PLK: the classes to copy, of an array ``[R, L, N, E, w]`` to room for ``[P, L, N, K, w]``.
    """
    stage_of = {row: stage for stage, row in enumerate(live.first_rows)}
    for shard in array.addressable_shards:
        first, *others = shard.index
        rows = [] if shard.replica_id else range(*first.indices(array.shape[0]))
        for row in filter(stage_of.__contains__, rows):
            part, into = np.asarray(shard.data)[row - (first.start or 0)], room[stage_of[row], ...]
            if chosen_PLK is None:
                into[tuple(others)] = part
                continue
            for (layer, nth), class_ in np.ndenumerate(chosen_PLK[stage_of[row]]):
                into[layer, others[1], nth] = part[layer, :, class_]


@lru_cache(maxsize=4)
def _picker(live: LiveMesh) -> Callable[[list[jax.Array], jax.Array], list[jax.Array]]:
    """The jitted choice of classes: arrays ``[R, L, N, E, w]`` and classes ``[R, L, K]`` -> ``[R, L, N, K, w]``."""

    def pick(arrays: list[jax.Array], chosen_LK: jax.Array) -> list[jax.Array]:
        return [jnp.take_along_axis(array_LEw, chosen_LK[:, :, None], axis=1) for array_LEw in arrays]

    return jax.jit(live.per_rank(pick, (RANKED, SHARED), RANKED))
