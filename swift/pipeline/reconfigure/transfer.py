"""Transfer of a state to other workers, which may hold other blocks than the workers that have the state now.

There are four ways to transfer a state. For the first three, ``_TransferPlan`` determines the pieces that make up the
arrays of each worker; for the last one, ``Routes`` determines which row sends each chunk.

- ``transfer_on_host`` and ``transfer_to_devices`` move a state that is on the host, array by array.
- ``local_pieces`` collects the pieces that this process contributes to a checkpoint.
- ``DeviceTransfer`` moves a state between the devices of one process, with programs that can be compiled in advance.
  Arrays that stay whole are copied from device to device. If a worker is to hold other blocks than before, a program on
  each sending device extracts the layers for this worker from all arrays, and a program on the worker's device
  concatenates the layers that arrived and those that it already had.
- ``collective_transfer`` moves a state between the mesh rows of several processes, with collectives, chunk by chunk and
  bit for bit. A process that joins has no state: each of its chunks comes from a worker that has it. If pipelines are
  cut differently, the blocks of this process may come from several workers.

Legend: C chunks, R mesh rows, T rounds.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec, SingleDeviceSharding
from jax.stages import Compiled

from swift.errors import RunError
from swift.mesh.live import LiveMesh, local_rows
from swift.mesh.peer_sum import PeerAllReduce, reduction_for_unequal_groups
from swift.mesh.per_rank import RANKED, SHARED, is_spec, map_specs
from swift.mesh.state_rows import broadcast_bits, source_rows, transfer_rows, transferred_bytes
from swift.models.cuts import Chunks
from swift.pipeline.reconfigure.executables import ExecutableCache
from swift.pipeline.state import EMBEDDING_AND_HEAD, KINDS, TrainState
from swift.pipeline.step.spec import NONE, Rounds, StepSpec
from swift.pipeline.step.train_step import ChunkLayers, group_of

_ALL = slice(None)

Share = Callable[[TrainState], tuple[TrainState, jax.Array]]
"""Function from a state to (a state in which every row has its chunks, bool[worker]: whether they arrived intact)."""


def transfer_on_host(state: TrainState, old: StepSpec, new: StepSpec) -> TrainState:
    """Moves a state on the host, RANKED ``[worker, layer, N, ...]`` and SHARED ``[worker, ...]``, to another spec.

    Args:
        state: arrays of ``old``, with or without slots.
        old: spec of the state, with a mesh row for each worker that has state; its mesh may be on any devices.
        new: spec of the resulting state, with the same model and number of ranks.

    Returns:
        The state of ``new``; ``state`` itself if all mesh rows hold the same blocks as before.
    """
    move = _TransferPlan(old, new)
    if move.changes_nothing:
        return state
    return _each_on_host(state, move, new, lambda _, leaf: leaf)


def transfer_to_devices(state: TrainState, old: StepSpec, new: StepSpec) -> TrainState:
    """Copies a state from the host to the devices of another spec, array by array; a process fills its own devices.

    Args:
        state: see ``transfer_on_host``.
        old: see ``transfer_on_host``.
        new: see ``transfer_on_host``.
    """
    return _each_on_host(state, _TransferPlan(old, new), new, lambda spec, leaf: new.live.put(leaf, spec))


def _each_on_host(
    state: TrainState, move: "_TransferPlan", new: StepSpec, put: Callable[[PartitionSpec, np.ndarray], Any]
) -> TrainState:
    specs = new.specs if state.slots else replace(new.specs, slots={})

    def put_leaves(path: Sequence[Any], spec: PartitionSpec, sub: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda inner, leaf: put(spec, move.on_host(_name_of((*path, *inner)), leaf)), sub
        )

    return jax.tree_util.tree_map_with_path(put_leaves, specs, state, is_leaf=is_spec)


class LocalRange(NamedTuple):
    """Piece of an array in a state, on a device local to this process.

    Attributes:
        place: position of the piece in the array: a slice for each leading dim; the remaining dims are whole.
        values: copy of the values in the piece.
    """

    place: tuple[slice, ...]
    values: jax.Array


def local_pieces(state: TrainState, old: StepSpec, new: StepSpec) -> dict[str, list[LocalRange]]:
    """Copies this process's pieces of a state, in another spec's layout, without moving data between devices.

    The pieces of all processes do not overlap, and together they are the whole state. If several processes have the
    same piece of a RANKED array, each contributes an equal part of its last dim. A piece of a SHARED array comes from
    one process.

    Args:
        state: arrays ``[worker, ...]`` on the mesh of ``old``, without slots.
        old: spec of the state.
        new: spec of the same model and number of ranks, whose mesh is not used.

    Returns:
        Pieces by the name of their array, such as ``master.expert``.
    """
    move, pieces = _TransferPlan(old, new), dict[str, list[LocalRange]]()

    def collect_pieces(path: Sequence[Any], spec: PartitionSpec, sub: Any) -> None:
        for inner, leaf in jax.tree_util.tree_leaves_with_path(sub):
            whole = (*path, *inner)
            name = jax.tree_util.keystr(whole, simple=True, separator=".")
            pieces[name] = list(move.local(_name_of(whole), spec, leaf))

    specs = replace(new.specs, slots={})
    jax.tree_util.tree_map_with_path(collect_pieces, specs, state, is_leaf=is_spec)
    return pieces


def checkpoint_rows(spec: StepSpec) -> tuple[int, ...]:
    """Returns mesh rows whose states together have every chunk; if chunks are stages, the lowest row of each stage."""
    chosen: list[int] = []
    for rows in spec.peers_C:
        if not set(rows) & set(chosen):
            chosen.append(rows[0])
    return tuple(chosen)


class LayerRange(NamedTuple):
    """Layers of a worker's stacks."""

    worker: int  # mesh row
    layers: slice
    is_padding: bool = False


