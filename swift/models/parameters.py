"""Parameter groups: all modules of one kind, with parameters packed into flat vectors that the optimizer can slice.

A group is all modules of one kind, such as attention or the experts. Its parameters are one array
``[layers, experts, size]``: for every layer that has such a module and every expert (one for dense modules), a vector
of ``size`` numbers.

Initial parameters are bit-identical to what the modules' initializers draw, but come from a program that contains only
one draw. XLA takes a second to compile a draw of normal numbers, and a model has one for every shape of a matrix.
Therefore a model's draws are first listed, by creating its modules with stand-ins for keys, and then run as one loop
over equal pieces. With JAX's partitionable Threefry, a number depends only on its key and its position.

On a TPU, matrices are copied to and from flat vectors a few rows at a time. A TPU stores the last two dims of an array
in tiles, so a reshape between ``[size]`` and ``[rows, columns]`` moves every number. Its compiler (libtpu 0.0.42)
generates no loop for that: 8 matrices of 2,048 x 1,024 became 1.2 million instructions and took a minute to compile,
and a stage has hundreds of matrices. An explicit loop has only the instructions of one piece.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.extend.random import threefry_2x32
from jax.typing import DTypeLike

_SMALLEST_PIECE, _LARGEST_PIECE, _NUM_PIECES = 2**10, 2**20, 2**10
"""Minimum and maximum of the numbers drawn at once, and the number of pieces if their size is within these limits."""

_PERIOD = 4093
"""Period of the stand-ins for a draw's numbers: a prime, so that transposing a matrix changes its values."""

_COPIED_AT_ONCE = 1 << 18
"""Maximum of the numbers copied at once, unless a single row is longer. At this size a copy compiles in half a second,
and takes longer than its start-up."""

_Part: TypeAlias = tuple[tuple[jax.Array | int, ...], tuple[int, ...]]
"""Start index and shape of a part of an array."""


@dataclass(frozen=True)
class _Draw:
    """Draw of normal numbers by an initializer.

    Attributes:
        number: index of its key among the keys that the module takes.
        std: standard deviation.
        dtype: dtype of the numbers.
    """

    number: int
    std: float
    dtype: np.dtype


class _Template(NamedTuple):
    """Structure of a module without its parameter values."""

    graphdef: Any
    treedef: Any
    shapes: tuple[tuple[int, ...], ...]

    def pack_by_rows(self, state: Any) -> jax.Array:
        return join_by_rows(self.treedef.flatten_up_to(state), self.shapes)

    def unpack_by_rows(self, vectors: jax.Array) -> Any:
        return jax.tree.unflatten(self.treedef, split_by_rows(vectors, self.shapes))


