"""Moving a state to other workers, block by block where they hold other blocks than those that have them now.

On the host; ``state_move`` does it from device to device in a single process, which has all of them. Between processes,
states are copied by a program, see ``block_sharing``; for a checkpoint each process copies the pieces that it has.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from swift.mesh.per_rank import RANKED, is_spec
from swift.pipeline.runtime.step_spec import StepSpec
from swift.pipeline.train_state import KINDS, TrainState

ALL = slice(None)


class BlockPiece(NamedTuple):
    """Layers of a worker's stacks."""

    worker: int  # mesh row
    layers: slice
    is_padding: bool = False


def move_on_host(state: TrainState, old: StepSpec, new: StepSpec) -> TrainState:
    """Moves a state on the host, RANKED ``[worker, layer, N, ...]`` and SHARED ``[worker, ...]``, to another spec.

    Args:
        state: arrays of ``old``, with or without slots.
        old: spec of the state, with a mesh row for each worker that has it; its mesh may be on any devices.
        new: spec of the state to make, of the same model and number of ranks.

    Returns:
        The state of ``new``; the same arrays where its mesh rows hold what those of ``old`` do.
    """
    move = BlockMove(old, new)
    if move.changes_nothing:
        return state
    return _each_on_host(state, move, new, lambda _, leaf: leaf)


def put_moved(state: TrainState, old: StepSpec, new: StepSpec) -> TrainState:
    """Puts a state on the host on the devices of another spec, array by array; a process fills its own devices.

    Args:
        state: see ``move_on_host``.
        old: see ``move_on_host``.
        new: see ``move_on_host``.
    """
    return _each_on_host(state, BlockMove(old, new), new, lambda spec, leaf: new.live.put(leaf, spec))


def _each_on_host(
    state: TrainState, move: "BlockMove", new: StepSpec, put: Callable[[PartitionSpec, np.ndarray], Any]
) -> TrainState:
    specs = new.specs if state.slots else replace(new.specs, slots={})

    def of_spec(path: Sequence[Any], spec: PartitionSpec, sub: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda inner, leaf: put(spec, move.on_host(name_of((*path, *inner)), leaf)), sub
        )

    return jax.tree_util.tree_map_with_path(of_spec, specs, state, is_leaf=is_spec)


class LocalPiece(NamedTuple):
    """A piece of an array of a state, on a device of this process.

    Attributes:
        place: its place in the array, a slice for each of the first dims.
        values: a copy of its values.
    """

    place: tuple[slice, ...]
    values: jax.Array


def local_pieces(state: TrainState, old: StepSpec, new: StepSpec) -> dict[str, list[LocalPiece]]:
    """Copies the pieces that this process gives of a state in the layout of another spec, on its devices alone.

    The pieces of all processes do not overlap, and together are everything: of processes that have the same piece each
    gives an equal part of the last dim.

    Args:
        state: arrays ``[worker, ...]`` on the mesh of ``old``, without slots.
        old: spec of the state.
        new: spec of the same model and number of ranks, whose mesh is not used.

    Returns:
        Pieces by name of the array, such as ``master.expert``.
    """
    move, pieces = BlockMove(old, new), dict[str, list[LocalPiece]]()

    def of_spec(path: Sequence[Any], spec: PartitionSpec, sub: Any) -> None:
        for inner, leaf in jax.tree_util.tree_leaves_with_path(sub):
            whole = (*path, *inner)
            name = jax.tree_util.keystr(whole, simple=True, separator=".")
            pieces[name] = list(move.local(name_of(whole), spec, leaf))

    specs = replace(new.specs, slots={})
    jax.tree_util.tree_map_with_path(of_spec, specs, state, is_leaf=is_spec)
    return pieces