class _TransferPlan:
    """Pieces that make up the arrays of every worker after a transfer.

    In the methods, ``name`` is the parameter group of an array, ``placement``, or empty for any other array.

    Args:
        old: spec of a state.
        new: spec of the resulting state; it differs in its mesh and in the blocks that workers hold.
    """

    def __init__(self, old: StepSpec, new: StepSpec):
        self._old, self._new = old, new
        before = {row: index for index, row in enumerate(old.live.rows)}
        self._blocks = blocks = [[spec.chunks.blocks[holding] for holding in spec.holding_R] for spec in (old, new)]
        # The row of the old mesh whose arrays a worker keeps, or -1.
        self._kept_R = [
            index if (index := before.get(row, -1)) >= 0 and blocks[0][index] == new_blocks else -1
            for row, new_blocks in zip(new.live.rows, blocks[1], strict=True)
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
        """Assembles an array, on the host, for the rows of the new mesh."""

        def row_of(pieces: list[LayerRange]) -> np.ndarray:
            layers = [_taken(leaf[piece.worker, None], piece) for piece in pieces]
            return layers[0] if len(layers) == 1 else np.concatenate(layers, axis=1)

        return np.concatenate([row_of(self.pieces(name, row)) for row in range(self._new.live.num_live)])

    def local(self, name: str, spec: PartitionSpec, leaf: jax.Array) -> Iterator[LocalRange]:
        """Yields the pieces of an array that this process contributes."""
        grid, shard_on = self._old.live.mesh.devices, {shard.device: shard.data for shard in leaf.addressable_shards}
        for row in range(self._new.live.num_live):
            for at, equal in enumerate(self._sources(name, row)):
                holders = {_processes(grid[piece.worker]): piece for piece in equal[::-1]}
                local_holders = [index for index, processes in enumerate(holders) if jax.process_index() in processes]
                if not local_holders:
                    continue
                piece = list(holders.values())[local_holders[0]]
                place = slice(row, row + 1), *([_ALL] if piece.layers == _ALL else [slice(at, at + 1)])
                for rank, device in enumerate(grid[piece.worker]):
                    if device in shard_on and (spec == RANKED or (rank, local_holders[0]) == (0, 0)):
                        local_range = LocalRange(place[: leaf.ndim], _copied(shard_on[device], piece))
                        yield (
                            _own_part(local_range, rank, local_holders[0], len(holders))
                            if spec == RANKED
                            else local_range
                        )

    def pieces(self, name: str, row: int) -> list[LayerRange]:
        """Returns an array's pieces in a row of the new mesh."""
        if self._keeps(name, row):
            return [LayerRange(self._kept_R[row], _ALL)]
        # An array without layers, such as the placement of a model without experts, may come from any worker.
        return [equal[0] for equal in self._sources(name, row)] or [LayerRange(self._order[0], _ALL)]

    def _sources(self, name: str, row: int) -> list[tuple[LayerRange, ...]]:
        """Returns all workers' copies of each array piece in a new mesh row, the preferred copy first."""
        if name not in KINDS and self._keeps(name, row):
            old_row, blocks = self._kept_R[row], self._blocks[0]
            return [
                tuple(
                    LayerRange(worker, _ALL) for worker in [old_row, *self._order] if blocks[worker] == blocks[old_row]
                )
            ]
        if name not in (*KINDS, "placement"):
            return [tuple(LayerRange(worker, _ALL) for worker in self._givers(name))]
        kind = KINDS.get(name, True)
        index_RL = self._old.chunks.model_index(kind)[self._old.holding_R]
        index_L = self._new.chunks.model_index(kind)[self._new.holding_R[row]]
        former_rows = [worker for worker in (self._own_R[row],) if worker is not None]
        order = list(dict.fromkeys([*former_rows, *self._order]))
        pieces: list[tuple[LayerRange, ...]] = []
        for block in index_L.tolist():
            if block < 0:
                pieces.append((LayerRange(order[0], slice(0, 1), is_padding=name != "placement"),))
                continue
            matches = [(worker, np.flatnonzero(index_RL[worker] == block)) for worker in order]
            pieces.append(
                tuple(LayerRange(worker, slice(int(at[0]), int(at[0]) + 1)) for worker, at in matches if len(at))
            )
        return pieces

    def _keeps(self, name: str, row: int) -> bool:
        """Whether a row of the new mesh keeps an array as it is."""
        return self._kept_R[row] >= 0 and self._is_as_long(name)

    def _is_as_long(self, name: str) -> bool:
        kind = KINDS.get(name, True)
        is_stacked = name in KINDS or name == "placement"
        return not is_stacked or self._old.chunks.stack_size(kind) == self._new.chunks.stack_size(kind)

    def _givers(self, name: str) -> list[int]:
        """Returns the workers that use their embedding or head; for other arrays, all workers."""
        chunk = {"embedding": 0, "head": -1}.get(name)
        holding = range(self._old.live.num_live) if chunk is None else self._old.peers_C[chunk]
        return [worker for worker in self._order if worker in holding]


def _name_of(path: Sequence[Any]) -> str:
    """Returns the group of an array in a state, ``placement``, or an empty string for arrays without layers."""
    attribute = path[0].name
    if attribute in ("placement", "policy", "step"):
        return "placement" if attribute == "placement" else ""
    return group_of(path) or ""


def _processes(devices: np.ndarray) -> frozenset[int]:
    """Returns the processes that have a worker's devices."""
    return frozenset(device.process_index for device in devices)


def _own_part(piece: LocalRange, rank: int, index: int, num_holders: int) -> LocalRange:
    """Returns this holder's part of a RANKED array's piece, whose last dim ``num_holders`` holders share equally."""
    width = piece.values.shape[-1]
    first, last = width * index // num_holders, width * (index + 1) // num_holders
    place = *piece.place, slice(rank, rank + 1), *[_ALL] * (piece.values.ndim - 4), slice(first, last)
    return LocalRange(place, _slice(piece.values, -1, first, last - first))


def _copied(array: jax.Array, piece: LayerRange) -> jax.Array:
    """Copies the layers of a piece to a new array; zeros for padding."""
    if piece.layers == _ALL:
        return jnp.copy(array)
    layers = _slice(array, 1, piece.layers.start, 1)
    return jnp.zeros_like(layers) if piece.is_padding else layers


@partial(jax.jit, static_argnums=(1, 3))
def _slice(array: jax.Array, dim: int, start: int, size: int) -> jax.Array:
    """Returns a slice of an array along a dim; compiled once for all ``start`` values."""
    return lax.dynamic_slice_in_dim(array, start, size, dim)


def _taken(array: np.ndarray, piece: LayerRange) -> np.ndarray:
    """Returns the layers of a piece from an array on the host; zeros for padding."""
    if piece.layers == _ALL:
        return array
    layers = array[:, piece.layers]
    return np.zeros_like(layers) if piece.is_padding else layers


class _Run(NamedTuple):
    """Consecutive layers from one of a program's input arrays; hashable."""

    array: int
    first: int
    end: int


class _Padding(NamedTuple):
    """Layers of zeros; hashable."""

    shape: tuple[int, ...]
    dtype: str


_Plan = tuple[tuple[_Run | _Padding, ...], ...]
"""Parts that a program concatenates along the layer dim, for each of its results."""
_Taken = tuple[tuple[_Run], ...]
"""Plan in which every result is a single run, so that nothing is concatenated."""
_Shapes = tuple[tuple[tuple[int, ...], str], ...]
"""Shapes and dtypes of a program's inputs: the same plan may apply to whole stacks and to layers taken from them."""


class _Send(NamedTuple):
    """Layers that a device sends to a worker on another device.

    Attributes:
        giver: device that sends the layers.
        leaves: indices of the leaves of the state that the layers are taken from.
        plan: layers to take from these leaves, one run for each result.
    """

    giver: jax.Device
    leaves: tuple[int, ...]
    plan: _Taken


class _Receive(NamedTuple):
    """Assembly of a worker's arrays on one device.

    Attributes:
        device: device of the resulting arrays.
        whole: source device of each leaf that is copied as a whole.
        gifts: layers that other devices send.
        local_leaves: leaves from which the device takes layers itself; they precede the received layers in the inputs
            of ``plan``.
        joined: leaves that are concatenated from layers.
        plan: parts of each leaf in ``joined``.
    """

    device: jax.Device
    whole: dict[int, jax.Device]
    gifts: tuple[_Send, ...]
    local_leaves: tuple[int, ...]
    joined: tuple[int, ...]
    plan: _Plan


class DeviceTransfer:
    """Transfer of states from one spec's live mesh to another's, for the same model, without passing through the host.

    Args:
        old: spec of the states.
        new: spec of the resulting states; it differs in its mesh and in the blocks that workers hold.
        with_slots: whether the states have slots.
    """

    def __init__(self, old: StepSpec, new: StepSpec, *, with_slots: bool = True):
        self._old, self._new = old, new
        self._programs: dict[tuple[jax.Device, _Plan, _Shapes], Compiled] = {}
        self._shards: list[jax.ShapeDtypeStruct] = []
        self._receipts: list[_Receive] = []
        self.has_blocks = not (old.chunks.matches_stages and new.chunks.matches_stages)
        if self.has_blocks:
            named = jax.tree_util.tree_flatten_with_path(old.abstract(with_slots=with_slots))[0]
            shapes = [(leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for _, leaf in named]
            self._shards = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
            move, names = _TransferPlan(old, new), [_name_of(path) for path, _ in named]
            for row, devices in enumerate(new.live.mesh.devices):
                pieces = [move.pieces(name, row) for name in names]
                self._receipts += [self._receipt(pieces, rank, device) for rank, device in enumerate(devices)]

    def prepare(self) -> None:
        """Compiles the programs of the transfer; may be called from a different thread than the transfer itself."""
        for receipt in filter(lambda receipt: receipt.joined, self._receipts):
            inputs = [self._shards[leaf] for leaf in receipt.local_leaves]
            for gift in receipt.gifts:
                self._compile(gift.giver, gift.plan, [self._shards[leaf] for leaf in gift.leaves])
                inputs += [_shape_of(run, self._shards[gift.leaves[run.array]]) for (run,) in gift.plan]
            self._compile(receipt.device, receipt.plan, inputs)

    def __call__(self, state: TrainState) -> tuple[TrainState, int]:
        """Moves a state.

        The result shares the arrays of workers that keep their role, so neither state may be donated while the other is
        in use.

        Args:
            state: arrays ``[worker, ...]`` on the mesh of the old spec.

        Returns:
            The state on the mesh of the new spec, and the number of bytes moved between devices.
        """
        old, new = self._old, self._new
        specs = new.specs if state.slots else replace(new.specs, slots={})
        if not self.has_blocks:
            sources = source_rows(old.live, new.live)
            return transfer_rows(state, old.live, new.live, specs, sources), transferred_bytes(
                state, old.live, new.live, sources
            )
        leaves, tree = jax.tree.flatten(state)
        shard_on = [{shard.device: shard.data for shard in leaf.addressable_shards} for leaf in leaves]
        device_arrays, num_bytes = [], 0
        for receipt in self._receipts:
            arrays, moved = self._received(receipt, shard_on)
            device_arrays.append(arrays)
            num_bytes += moved

        def whole(spec: Any, number: int) -> jax.Array:
            shape = [new.live.num_live, *device_arrays[0][number].shape[1:]]
            if spec == RANKED:
                shape[2] = new.live.num_ranks
            shards = [arrays[number] for arrays in device_arrays]
            return jax.make_array_from_single_device_arrays(tuple(shape), new.live.shardings(spec), shards)

        return map_specs(whole, specs, jax.tree.unflatten(tree, range(len(leaves)))), num_bytes

    def _receipt(self, pieces: Sequence[Sequence[LayerRange]], rank: int, device: jax.Device) -> _Receive:
        """Plans the assembly of a worker's arrays on one device.

        Args:
            pieces: pieces of each leaf of the state.
            rank: expert rank of the device.
            device: device of the resulting arrays.
        """
        grid, whole, joined_pieces = self._old.live.mesh.devices, dict[int, jax.Device](), dict[int, list[LayerRange]]()
        for leaf, leaf_pieces in enumerate(pieces):
            if leaf_pieces[0].layers == _ALL:
                whole[leaf] = grid[leaf_pieces[0].worker, rank]
            else:
                joined_pieces[leaf] = merged(leaf_pieces)
        requested_runs = dict[jax.Device, dict[_Run, None]]()
        for leaf, leaf_pieces in joined_pieces.items():
            for piece in leaf_pieces:
                if not piece.is_padding:
                    run = _Run(leaf, piece.layers.start, piece.layers.stop)
                    requested_runs.setdefault(grid[piece.worker, rank], {})[run] = None
        local_leaves = tuple(sorted({run.array for run in requested_runs.pop(device, {})}))
        gifts, input_index = list[_Send](), dict[tuple[jax.Device, _Run], int]()
        for giver, runs in requested_runs.items():
            leaves = tuple(sorted({run.array for run in runs}))
            gifts.append(_Send(giver, leaves, tuple((run._replace(array=leaves.index(run.array)),) for run in runs)))
            input_index |= {
                (giver, run): len(local_leaves) + len(input_index) + index for index, run in enumerate(runs)
            }

        def part(leaf: int, piece: LayerRange) -> _Run | _Padding:
            first, end = piece.layers.start, piece.layers.stop
            if piece.is_padding:
                before, _, *after = self._shards[leaf].shape
                return _Padding((before, end - first, *after), str(self._shards[leaf].dtype))
            giver = grid[piece.worker, rank]
            if giver == device:
                return _Run(local_leaves.index(leaf), first, end)
            return _Run(input_index[giver, _Run(leaf, first, end)], 0, end - first)

        plan = tuple(tuple(part(leaf, piece) for piece in leaf_pieces) for leaf, leaf_pieces in joined_pieces.items())
        return _Receive(device, whole, tuple(gifts), local_leaves, tuple(joined_pieces), plan)

    def _received(
        self, receipt: _Receive, shard_on: Sequence[dict[jax.Device, jax.Array]]
    ) -> tuple[dict[int, jax.Array], int]:
        """Assembles a worker's arrays on one device; returns them by leaf, and the bytes from other devices."""
        device, num_bytes = receipt.device, 0
        arrays = {leaf: jax.device_put(shard_on[leaf][source], device) for leaf, source in receipt.whole.items()}
        num_bytes += sum(arrays[leaf].nbytes for leaf, source in receipt.whole.items() if source != device)
        inputs = [shard_on[leaf][device] for leaf in receipt.local_leaves]
        for gift in receipt.gifts:
            received = self._run(gift.giver, gift.plan, [shard_on[leaf][gift.giver] for leaf in gift.leaves])
            num_bytes += sum(array.nbytes for array in received)
            inputs += jax.device_put(received, device)
        if receipt.joined:
            # The results are already on this device, unless they consist of padding alone.
            joined = jax.device_put(self._run(device, receipt.plan, inputs), device)
            arrays |= zip(receipt.joined, joined, strict=True)
        return arrays, num_bytes

    def _compile(self, device: jax.Device, plan: _Plan, like: Sequence[jax.ShapeDtypeStruct]) -> None:
        key = device, plan, _shapes_of(like)
        if key in self._programs:
            return
        sharding = SingleDeviceSharding(device)
        shapes = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding) for s in like]
        self._programs[key] = _joined.lower(plan, shapes).compile()

    def _run(self, device: jax.Device, plan: _Plan, arrays: list[jax.Array]) -> list[jax.Array]:
        program = self._programs.get((device, plan, _shapes_of(arrays)))
        results: list[jax.Array] = _joined(plan, arrays) if program is None else program(arrays)
        return results


