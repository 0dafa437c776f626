"""Moving a state to other workers, block by block where they hold other blocks than those that have them now.

From device to device, within a single process, which has all of them, or on the host. Between processes, states are
copied by a program, see ``block_sharing``.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from swift.mesh import RANKED, is_spec, move_rows, moved_bytes, source_rows
from swift.pipeline.runtime import KINDS, StepSpec, TrainState

_ALL = slice(None)


class _Piece(NamedTuple):
    """Layers of a worker's stacks."""

    worker: int  # mesh row
    layers: slice
    is_padding: bool = False


def move_state(state: TrainState, old: StepSpec, new: StepSpec) -> tuple[TrainState, int]:
    """Moves a state to the live mesh of another spec of the same model, without using the host.

    Workers that keep their role share their arrays with it, so neither state may be donated while the other is in use.

    Args:
        state: arrays ``[worker, ...]`` on the mesh of ``old``, with or without slots.
        old: spec of the state.
        new: spec of the state to make; it differs in its mesh and in who holds what.

    Returns:
        The state on the mesh of ``new``, and the number of bytes moved between devices.
    """
    specs = new.specs if state.slots else replace(new.specs, slots={})
    if old.chunks.are_stages and new.chunks.are_stages:
        sources = source_rows(old.live, new.live)
        return move_rows(state, old.live, new.live, specs, sources), moved_bytes(state, old.live, new.live, sources)
    move, total = _BlockMove(old, new), 0

    def moved(path: Sequence[Any], spec: PartitionSpec, leaf: jax.Array) -> jax.Array:
        nonlocal total
        array, num_bytes = move.array(_name(path), spec, leaf)
        total += num_bytes
        return array

    def of_spec(path: Sequence[Any], spec: PartitionSpec, sub: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda inner, leaf: moved((*path, *inner), spec, leaf), sub)

    return jax.tree_util.tree_map_with_path(of_spec, specs, state, is_leaf=is_spec), total


def move_on_host(state: TrainState, old: StepSpec, new: StepSpec) -> TrainState:
    """Moves a state on the host, RANKED ``[worker, layer, N, ...]`` and SHARED ``[worker, ...]``, to another spec.

    Args:
        state: arrays of ``old``, with or without slots.
        old: spec of the state, with a mesh row for each worker that has it; its mesh may be on any devices.
        new: spec of the state to make, of the same model and number of ranks.

    Returns:
        The state of ``new``; the same arrays where its mesh rows hold what those of ``old`` do.
    """
    move = _BlockMove(old, new)
    if move.changes_nothing:
        return state
    specs = new.specs if state.slots else replace(new.specs, slots={})

    def of_spec(path: Sequence[Any], spec: PartitionSpec, sub: Any) -> Any:  # noqa: ARG001
        return jax.tree_util.tree_map_with_path(lambda inner, leaf: move.on_host(_name((*path, *inner)), leaf), sub)

    return jax.tree_util.tree_map_with_path(of_spec, specs, state, is_leaf=is_spec)


