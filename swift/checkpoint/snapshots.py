"""Asynchronous copies of a state from the devices to the host, while training continues."""

import math
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Int

from swift.checkpoint.multi_host_save import HostShard
from swift.checkpoint.units import Snapshot, StateSplit, by_name
from swift.mesh.live import LiveMesh
from swift.mesh.per_rank import RANKED, SHARED
from swift.mesh.state_rows import transfer_rows


def begin_snapshot(
    split: StateSplit,
    state: Any,
    live: LiveMesh,
    chosen_LK: Int[np.ndarray, "layers K"],
    room: Snapshot | None = None,
) -> Callable[[], Snapshot]:
    """Starts the device-to-host copy of a state whose devices all belong to this process.

    Args:
        split: division of a state with one row for each stage.
        state: see ``begin_pieces``.
        live: mesh of the state.
        chosen_LK: expert classes to copy for every MoE layer of the model, ``[layers, K]``.
        room: older snapshot to overwrite, see ``assemble_snapshot``.

    Returns:
        A function that waits for the copy and returns the snapshot; any thread may call it.
    """
    finish = begin_pieces(split, state, live, chosen_LK)
    return lambda: assemble_snapshot(split, finish(), chosen_LK, room)


def begin_pieces(
    split: StateSplit, state: Any, live: LiveMesh, chosen_LK: Int[np.ndarray, "layers K"]
) -> Callable[[], list[HostShard]]:
    """Starts copying a state, first on the devices and then to the host.

    Training does not wait: the devices queue the copy behind the operations already dispatched. The copy takes up
    device memory until it is on the host.

    Args:
        split: division of a state with one row for each stage.
        state: arrays ``[worker, ...]`` on ``live``; arrays that are not in the split are ignored. May be donated after
            this returns.
        live: mesh of the state. If it spans several processes, every process has to call this function.
        chosen_LK: expert classes to copy for every MoE layer of the model, ``[layers, K]``.

    Returns:
        A function that waits for the copy and returns this process's pieces; any thread may call it. The pieces of all
        processes cover the state without overlap; processes that hold the same stage contribute equal parts of its
        RANKED arrays.
    """
    givers = _givers(live)
    rows = [row for stage_rows in givers for row in stage_rows]
    arrays, stages, num_givers = by_name(state), live.with_rows(tuple(live.rows[row] for row in rows)), len(givers[0])
    specs = {name: RANKED if name in split.ranked_names else SHARED for name in split.shapes}
    if not stages.is_local:
        return list  # this process contributes nothing: other processes hold the same state
    if stages.rows != live.rows:
        arrays = transfer_rows({name: arrays[name] for name in specs}, live, stages, specs, rows)
    dense = {name: arrays[name] for name in split.dense_shapes}
    experts = {name: arrays[name] for name in split.expert_names}
    chosen = None
    if chosen_LK.shape[-1] < split.num_classes:
        chosen = stages.put(np.repeat(split.by_stage(chosen_LK).astype(np.int32), num_givers, axis=0), SHARED)
    ranked = tuple(name for name in dense if name in split.ranked_names)
    copies = _copier(stages, num_givers, ranked, tuple(dense), tuple(experts))(dense, experts, chosen)
    return partial(_fetch, copies, split, num_givers)


def _givers(live: LiveMesh) -> list[list[int]]:
    """Chooses the mesh rows that copy each stage: one row in each process that holds the stage.

    Every stage gets the same number of rows, since one program runs on all of them. A worker whose ranks are in several
    processes is counted once, for all these processes together.
    """
    if live.virtual:
        return [[row] for row in live.first_rows]
    # The processes of each mesh row, and for each stage, the first row of every set of processes.
    homes = [frozenset(device.process_index for device in devices) for devices in live.mesh.devices]
    firsts = [list({homes[row]: row for row in reversed(peers)}.values())[::-1] for peers in live.peers]
    return [stage_rows[: min(map(len, firsts))] for stage_rows in firsts]


def assemble_snapshot(
    split: StateSplit, pieces: Iterable[HostShard], chosen_LK: np.ndarray, room: Snapshot | None = None
) -> Snapshot:
    """Assembles a snapshot from the pieces of all processes.

    Args:
        split: division of a state with one row for each stage.
        pieces: pieces that cover the state.
        chosen_LK: expert classes that were copied for every MoE layer of the model, ``[layers, K]``.
        room: an older snapshot, which is overwritten if it has the same size, as allocating memory takes longer than
            copying.

    Raises:
        OSError: the pieces do not cover the whole state.
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


def _fetch(copies: dict[str, jax.Array], split: StateSplit, num_givers: int) -> list[HostShard]:
    shards = [(name, shard) for name, copy in copies.items() for shard in copy.addressable_shards]
    firsts = [(name, shard) for name, shard in shards if shard.replica_id == 0]  # one shard where several are equal
    for _, shard in firsts:  # start all transfers before waiting for the first
        shard.data.copy_to_host_async()
    pieces = [HostShard(name, shard.index, np.asarray(shard.data)) for name, shard in firsts]
    if num_givers == 1:
        return pieces
    return [part for piece in pieces if (part := _state_part(piece, split, num_givers)) is not None]


def _state_part(piece: HostShard, split: StateSplit, num_givers: int) -> HostShard | None:
    """Converts a mesh row's piece to a piece of the state; returns None if the stage's other rows contribute it."""
    row, *rest = piece.place
    stage, giver = divmod(row.start, num_givers)
    place = slice(stage, stage + 1), *rest
    if piece.name not in split.ranked_names:
        return None if giver else HostShard(piece.name, place, piece.values)
    width = split.shapes[piece.name].shape[-1]
    size = piece.values.shape[-1]
    begin, end = min(giver * size, width), min((giver + 1) * size, width)
    if begin == end:
        return None
    # ``dynamic_slice`` has shifted the last row's piece back to fit, so only the end of the piece is new.
    return HostShard(piece.name, (*place[:-1], slice(begin, end)), piece.values[..., size - (end - begin) :])


@lru_cache(maxsize=4)
def _copier(
    stages: LiveMesh, num_givers: int, ranked: tuple[str, ...], dense: tuple[str, ...], experts: tuple[str, ...]
) -> Callable[..., dict[str, jax.Array]]:
    """Returns a jitted function that copies arrays by name; of expert arrays, only the K chosen classes are copied.

    If several rows copy a stage, each copies its part of the last dimension of RANKED arrays.
    """

    def part(array: jax.Array) -> jax.Array:
        if num_givers == 1:
            return jnp.copy(array)  # without a copy, jit would return the input, which the caller may donate
        size = -(-array.shape[-1] // num_givers)
        start = stages.row_index() % num_givers * size
        return lax.dynamic_slice_in_dim(array, start, size, axis=-1)  # clamps: the last slice shifts back to fit

    def copy(dense: dict[str, jax.Array], experts: dict[str, jax.Array], chosen_LK: jax.Array | None) -> Any:
        if chosen_LK is not None:
            index = chosen_LK[:, :, None]
            experts = {name: jnp.take_along_axis(array_LEw, index, axis=1) for name, array_LEw in experts.items()}
        dense_parts = {name: part(array) if name in ranked else jnp.copy(array) for name, array in dense.items()}
        return dense_parts | jax.tree.map(part, experts)

    specs = {name: RANKED if name in ranked else SHARED for name in dense}
    expert_specs = dict.fromkeys(experts, RANKED)
    return jax.jit(stages.per_rank(copy, (specs, expert_specs, SHARED), specs | expert_specs))