def move_state(state: TrainState, old: StepSpec, new: StepSpec) -> tuple[TrainState, int]:
    """Moves a state, with or without slots; see ``DeviceTransfer``."""
    return DeviceTransfer(old, new, with_slots=bool(state.slots))(state)


def merged(pieces: Sequence[LayerRange]) -> list[LayerRange]:
    """Merges adjacent pieces that are consecutive layers of the same worker, or that are padding."""
    ranges: list[LayerRange] = []
    for piece in pieces:
        last, layers = ranges[-1] if ranges else None, piece.layers
        if last and piece.is_padding and last.is_padding:
            end = last.layers.stop + layers.stop - layers.start
            ranges[-1] = last._replace(layers=slice(last.layers.start, end))
        elif last and not piece.is_padding and last == (piece.worker, slice(last.layers.start, layers.start), False):
            ranges[-1] = last._replace(layers=slice(last.layers.start, layers.stop))
        else:
            ranges.append(piece)
    return ranges


def _shapes_of(arrays: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> _Shapes:
    return tuple((array.shape, str(array.dtype)) for array in arrays)


def _shape_of(run: _Run, array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    before, _, *after = array.shape
    return jax.ShapeDtypeStruct((before, run.end - run.first, *after), array.dtype)


@partial(jax.jit, static_argnums=0)
def _joined(plan: _Plan, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Computes the results of a plan."""

    def layers(part: _Run | _Padding) -> jax.Array:
        if isinstance(part, _Padding):
            return jnp.zeros(part.shape, part.dtype)
        return lax.slice_in_dim(arrays[part.array], part.first, part.end, axis=1)

    return [jnp.concatenate([layers(part) for part in parts], axis=1) for parts in plan]


def collective_transfer(old: StepSpec, new: StepSpec, has_R: Sequence[bool]) -> Share:
    """Returns a function, to be jitted, that sends every row all chunks that it is to hold.

    Args:
        old: spec of the state that rows have.
        new: spec of the resulting state, for the same workers on the same devices; equal to ``old`` unless workers are
            to hold other blocks.
        has_R: whether each row has its state; for every chunk, at least one row that holds it must have its state.

    Returns:
        A function from the state of ``old`` to (the state of ``new``, bool[worker]: whether everything that the worker
        received has the checksum of what was sent).
    """
    routes = Routes.of(old, new, has_R)
    is_same = old.has_same_chunks(new)

    def per_rank(state: TrainState) -> tuple[TrainState, jax.Array]:
        row = new.live.row_index()
        shared = state if is_same else jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), routes.shapes)
        num_wrong = jnp.int32(0)
        for round_index in range(len(routes.sums)):
            shared, wrong = routes.take(round_index, row, state, shared)
            num_wrong += wrong
        return shared, num_wrong == 0

    return new.live.per_rank(per_rank, (old.specs,), (new.specs, SHARED))


def move_between_processes(state: TrainState, old: StepSpec, new: StepSpec) -> tuple[TrainState, int]:
    """Moves a state to the live mesh of another spec with the same chunks, when several processes each have some rows.

    Workers that keep their role keep their arrays; every other worker receives the state of its chunks over the mesh.
    All processes must call this function at the same point of the program.

    Args:
        state: arrays ``[worker, ...]`` on the mesh of ``old``, with slots; donated.
        old: spec of the state.
        new: spec of the resulting state; every process must have a device of its mesh.

    Returns:
        The state on the mesh of ``new``, and the number of bytes copied.

    Raises:
        RunError: a checksum shows that a received state differs from the state that was sent.
    """
    before = set(old.live.rows)
    has_R = [row in before for row in new.live.rows]
    new_state = rebind_to_mesh(state, new.live, new.specs, has_R)
    share = (
        None
        if all(has_R)
        else jax.jit(collective_transfer(new, new, has_R), donate_argnums=0).lower(new_state).compile()
    )
    # Synchronize first: gloo waits only 30 s for the participants of a collective, and some may still be compiling.
    multihost_utils.sync_global_devices("reconfigured")
    if share is None:
        return new_state, 0
    new_state, is_right = share(new_state)
    if not np.concatenate(local_rows(is_right)).all():
        raise RunError("a state that was copied to a worker has not arrived as it was sent")
    return new_state, has_R.count(False) * new.live.num_ranks * new.state_bytes


def rebind_to_mesh(state: TrainState, live: LiveMesh, specs: Any, has_R: Sequence[bool] | None = None) -> TrainState:
    """Rebuilds a state's arrays on another mesh from the shards that its devices already have, without copying.

    Args:
        state: arrays ``[worker, ...]``.
        live: mesh of the result; its devices in this process must have a shard of ``state``, except in rows without
            state.
        specs: RANKED or SHARED for each array, or a prefix tree of them.
        has_R: whether each row has its state, or None if all rows have it; the other rows get zeros.
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
    """Rows that send and receive each chunk, in rounds in which every row sends or receives at most one chunk.

    Attributes:
        old, new: see ``collective_transfer``; both are divided into the same chunks, of which each stays whole.
        giver_C: row that sends each chunk.
        chunk_RT: chunk that each row sends or receives in each round, int32; ``NONE`` if it does neither.
        takes_RC: whether each row takes each chunk, bool; this includes the sender if it is to hold the chunk, too.
        sums: for each round, the sum over the rows that send or receive the same chunk.
    """

    old: StepSpec
    new: StepSpec
    giver_C: tuple[int, ...]
    chunk_RT: np.ndarray
    takes_RC: np.ndarray
    sums: tuple[PeerAllReduce, ...]

    @classmethod
    def of(cls, old: StepSpec, new: StepSpec, has_R: Sequence[bool]) -> "Routes":
        """Plans the routes; the lowest row that has a chunk sends it."""
        if old.chunks != new.chunks:
            old, new = (
                replace(spec, chunks=chunks) for spec, chunks in zip((old, new), _in_common(old, new), strict=True)
            )
        had_RC = old.chunks.holds_HC[old.holding_R] & np.array(has_R)[:, None]
        takes_RC = new.chunks.holds_HC[new.holding_R]
        missing = np.flatnonzero(~had_RC.any(axis=0)).tolist()
        assert not missing, f"no row has the chunks {missing}"
        giver_C = had_RC.argmax(axis=0)
        concerns_RC = takes_RC.copy()
        concerns_RC[giver_C, np.arange(len(giver_C))] = True
        groups = [np.flatnonzero(rows).tolist() for rows in concerns_RC.T]
        rounds = Rounds.of(groups, concerns_RC, reduction_for_unequal_groups(new.live.mesh.devices.flat[0].platform))
        return cls(old, new, tuple(giver_C.tolist()), rounds.chunk_HT, takes_RC, rounds.sums)

    @property
    def shapes(self) -> TrainState:
        """Shapes of a row's state, as a per-rank function sees them."""

        def shape(spec: PartitionSpec, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            dims = (leaf.shape[0], *leaf.shape[2:]) if spec == RANKED else leaf.shape
            return jax.ShapeDtypeStruct(dims, leaf.dtype)

        return map_specs(shape, self.new.specs, self.new.worker_shapes)

    def take(
        self, round_index: int, row: jax.Array, state: TrainState, shared: TrainState
    ) -> tuple[TrainState, jax.Array]:
        """Returns ``shared`` with a round's chunks from ``state``, and the number of ranks with wrong checksums."""
        chunk = jnp.asarray(self.chunk_RT[:, round_index])[row]
        gives = jnp.asarray(self._gives_R(round_index))[row]
        takes = (chunk != NONE) & jnp.asarray(self.takes_RC)[row, chunk]
        before, after = (ChunkLayers(spec, jnp.asarray(spec.holding_R)[row]) for spec in (self.old, self.new))
        chunk_state = before.state(state, chunk)
        leaves, tree = jax.tree_util.tree_flatten_with_path(chunk_state)
        is_sent = [self._is_sent(group_of(path), round_index) for path, _ in leaves]
        sent = [leaf for (_, leaf), is_so in zip(leaves, is_sent, strict=True) if is_so]
        received, num_wrong = broadcast_bits(sent, gives, self.sums[round_index])
        arrived = iter(received)
        merged = [next(arrived) if is_so else leaf for (_, leaf), is_so in zip(leaves, is_sent, strict=True)]
        chunk_state = jax.tree.unflatten(tree, merged)
        if self.new.chunks.is_one_chunk_per_worker:  # the chunk is the row's whole state
            return jax.tree.map(lambda new, old: jnp.where(takes, new, old), chunk_state, shared), num_wrong
        # Write only the groups that were sent, since this runs once for each of a state's many chunks.
        written_chunk = jnp.where(takes, chunk, NONE)
        with_chunk = after.put_state(shared, chunk_state, written_chunk, ends_iteration=takes)

        def arrived_only(path: Sequence[Any], new: jax.Array, old: jax.Array) -> jax.Array:
            return new if self._is_sent(group_of(path), round_index) else old

        return jax.tree_util.tree_map_with_path(arrived_only, with_chunk, shared), num_wrong

    def _gives_R(self, round_index: int) -> np.ndarray:
        chunk_R = self.chunk_RT[:, round_index]
        return (chunk_R != NONE) & (np.array(self.giver_C)[chunk_R] == np.arange(len(chunk_R)))

    def _is_sent(self, group: str | None, round_index: int) -> bool:
        """Whether a parameter group is sent with the chunks of a round; embedding and head go with one chunk each.

        Every worker keeps an up-to-date tied embedding, so it is sent with every chunk.
        """
        if group == "embedding" and self.new.ties_stages:
            return True
        last = len(self.giver_C) - 1
        return group not in EMBEDDING_AND_HEAD or {"embedding": 0, "head": last}[group] in self.chunk_RT[:, round_index]


def _in_common(old: StepSpec, new: StepSpec) -> tuple[Chunks, Chunks]:
    """Returns two specs' chunks, cut more finely where needed so that both consist of the same blocks."""
    ends = sorted({end for spec in (old, new) for end in accumulate(spec.chunks.sizes)})
    sizes = tuple(end - begin for begin, end in pairwise([0, *ends]))

    def finer(chunks: Chunks) -> Chunks:
        chunk_of = np.searchsorted(list(accumulate(chunks.sizes)), ends)
        stages = tuple(tuple(stage_C[chunk] for chunk in chunk_of.tolist()) for stage_C in chunks.stage_DC)
        return Chunks(chunks.moe_layers, sizes, stages)

    return finer(old.chunks), finer(new.chunks)


def compiled_transfer(
    old: StepSpec, new: StepSpec, store: ExecutableCache, has_R: Sequence[bool], device_rows: Sequence[int]
) -> Share:
    """Returns the program that sends every row the blocks that it is to hold, see ``collective_transfer``.

    Args:
        old: step spec of the state that rows have, on the live mesh.
        new: step spec of the resulting state, for the same workers on the same devices.
        store: cache of the run.
        has_R: see ``collective_transfer``.
        device_rows: see ``Configuration``.
    """
    share = jax.jit(collective_transfer(old, new, has_R))
    state, devices = old.abstract(with_slots=True), list(new.live.mesh.devices.flat)
    return store.get(share_key(old, new, has_R, device_rows), lambda: share.lower(state).compile(), devices)


def share_key(old: StepSpec, new: StepSpec, has_R: Sequence[bool], device_rows: Sequence[int]) -> object:
    """Returns the cache key for the program from ``compiled_transfer``; of ``has_R``, only the sending rows matter."""
    holds = [(spec.chunks.sizes, spec.chunks.stage_DC, spec.holding_R.tolist()) for spec in (old, new)]
    return "share", new.live.num_ranks, holds, tuple(device_rows), Routes.of(old, new, has_R).giver_C