class _BlockMove:
    """The pieces of which the arrays of every worker are made.

    Args:
        old, new: see ``move_state``.
    """

    def __init__(self, old: StepSpec, new: StepSpec):
        self._old, self._new = old, new
        before = {row: index for index, row in enumerate(old.live.rows)}
        self._blocks = blocks = [[spec.chunks.blocks[holding] for holding in spec.holding_R] for spec in (old, new)]
        # The row of the old mesh whose arrays a worker keeps, or -1.
        self._kept_R = [
            index if (index := before.get(row, -1)) >= 0 and blocks[0][index] == mine else -1
            for row, mine in zip(new.live.rows, blocks[1], strict=True)
        ]
        living = set(new.live.workers)
        self._order = sorted(range(old.live.num_live), key=lambda row: (old.live.workers[row] not in living, row))

    @property
    def changes_nothing(self) -> bool:
        """Whether the mesh rows hold the same blocks before and after."""
        return self._blocks[0] == self._blocks[1] and all(map(self._is_as_long, KINDS))

    def on_host(self, name: str, leaf: np.ndarray) -> np.ndarray:
        """An array on the host in the rows of the new mesh: of a group, the ``placement``, or neither (empty)."""

        def row_of(pieces: list[_Piece]) -> np.ndarray:
            taken = [_taken(leaf[piece.worker, None], piece) for piece in pieces]
            return taken[0] if len(taken) == 1 else np.concatenate(taken, axis=1)

        return np.concatenate([row_of(self._pieces(name, row)) for row in range(self._new.live.num_live)])

    def array(self, name: str, spec: PartitionSpec, leaf: jax.Array) -> tuple[jax.Array, int]:
        """An array on the new mesh, and the bytes moved: of a group, of the ``placement``, or of neither (empty)."""
        grid, shard_on = self._old.live.mesh.devices, {shard.device: shard.data for shard in leaf.addressable_shards}
        shards, num_bytes = [], 0
        for row, devices in enumerate(self._new.live.mesh.devices):
            pieces = self._pieces(name, row)
            for rank, device in enumerate(devices):
                froms = [grid[piece.worker, rank] for piece in pieces]
                taken = [_taken(shard_on[there], piece) for there, piece in zip(froms, pieces, strict=True)]
                num_bytes += sum(one.nbytes for one, there in zip(taken, froms, strict=True) if there != device)
                here = [jax.device_put(one, device) for one in taken]
                shards.append(here[0] if len(here) == 1 else jnp.concatenate(here, axis=1))
        shape = [self._new.live.num_live, *shards[0].shape[1:]]
        if spec == RANKED:
            shape[2] = self._new.live.num_ranks
        return jax.make_array_from_single_device_arrays(tuple(shape), self._new.live.shardings(spec), shards), num_bytes

    def _pieces(self, name: str, row: int) -> list[_Piece]:
        """The pieces of the arrays of a group in a row of the new mesh."""
        if self._kept_R[row] >= 0 and self._is_as_long(name):
            return [_Piece(self._kept_R[row], _ALL)]
        if name not in (*KINDS, "placement"):
            return [_Piece(self._giver(name), _ALL)]
        kind = KINDS.get(name, True)
        index_RL = self._old.chunks.model_index(kind)[self._old.holding_R]
        mine = self._new.chunks.model_index(kind)[self._new.holding_R[row]]
        pieces: list[_Piece] = []
        for block in mine.tolist():
            found = (
                [(worker, np.flatnonzero(index_RL[worker] == block)) for worker in self._order] if block >= 0 else []
            )
            worker, at = next(((worker, int(at[0])) for worker, at in found if len(at)), (self._order[0], 0))
            pieces.append(_Piece(worker, slice(at, at + 1), is_padding=block < 0 and name != "placement"))
        return pieces

    def _is_as_long(self, name: str) -> bool:
        kind = KINDS.get(name, True)
        is_stacked = name in KINDS or name == "placement"
        return not is_stacked or self._old.chunks.stack_size(kind) == self._new.chunks.stack_size(kind)

    def _giver(self, name: str) -> int:
        """The worker whose embedding or head is in use; for what all have, any."""
        chunk = {"embedding": 0, "head": -1}.get(name)
        holding = range(self._old.live.num_live) if chunk is None else self._old.peers_C[chunk]
        return next(worker for worker in self._order if worker in holding)


def _name(path: Sequence[Any]) -> str:
    """The group of an array of a state; ``placement``; empty for what has no layers."""
    attribute, *more = path
    if attribute.name in ("placement", "policy", "step"):
        return "placement" if attribute.name == "placement" else ""
    return next((entry.key for entry in more if isinstance(entry, jax.tree_util.DictKey)), "")


def _taken(array: Any, piece: _Piece) -> Any:
    """The layers of a piece, of an array on a device or on the host."""
    if piece.layers == _ALL:
        return array
    layers = array[:, piece.layers]
    if not piece.is_padding:
        return layers
    return np.zeros_like(layers) if isinstance(layers, np.ndarray) else jnp.zeros_like(layers)