class BlockMove:
    """The pieces of which the arrays of every worker are made.

    Args:
        old: spec of a state.
        new: spec of the state to make; it differs in its mesh and in who holds what.
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
        workers = {worker: index for index, worker in enumerate(old.live.workers)}
        self._own_R = [workers.get(worker) for worker in new.live.workers]  # where a worker's own arrays are
        living = set(new.live.workers)
        self._order = sorted(range(old.live.num_live), key=lambda row: (old.live.workers[row] not in living, row))

    @property
    def changes_nothing(self) -> bool:
        """Whether the mesh rows hold the same blocks before and after."""
        return self._blocks[0] == self._blocks[1] and all(map(self._is_as_long, KINDS))

    def on_host(self, name: str, leaf: np.ndarray) -> np.ndarray:
        """An array on the host in the rows of the new mesh: of a group, the ``placement``, or neither (empty)."""

        def row_of(pieces: list[BlockPiece]) -> np.ndarray:
            taken = [_taken(leaf[piece.worker, None], piece) for piece in pieces]
            return taken[0] if len(taken) == 1 else np.concatenate(taken, axis=1)

        return np.concatenate([row_of(self.pieces(name, row)) for row in range(self._new.live.num_live)])

    def local(self, name: str, spec: PartitionSpec, leaf: jax.Array) -> Iterator[LocalPiece]:
        """The pieces of an array that this process gives: of a group, of the ``placement``, or of neither (empty)."""
        grid, shard_on = self._old.live.mesh.devices, {shard.device: shard.data for shard in leaf.addressable_shards}
        for row in range(self._new.live.num_live):
            for at, equal in enumerate(self._sources(name, row)):
                homes = {_processes(grid[piece.worker]): piece for piece in equal[::-1]}
                mine = [nth for nth, home in enumerate(homes) if jax.process_index() in home]
                if not mine:
                    continue
                piece = list(homes.values())[mine[0]]
                place = slice(row, row + 1), *([ALL] if piece.layers == ALL else [slice(at, at + 1)])
                for rank, device in enumerate(grid[piece.worker]):
                    if device in shard_on and (spec == RANKED or (rank, mine[0]) == (0, 0)):
                        taken = LocalPiece(place[: leaf.ndim], _copied(shard_on[device], piece))
                        yield _own_part(taken, rank, mine[0], len(homes)) if spec == RANKED else taken

    def pieces(self, name: str, row: int) -> list[BlockPiece]:
        """The pieces of an array in a row of the new mesh: of a group, of the ``placement``, or of neither (empty)."""
        if self._keeps(name, row):
            return [BlockPiece(self._kept_R[row], ALL)]
        # Of no layers, as the placement of a model without experts, any worker's array is whole.
        return [equal[0] for equal in self._sources(name, row)] or [BlockPiece(self._order[0], ALL)]

    def _sources(self, name: str, row: int) -> list[tuple[BlockPiece, ...]]:
        """The same piece by piece, from all workers that have a piece: the best to copy it from is first."""
        if name not in KINDS and self._keeps(name, row):
            kept, blocks = self._kept_R[row], self._blocks[0]
            return [tuple(BlockPiece(one, ALL) for one in [kept, *self._order] if blocks[one] == blocks[kept])]
        if name not in (*KINDS, "placement"):
            return [tuple(BlockPiece(worker, ALL) for worker in self._givers(name))]
        kind = KINDS.get(name, True)
        index_RL = self._old.chunks.model_index(kind)[self._old.holding_R]
        mine = self._new.chunks.model_index(kind)[self._new.holding_R[row]]
        own = [worker for worker in (self._own_R[row],) if worker is not None]
        order = list(dict.fromkeys([*own, *self._order]))
        pieces: list[tuple[BlockPiece, ...]] = []
        for block in mine.tolist():
            if block < 0:
                pieces.append((BlockPiece(order[0], slice(0, 1), is_padding=name != "placement"),))
                continue
            found = [(worker, np.flatnonzero(index_RL[worker] == block)) for worker in order]
            pieces.append(
                tuple(BlockPiece(worker, slice(int(at[0]), int(at[0]) + 1)) for worker, at in found if len(at))
            )
        return pieces

    def _keeps(self, name: str, row: int) -> bool:
        """Whether a row of the new mesh keeps the arrays of a group."""
        return self._kept_R[row] >= 0 and self._is_as_long(name)

    def _is_as_long(self, name: str) -> bool:
        kind = KINDS.get(name, True)
        is_stacked = name in KINDS or name == "placement"
        return not is_stacked or self._old.chunks.stack_size(kind) == self._new.chunks.stack_size(kind)

    def _givers(self, name: str) -> list[int]:
        """The workers whose embedding or head is in use; for what all have, all."""
        chunk = {"embedding": 0, "head": -1}.get(name)
        holding = range(self._old.live.num_live) if chunk is None else self._old.peers_C[chunk]
        return [worker for worker in self._order if worker in holding]


def name_of(path: Sequence[Any]) -> str:
    """The group of an array of a state; ``placement``; empty for what has no layers."""
    attribute, *more = path
    if attribute.name in ("placement", "policy", "step"):
        return "placement" if attribute.name == "placement" else ""
    return next((entry.key for entry in more if isinstance(entry, jax.tree_util.DictKey)), "")


def _processes(devices: np.ndarray) -> frozenset[int]:
    """The processes that have a worker."""
    return frozenset(device.process_index for device in devices)


def _own_part(piece: LocalPiece, rank: int, nth: int, num_homes: int) -> LocalPiece:
    """One of equal parts of the piece of a RANKED array."""
    width = piece.values.shape[-1]
    first, last = width * nth // num_homes, width * (nth + 1) // num_homes
    place = *piece.place, slice(rank, rank + 1), *[ALL] * (piece.values.ndim - 4), slice(first, last)
    return LocalPiece(place, _slice(piece.values, -1, first, last - first))


def _copied(array: jax.Array, piece: BlockPiece) -> jax.Array:
    """The layers of a piece as an array of their own."""
    if piece.layers == ALL:
        return jnp.copy(array)
    layers = _slice(array, 1, piece.layers.start, 1)
    return jnp.zeros_like(layers) if piece.is_padding else layers


@partial(jax.jit, static_argnums=(1, 3))
def _slice(array: jax.Array, dim: int, start: int, size: int) -> jax.Array:
    """A slice of an array, compiled once whatever its start."""
    return lax.dynamic_slice_in_dim(array, start, size, dim)


def _taken(array: np.ndarray, piece: BlockPiece) -> np.ndarray:
    """The layers of a piece, of an array on the host."""
    if piece.layers == ALL:
        return array
    layers = array[:, piece.layers]
    return np.zeros_like(layers) if piece.is_padding else layers
