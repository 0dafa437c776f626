"""From devices to the host: what a checkpoint saves, copied so that training may go on and overwrite it."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from swift.checkpoint.split import Snapshot, Split, by_name, copy_rows
from swift.mesh import RANKED, SHARED, LiveMesh


def device_snapshot(split: Split, state: Any, live: LiveMesh, chosen_LK: np.ndarray) -> Snapshot:
    """Copies what a checkpoint saves of a state on devices; only chosen experts leave them.

    Args:
        split: of a state of one row for each stage.
        state: arrays ``[worker, ...]`` on ``live``; others than those of the split are left aside.
        live: the mesh, of which this process has all devices.
        chosen_LK: the classes of every MoE layer of the model.
    """
    arrays, rows = by_name(state), live.first_rows
    experts = [arrays[name] for name in split.expert_names]
    if experts and chosen_LK.shape[1] < split.num_classes:
        chosen_RLK = live.put(split.by_stage(chosen_LK)[live.stage_R].astype(np.int32), SHARED)
        experts = _picker(live)(experts, chosen_RLK)
    dense = {name: np.empty(shape.shape, shape.dtype) for name, shape in split.dense_shapes.items()}
    blocks = split.new_blocks(chosen_LK.shape[1])
    for name, room in dense.items():
        copy_rows(arrays[name], rows, room)
    for name, picked in zip(split.expert_names, experts, strict=True):
        copy_rows(picked, rows, split.view(blocks, name))
    return Snapshot(dense, blocks, chosen_LK)


@lru_cache(maxsize=4)
def _picker(live: LiveMesh) -> Callable[[list[jax.Array], jax.Array], list[jax.Array]]:
    """The jitted choice of classes: arrays ``[R, L, N, E, w]`` and classes ``[R, L, K]`` -> ``[R, L, N, K, w]``."""

    def pick(arrays: list[jax.Array], chosen_LK: jax.Array) -> list[jax.Array]:
        return [jnp.take_along_axis(array_LEw, chosen_LK[:, :, None], axis=1) for array_LEw in arrays]

    return jax.jit(live.per_rank(pick, (RANKED, SHARED), RANKED))