@dataclass(frozen=True)
class Group:
    """All modules of one kind.

    Attributes:
        name: name of the kind, such as ``attention``.
        num_layers: number of layers that have such a module.
        num_classes: number of experts, E; 1 for dense modules.
        create: function that creates one module from random keys.
        is_expert: True if the group's modules are placed in slots.
    """

    name: str
    num_layers: int
    num_classes: int
    create: Callable[[nnx.Rngs], nnx.Module]
    is_expert: bool = False

    @cached_property
    def _template(self) -> "_Template":
        graphdef, state = nnx.split(nnx.eval_shape(lambda: self.create(nnx.Rngs(0))))
        leaves, treedef = jax.tree.flatten(state)
        return _Template(graphdef, treedef, tuple(leaf.shape for leaf in leaves))

    @property
    def sizes(self) -> list[int]:
        """Size of each parameter in a module."""
        return [math.prod(shape) for shape in self._template.shapes]

    @property
    def size(self) -> int:
        """Number of parameters in one module, W."""
        return sum(self.sizes)

    def in_matrix(self, position_w: jax.Array) -> jax.Array:
        """Whether the parameter at each position of a module's vector belongs to a matrix, bool[w].

        Args:
            position_w: positions, int32; a value that has wrapped around is read as unsigned, so positions may be up to
                2^32.
        """
        ends = np.cumsum([math.prod(shape) for shape in self._template.shapes])
        is_matrix_i = np.array([len(shape) > 1 for shape in self._template.shapes] + [False])  # the last is padding
        nth_w = jnp.searchsorted(jnp.asarray(ends.astype(np.uint32)), position_w.astype(jnp.uint32), side="right")
        return jnp.asarray(is_matrix_i)[nth_w]

    def span(self, name: str) -> tuple[int, int]:
        """Returns a parameter's range in a module's vector: its first position, and the position after its last."""
        names = jax.tree_util.tree_leaves_with_path(self._template.treedef.unflatten(range(len(self.sizes))))
        index = next(index for path, index in names if path[0] == jax.tree_util.DictKey(name))
        start = sum(self.sizes[:index])
        return start, start + self.sizes[index]

    @property
    def matrix_size(self) -> int:
        """Number of a module's parameters that are in matrices."""
        return sum(math.prod(shape) for shape in self._template.shapes if len(shape) > 1)

    @property
    def stack_shape(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of all modules' parameters, ``[layers, experts, size]``; no value is computed."""
        vector = jax.eval_shape(self.draw, root_key(0))
        return jax.ShapeDtypeStruct((self.num_layers, self.num_classes, *vector.shape), vector.dtype)

    @cached_property
    def initial_values(self) -> tuple[_Draw | np.ndarray, ...] | None:
        """Initial value of each parameter in a module: a normal draw or a constant; None if only ``draw`` works."""
        with jax.ensure_compile_time_eval():  # this property may be first read while a program is traced
            return list_draws(lambda rngs: self._template.treedef.flatten_up_to(nnx.state(self.create(rngs))))

    def draw(self, key: jax.Array) -> jax.Array:
        """Draws the parameters of a module with its own initializers."""
        return self.pack(nnx.state(self.create(nnx.Rngs(key))))

    def pack(self, state: Any) -> jax.Array:
        """Packs a module's state, with leaves ``[..., *shape]``, into ``[..., size]``."""
        leaves = self._template.treedef.flatten_up_to(state)
        lead = leaves[0].ndim - len(self._template.shapes[0])
        return jnp.concatenate([jnp.reshape(leaf, (*leaf.shape[:lead], -1)) for leaf in leaves], axis=-1)

    def unpack(self, vectors: jax.Array | np.ndarray) -> Any:
        """Unpacks ``[..., size or more]`` into a module's state with leaves ``[..., *shape]``, dropping padding."""
        leaves, start = [], 0
        for shape in self._template.shapes:
            end = start + math.prod(shape)
            leaves.append(vectors[..., start:end].reshape(*vectors.shape[:-1], *shape))
            start = end
        return jax.tree.unflatten(self._template.treedef, leaves)

    def pack_stack(self, state: Any) -> jax.Array:
        """Packs like ``pack``; on TPUs a few rows at a time if positions fit into 32 bits."""
        if self.size >= 1 << 31:
            return self.pack(state)
        return jax.lax.platform_dependent(state, tpu=self._template.pack_by_rows, default=self.pack)

    def unpack_stack(self, vectors: jax.Array) -> Any:
        """Unpacks like ``unpack``; on TPUs a few rows at a time if positions fit into 32 bits."""
        if self.size >= 1 << 31:
            return self.unpack(vectors)
        return jax.lax.platform_dependent(vectors, tpu=self._template.unpack_by_rows, default=self.unpack)

    def module(self, state: Any) -> Any:
        """Creates a module from its state."""
        return nnx.merge(self._template.graphdef, state)


def draw_parameters(groups: Mapping[str, Group], key: jax.Array) -> dict[str, jax.Array]:
    """Draws the initial parameters of all groups, float32 ``[layers, experts, size]`` for each.

    Args:
        groups: groups of parameters by name.
        key: random key from ``root_key``.
    """
    with jax.threefry_partitionable(True):  # a seed must give the same parameters regardless of JAX's default
        return _drawn(groups, key)


def root_key(seed: int) -> jax.Array:
    """Returns the random key of a seed, always for Threefry, whose numbers ``_draw_all`` computes itself."""
    return jax.random.key(seed, impl="threefry2x32")


def _drawn(groups: Mapping[str, Group], key: jax.Array) -> dict[str, jax.Array]:
    keys_G = jax.random.split(key, len(groups))
    keys = {
        name: jax.random.split(group_key, (group.num_layers, group.num_classes))
        for (name, group), group_key in zip(groups.items(), keys_G, strict=True)
    }
    draws = {
        (name, leaf): (value, keys[name])
        for name, group in groups.items()
        for leaf, value in enumerate(group.initial_values or ())
        if isinstance(value, _Draw)
    }
    numbers = _numbers(groups, draws)

    def begun(name: str, group: Group) -> jax.Array:
        if group.initial_values is None:
            return jax.vmap(jax.vmap(group.draw))(keys[name])
        shape = (group.num_layers, group.num_classes)
        leaves = [
            numbers[name, leaf] if isinstance(value, _Draw) else jnp.broadcast_to(value, (*shape, value.size))
            for leaf, value in enumerate(group.initial_values)
        ]
        return jnp.concatenate(leaves, axis=-1)

    return {name: begun(name, group) for name, group in groups.items()}


def _numbers(
    groups: Mapping[str, Group], draws: Mapping[tuple[str, int], tuple[_Draw, jax.Array]]
) -> dict[tuple[str, int], jax.Array]:
    """Computes all draws, given the keys ``[layers, experts]`` of their modules; runs one loop per dtype."""
    keys = jnp.concatenate([keys_LE.reshape(-1) for _, keys_LE in draws.values()])
    numbers_K = np.concatenate([np.full(keys_LE.size, draw.number) for draw, keys_LE in draws.values()])
    folded = jax.vmap(jax.random.fold_in)(keys, numbers_K.astype(np.uint32))
    ends = np.cumsum([keys_LE.size for _, keys_LE in draws.values()])
    draw_keys = {
        at: folded[end - keys_LE.size : end].reshape(keys_LE.shape)
        for (at, (_, keys_LE)), end in zip(draws.items(), ends, strict=True)
    }
    drawn: dict[tuple[str, int], jax.Array] = {}
    for dtype in sorted({draw.dtype for draw, _ in draws.values()}):
        dtype_leaves = [at for at, (draw, _) in draws.items() if draw.dtype == dtype]
        sizes = [groups[name].sizes[leaf] for name, leaf in dtype_leaves]
        stds = [draws[at][0].std for at in dtype_leaves]
        drawn |= zip(dtype_leaves, _draw_all([draw_keys[at] for at in dtype_leaves], sizes, stds, dtype), strict=True)
    return drawn


def _draw_all(
    keys: Sequence[jax.Array], sizes: Sequence[int], stds: Sequence[float], dtype: np.dtype
) -> list[jax.Array]:
    """Draws normal numbers for many arrays of keys in one loop over equal pieces.

    Args:
        keys: arrays of keys.
        sizes: for each array, how many numbers to draw with each of its keys.
        stds: standard deviation of each array's numbers.
        dtype: float32 or float64.

    Returns:
        Numbers ``[*keys.shape, size]`` for each array of keys.
    """
    total = sum(key.size * size for key, size in zip(keys, sizes, strict=True))
    piece = 2 ** math.ceil(math.log2(max(1, total / _NUM_PIECES)))
    piece = min(max(piece, _SMALLEST_PIECE), _LARGEST_PIECE)
    pieces = [-(-size // piece) for size in sizes]
    data = [
        jnp.repeat(jax.random.key_data(key).reshape(-1, 2), count, axis=0)
        for key, count in zip(keys, pieces, strict=True)
    ]
    starts = [np.tile(np.arange(count) * piece, key.size) for key, count in zip(keys, pieces, strict=True)]
    # XLA folds the constants of `sqrt(2) * erf_inv(...) * std` into this product.
    scales = [
        np.full(len(start), np.sqrt(2).astype(dtype) * np.asarray(std, dtype))
        for start, std in zip(starts, stds, strict=True)
    ]
    numbers = lax.map(
        lambda part: part[2] * _normals(part[0], part[1], piece, dtype),
        (jnp.concatenate(data), np.concatenate(starts).astype(np.uint32), np.concatenate(scales)),
    )
    drawn, first = [], 0
    for key, size, count in zip(keys, sizes, pieces, strict=True):
        last = first + key.size * count
        drawn.append(numbers[first:last].reshape(*key.shape, count * piece)[..., :size])
        first = last
    return drawn


def _normals(key_2: jax.Array, start: jax.Array, count: int, dtype: np.dtype) -> jax.Array:
    """Computes ``erf_inv`` of the uniform numbers that ``jax.random.normal`` draws with a key, from ``start`` on."""
    low = start + jnp.arange(count, dtype=jnp.uint32)
    # In JAX's partitionable Threefry, the counter of a number is its position, here below 2^32, as (high, low) words.
    first, second = threefry_2x32(key_2, jnp.concatenate([jnp.zeros_like(low), low])).reshape(2, count)
    bits = first ^ second
    if dtype == np.float64:
        bits = first.astype(jnp.uint64) << 32 | second.astype(jnp.uint64)
    info = jnp.finfo(dtype)
    unit = np.array(1, dtype)
    exponent = unit.view(bits.dtype)
    floats = lax.bitcast_convert_type(bits >> (info.bits - info.nmant) | exponent, dtype) - unit
    lowest = np.nextafter(-unit, np.array(0, dtype), dtype=dtype)
    return lax.erf_inv(lax.max(lowest, floats * (unit - lowest) + lowest))


@dataclass(frozen=True)
class Normal:
    """Initializer that draws normal numbers with mean 0.

    Attributes:
        std: standard deviation.
    """

    std: float

    def __call__(self, key: Any, shape: Sequence[int], dtype: DTypeLike | None = None) -> Any:
        """Draws numbers, or lists the draw if the key belongs to a ``_DrawList``."""
        dtype = jax.dtypes.canonicalize_dtype(float if dtype is None else dtype)
        if isinstance(key, _ListedKey):
            return key.owner.add(_Draw(key.number, self.std, dtype), shape)
        # ``jax.random.normal`` times ``std``, with the constants multiplied first. Whether XLA does so depends on its
        # version, and a seed must give the same parameters with every version.
        lowest = np.nextafter(np.array(-1, dtype), np.array(0, dtype), dtype=dtype)
        uniform = jax.random.uniform(key, tuple(shape), dtype, lowest, 1)
        return lax.erf_inv(uniform) * (np.sqrt(2).astype(dtype) * np.asarray(self.std, dtype))


@dataclass
class _DrawList:
    """Stand-in for the random keys of a module under construction; it lists the module's draws.

    Attributes:
        mark: number that distinguishes the two lists of a module.
        draws: draws so far; each fills its parameter with numbers derived from its index in the list.
    """

    mark: int
    draws: list[_Draw] = field(default_factory=list)
    _num_keys: int = 0

    def params(self) -> "_ListedKey":
        """Returns a stand-in for the next key, like ``nnx.Rngs.params``."""
        self._num_keys += 1
        return _ListedKey(self, self._num_keys - 1)

    def add(self, draw: _Draw, shape: Sequence[int]) -> np.ndarray:
        """Lists a draw, and returns the stand-in for its numbers."""
        self.draws.append(draw)
        return np.resize(self._period(len(self.draws) - 1, draw.dtype), shape)

    def found(self, leaf: Any) -> _Draw | np.ndarray:
        """Returns the draw whose numbers fill a parameter unchanged, or the parameter's values if there is none."""
        values = np.asarray(leaf).reshape(-1)
        for number, draw in enumerate(self.draws):
            if draw.dtype == values.dtype and _repeats(values, self._period(number, draw.dtype)):
                return draw
        return values

    def _period(self, number: int, dtype: np.dtype) -> np.ndarray:
        return (np.arange(_PERIOD) + (2 * number + self.mark + 1) * _PERIOD).astype(dtype)


@dataclass(frozen=True)
class _ListedKey:
    owner: _DrawList
    number: int


def _repeats(values: np.ndarray, period: np.ndarray) -> bool:
    """Whether values repeat a period, without copying the values, which may be gigabytes."""
    whole = len(values) // len(period) * len(period)
    rest = values[whole:]
    return np.array_equal(rest, period[: len(rest)]) and bool((values[:whole].reshape(-1, len(period)) == period).all())


def list_draws(make: Callable[[Any], Sequence[Any]]) -> tuple[_Draw | np.ndarray, ...] | None:
    """Lists a module's initial values: draws of normal numbers, or constants.

    Args:
        make: function that creates the module from keys, and returns its parameters.

    Returns:
        The initial value of each parameter, or None if some parameter is neither a draw nor a constant, because it is
        drawn by another kind of initializer or computed from a draw.
    """
    lists = [_DrawList(0), _DrawList(1)]
    try:
        first, second = ([draws.found(leaf) for leaf in make(draws)] for draws in lists)
    except Exception:  # of any kind: user code may need real keys
        return None
    # A constant is equal in both runs. A value computed from a draw differs, since the stand-ins differ.
    pairs = list(zip(first, second, strict=True))
    alike = all(
        isinstance(b, _Draw) and a == b if isinstance(a, _Draw) else not isinstance(b, _Draw) and np.array_equal(a, b)
        for a, b in pairs
    )
    return tuple(first) if alike else None


def split_by_rows(vectors: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """Splits vectors ``[*lead, size or more]`` into one array ``[*lead, *shape]`` per shape, in this order.

    Args:
        vectors: arrays, flattened and concatenated in the last dim.
        shapes: shape of each array, without ``lead``.
    """
    lead, arrays = vectors.shape[:-1], []
    for pieces in _pieces(lead, shapes):
        if pieces.is_matrix:
            empty = jnp.zeros((*lead, *pieces.shape), vectors.dtype)
            arrays.append(_copy(vectors, empty, pieces, pieces.in_vectors, pieces.in_array))
        else:
            arrays.append(vectors[..., pieces.start : pieces.end].reshape((*lead, *pieces.shape)))
    return arrays


def join_by_rows(arrays: Sequence[jax.Array], shapes: Sequence[tuple[int, ...]]) -> jax.Array:
    """Joins arrays ``[*lead, *shape]`` into vectors ``[*lead, size]``: the inverse of ``split_by_rows``."""
    lead = arrays[0].shape[: arrays[0].ndim - len(shapes[0])]
    vectors = jnp.zeros((*lead, sum(map(math.prod, shapes))), jnp.result_type(*arrays))
    for array, pieces in zip(arrays, _pieces(lead, shapes), strict=True):
        array = array.astype(vectors.dtype)
        if pieces.is_matrix:
            vectors = _copy(array, vectors, pieces, pieces.in_array, pieces.in_vectors)
        else:
            vectors = vectors.at[..., pieces.start : pieces.end].set(array.reshape((*lead, pieces.size)))
    return vectors


class _Pieces(NamedTuple):
    """Pieces of stacked arrays with the same shape; an array's last piece may overlap the one before.

    Attributes:
        lead: dims of the stack of arrays.
        start: position at which an array starts in its vector.
        shape: shape of an array.
    """

    lead: tuple[int, ...]
    start: int
    shape: tuple[int, ...]

    @property
    def is_matrix(self) -> bool:
        """Whether the arrays have rows to loop over; vectors and empty arrays need no loop."""
        return len(self.shape) > 1 and 0 not in self.shape

    @property
    def size(self) -> int:
        """Number of elements in an array."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """Position after the end of an array in its vector."""
        return self.start + self.size

    @property
    def row_size(self) -> int:
        """Number of elements in a row."""
        return math.prod(self.shape[1:])

    @property
    def rows(self) -> int:
        """Number of rows in a piece."""
        return min(self.shape[0], max(1, _COPIED_AT_ONCE // self.row_size))

    @property
    def pieces_per_array(self) -> int:
        """Number of pieces per array."""
        return -(-self.shape[0] // self.rows)

    def in_array(self, index: jax.Array) -> _Part:
        """Returns the location of the piece with an index in the arrays."""
        at, row = self._place(index)
        inner = self.shape[1:]
        return (*at, row, *(0 for _ in inner)), (*(1 for _ in at), self.rows, *inner)

    def in_vectors(self, index: jax.Array) -> _Part:
        """Returns the location of the piece with an index in the vectors."""
        at, row = self._place(index)
        return (*at, self.start + row * self.row_size), (*(1 for _ in at), self.rows * self.row_size)

    def _place(self, index: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """Returns (stack index of the array that has the piece, the piece's first row)."""
        row = jnp.minimum(index % self.pieces_per_array * self.rows, self.shape[0] - self.rows)
        return jnp.unravel_index(index // self.pieces_per_array, self.lead) if self.lead else (), row


def _pieces(lead: tuple[int, ...], shapes: Sequence[tuple[int, ...]]) -> Iterator[_Pieces]:
    start = 0
    for shape in shapes:
        yield (pieces := _Pieces(lead, start, shape))
        start = pieces.end


def _copy(
    source: jax.Array,
    target: jax.Array,
    pieces: _Pieces,
    read: Callable[[jax.Array], _Part],
    written: Callable[[jax.Array], _Part],
) -> jax.Array:
    """Copies every piece from its location in ``source`` to its location in ``target``."""

    def copy(index: jax.Array, target: jax.Array) -> jax.Array:
        (at, shape), (target_at, target_shape) = read(index), written(index)
        part = lax.dynamic_slice(source, at, shape).reshape(target_shape)
        return lax.dynamic_update_slice(target, part, target_at)

    return lax.fori_loop(0, math.prod(pieces.lead) * pieces.pieces_per_array, copy, target)
