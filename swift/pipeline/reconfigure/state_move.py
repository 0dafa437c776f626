"""Moving a state between the devices of one process, by programs that can be compiled before they are needed.

An array that stays whole goes from device to device as it is. Where a worker is to hold other blocks than before, a
program on each device that gives takes the layers of all arrays that go to a worker, and one on that worker's device
joins what has arrived with the layers that were there.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import SingleDeviceSharding
from jax.stages import Compiled

from swift.mesh.per_rank import RANKED, map_specs
from swift.mesh.state_transfer import move_rows, moved_bytes, source_rows
from swift.pipeline.reconfigure.block_transfer import ALL, BlockMove, BlockPiece, name_of
from swift.pipeline.runtime.step_spec import StepSpec
from swift.pipeline.train_state import TrainState


class _Run(NamedTuple):
    """Consecutive layers of an array among those that a program gets; hashable."""

    array: int
    first: int
    end: int


class _Padding(NamedTuple):
    """Layers of zeros; hashable."""

    shape: tuple[int, ...]
    dtype: str


_Plan = tuple[tuple[_Run | _Padding, ...], ...]
"""The parts that a program joins along the dim of layers, for each of its results."""
_Taken = tuple[tuple[_Run], ...]
"""A plan that joins nothing."""
_Shapes = tuple[tuple[tuple[int, ...], str], ...]
"""Shapes and types of what a program gets: whole stacks and layers taken of them may have the same plan."""


class _Gift(NamedTuple):
    """Layers that a device gives to a worker on another one.

    Attributes:
        giver: device that gives them.
        leaves: leaves of the state of which it gives layers.
        plan: what is taken of these, one run for each result.
    """

    giver: jax.Device
    leaves: tuple[int, ...]
    plan: _Taken


class _Receipt(NamedTuple):
    """The making of a worker's arrays on one device.

    Attributes:
        device: the device.
        whole: leaf of the state, and device that has what becomes the worker's array as it is.
        gifts: layers that other devices give.
        own: leaves of which the device has layers itself, which come before what it is given.
        joined: leaves that are made of layers.
        plan: what they are made of.
    """

    device: jax.Device
    whole: dict[int, jax.Device]
    gifts: tuple[_Gift, ...]
    own: tuple[int, ...]
    joined: tuple[int, ...]
    plan: _Plan


class StateMove:
    """A move of states between the live meshes of two specs of the same model, without using the host.

    Args:
        old: spec of the states.
        new: spec of the states to make; it differs in its mesh and in who holds what.
        with_slots: whether they have slots.
    """

    def __init__(self, old: StepSpec, new: StepSpec, *, with_slots: bool = True):
        self._old, self._new = old, new
        self._programs: dict[tuple[jax.Device, _Plan, _Shapes], Compiled] = {}
        self._shards: list[jax.ShapeDtypeStruct] = []
        self._receipts: list[_Receipt] = []
        self.has_blocks = not (old.chunks.are_stages and new.chunks.are_stages)
        if self.has_blocks:
            named = jax.tree_util.tree_flatten_with_path(old.abstract(with_slots=with_slots))[0]
            shapes = [(leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for _, leaf in named]
            self._shards = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
            move, names = BlockMove(old, new), [name_of(path) for path, _ in named]
            for row, devices in enumerate(new.live.mesh.devices):
                pieces = [move.pieces(name, row) for name in names]
                self._receipts += [self._receipt(pieces, rank, device) for rank, device in enumerate(devices)]

    def prepare(self) -> None:
        """Compiles the programs of the move; may be called from another thread than the rest."""
        for receipt in filter(lambda one: one.joined, self._receipts):
            inputs = [self._shards[leaf] for leaf in receipt.own]
            for gift in receipt.gifts:
                self._compile(gift.giver, gift.plan, [self._shards[leaf] for leaf in gift.leaves])
                inputs += [_shape_of(run, self._shards[gift.leaves[run.array]]) for (run,) in gift.plan]
            self._compile(receipt.device, receipt.plan, inputs)

    def __call__(self, state: TrainState) -> tuple[TrainState, int]:
        """Moves a state.

        Workers that keep their role share their arrays with it, so neither may be donated while the other is in use.

        Args:
            state: arrays ``[worker, ...]`` on the mesh of the old spec.

        Returns:
            The state on the mesh of the new spec, and the number of bytes moved between devices.
        """
        old, new = self._old, self._new
        specs = new.specs if state.slots else replace(new.specs, slots={})
        if not self.has_blocks:
            sources = source_rows(old.live, new.live)
            return move_rows(state, old.live, new.live, specs, sources), moved_bytes(state, old.live, new.live, sources)
        leaves, tree = jax.tree.flatten(state)
        shard_on = [{shard.device: shard.data for shard in leaf.addressable_shards} for leaf in leaves]
        made, num_bytes = [], 0
        for receipt in self._receipts:
            arrays, moved = self._received(receipt, shard_on)
            made.append(arrays)
            num_bytes += moved

        def whole(spec: Any, number: int) -> jax.Array:
            shape = [new.live.num_live, *made[0][number].shape[1:]]
            if spec == RANKED:
                shape[2] = new.live.num_ranks
            shards = [arrays[number] for arrays in made]
            return jax.make_array_from_single_device_arrays(tuple(shape), new.live.shardings(spec), shards)

        return map_specs(whole, specs, jax.tree.unflatten(tree, range(len(leaves)))), num_bytes

    def _receipt(self, pieces: Sequence[Sequence[BlockPiece]], rank: int, device: jax.Device) -> _Receipt:
        """Plans how the arrays of a worker are made on one device.

        Args:
            pieces: pieces of each leaf of the state.
            rank: expert rank of the device.
            device: the device.
        """
        grid, whole, made_of = self._old.live.mesh.devices, dict[int, jax.Device](), dict[int, list[BlockPiece]]()
        for leaf, of_leaf in enumerate(pieces):
            if of_leaf[0].layers == ALL:
                whole[leaf] = grid[of_leaf[0].worker, rank]
            else:
                made_of[leaf] = merged(of_leaf)
        asked = dict[jax.Device, dict[_Run, None]]()
        for leaf, of_leaf in made_of.items():
            for piece in of_leaf:
                if not piece.is_padding:
                    run = _Run(leaf, piece.layers.start, piece.layers.stop)
                    asked.setdefault(grid[piece.worker, rank], {})[run] = None
        own = tuple(sorted({run.array for run in asked.pop(device, {})}))
        gifts, place = list[_Gift](), dict[tuple[jax.Device, _Run], int]()
        for giver, runs in asked.items():
            leaves = tuple(sorted({run.array for run in runs}))
            gifts.append(_Gift(giver, leaves, tuple((run._replace(array=leaves.index(run.array)),) for run in runs)))
            place |= {(giver, run): len(own) + len(place) + nth for nth, run in enumerate(runs)}

        def part(leaf: int, piece: BlockPiece) -> _Run | _Padding:
            first, end = piece.layers.start, piece.layers.stop
            if piece.is_padding:
                before, _, *after = self._shards[leaf].shape
                return _Padding((before, end - first, *after), str(self._shards[leaf].dtype))
            giver = grid[piece.worker, rank]
            if giver == device:
                return _Run(own.index(leaf), first, end)
            return _Run(place[giver, _Run(leaf, first, end)], 0, end - first)

        plan = tuple(tuple(part(leaf, piece) for piece in of_leaf) for leaf, of_leaf in made_of.items())
        return _Receipt(device, whole, tuple(gifts), own, tuple(made_of), plan)

    def _received(
        self, receipt: _Receipt, shard_on: Sequence[dict[jax.Device, jax.Array]]
    ) -> tuple[dict[int, jax.Array], int]:
        """Makes the arrays of a worker on one device; returns them by leaf, and the bytes from other devices."""
        device, num_bytes = receipt.device, 0
        arrays = {leaf: jax.device_put(shard_on[leaf][there], device) for leaf, there in receipt.whole.items()}
        num_bytes += sum(arrays[leaf].nbytes for leaf, there in receipt.whole.items() if there != device)
        inputs = [shard_on[leaf][device] for leaf in receipt.own]
        for gift in receipt.gifts:
            given = self._run(gift.giver, gift.plan, [shard_on[leaf][gift.giver] for leaf in gift.leaves])
            num_bytes += sum(one.nbytes for one in given)
            inputs += jax.device_put(given, device)
        if receipt.joined:
            # On this device already, unless it was made of padding alone.
            joined = jax.device_put(self._run(device, receipt.plan, inputs), device)
            arrays |= zip(receipt.joined, joined, strict=True)
        return arrays, num_bytes

    def _compile(self, device: jax.Device, plan: _Plan, like: Sequence[jax.ShapeDtypeStruct]) -> None:
        key = device, plan, _shapes_of(like)
        if key in self._programs:
            return
        here = SingleDeviceSharding(device)
        shapes = [jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=here) for one in like]
        self._programs[key] = _joined.lower(plan, shapes).compile()

    def _run(self, device: jax.Device, plan: _Plan, arrays: list[jax.Array]) -> list[jax.Array]:
        program = self._programs.get((device, plan, _shapes_of(arrays)))
        made: list[jax.Array] = _joined(plan, arrays) if program is None else program(arrays)
        return made


def move_state(state: TrainState, old: StepSpec, new: StepSpec) -> tuple[TrainState, int]:
    """Moves a state, with or without slots; see ``StateMove``."""
    return StateMove(old, new, with_slots=bool(state.slots))(state)


def merged(pieces: Sequence[BlockPiece]) -> list[BlockPiece]:
    """Joins pieces of consecutive layers, and pieces of padding, into one."""
    found: list[BlockPiece] = []
    for piece in pieces:
        last, layers = found[-1] if found else None, piece.layers
        if last and piece.is_padding and last.is_padding:
            end = last.layers.stop + layers.stop - layers.start
            found[-1] = last._replace(layers=slice(last.layers.start, end))
        elif last and not piece.is_padding and last == (piece.worker, slice(last.layers.start, layers.start), False):
            found[-1] = last._replace(layers=slice(last.layers.start, layers.stop))
        else:
            found.append(piece)
    return found


def _shapes_of(arrays: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> _Shapes:
    return tuple((array.shape, str(array.dtype)) for array in arrays)


def _shape_of(run: _Run, array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    before, _, *after = array.shape
    return jax.ShapeDtypeStruct((before, run.end - run.first, *after), array.dtype)


@partial(jax.jit, static_argnums=0)
def _joined(plan: _Plan, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The results of a plan."""

    def layers(part: _Run | _Padding) -> jax.Array:
        if isinstance(part, _Padding):
            return jnp.zeros(part.shape, part.dtype)
        return lax.slice_in_dim(arrays[part.array], part.first, part.end, axis=1)

    return [jnp.concatenate([layers(part) for part in parts], axis=1) for parts in plan]
