"""Initial parameters: what the modules' initializers draw, computed by a program in which a draw is written once.

XLA takes a second to compile a draw of normal numbers, and a model has one for every shape of a matrix. So the draws of
a model are listed first, by making its modules with a stand-in for keys, and then run as one loop over equal pieces.
The values are those that the initializers return when they are called with keys, bit for bit: with JAX's partitionable
Threefry, a number depends on its key and its position only.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry_2x32
from jax.typing import DTypeLike

_SMALLEST_PIECE, _LARGEST_PIECE, _NUM_PIECES = 2**10, 2**20, 2**10
_PERIOD = 4093
"""Numbers after which those that stand in for a draw repeat: a prime, so that a transposed matrix is another one."""


@dataclass(frozen=True)
class Draw:
    """Normal numbers that an initializer draws.

    Attributes:
        number: number of its key among those that the module takes.
        std: standard deviation.
        dtype: dtype of the numbers.
    """

    number: int
    std: float
    dtype: np.dtype


@dataclass(frozen=True)
class Normal:
    """Initializer of normal numbers around 0.

    Attributes:
        std: standard deviation.
    """

    std: float

    def __call__(self, key: Any, shape: Sequence[int], dtype: DTypeLike | None = None) -> Any:
        """Draws numbers, or lists the draw if the key is of a ``DrawList``."""
        dtype = jax.dtypes.canonicalize_dtype(float if dtype is None else dtype)
        if isinstance(key, _ListedKey):
            return key.owner.add(Draw(key.number, self.std, dtype), shape)
        # ``jax.random.normal`` times ``std``, with the constants multiplied first: whether XLA does so depends on its
        # version, and a seed stands for the same parameters in all of them.
        lowest = np.nextafter(np.array(-1, dtype), np.array(0, dtype), dtype=dtype)
        uniform = jax.random.uniform(key, tuple(shape), dtype, lowest, 1)
        return lax.erf_inv(uniform) * (np.sqrt(2).astype(dtype) * np.asarray(self.std, dtype))


@dataclass
class DrawList:
    """Stands in for the keys of a module that is made, and lists its draws.

    Attributes:
        mark: number that tells apart the lists of a module.
        draws: draws so far; the parameter of each is filled with numbers that follow from its place in the list.
    """

    mark: int
    draws: list[Draw] = field(default_factory=list)
    _num_keys: int = 0

    def params(self) -> "_ListedKey":
        """Returns what stands for the next key, as ``nnx.Rngs.params`` does."""
        self._num_keys += 1
        return _ListedKey(self, self._num_keys - 1)

    def add(self, draw: Draw, shape: Sequence[int]) -> np.ndarray:
        """Lists a draw, and returns what stands for its numbers."""
        self.draws.append(draw)
        return np.resize(self._period(len(self.draws) - 1, draw.dtype), shape)

    def found(self, leaf: Any) -> Draw | np.ndarray:
        """Returns the draw of a parameter; or the parameter, if it is none of the draws as it was drawn."""
        values = np.asarray(leaf).reshape(-1)
        for number, draw in enumerate(self.draws):
            if draw.dtype == values.dtype and _repeats(values, self._period(number, draw.dtype)):
                return draw
        return values

    def _period(self, number: int, dtype: np.dtype) -> np.ndarray:
        return (np.arange(_PERIOD) + (2 * number + self.mark + 1) * _PERIOD).astype(dtype)


def _repeats(values: np.ndarray, period: np.ndarray) -> bool:
    """Whether values are a period, again and again; without a copy of them, which may be gigabytes."""
    whole = len(values) // len(period) * len(period)
    rest = values[whole:]
    return np.array_equal(rest, period[: len(rest)]) and bool((values[:whole].reshape(-1, len(period)) == period).all())


def list_draws(make: Callable[[Any], Sequence[Any]]) -> tuple[Draw | np.ndarray, ...] | None:
    """Lists the initial values of a module: draws of normal numbers, or constants.

    Args:
        make: function that makes the module from keys, and returns its parameters.

    Returns:
        The initial value of each parameter; None if a parameter is neither, as where an initializer of another kind
        draws it or a draw is scaled.
    """
    lists = [DrawList(0), DrawList(1)]
    try:
        one, other = ([draws.found(leaf) for leaf in make(draws)] for draws in lists)
    except Exception:  # of whatever kind: code of the user's, which wants keys and not what stands for them
        return None
    # A constant is the same again; what was computed of a draw is not.
    pairs = list(zip(one, other, strict=True))
    alike = all(
        isinstance(b, Draw) and a == b if isinstance(a, Draw) else not isinstance(b, Draw) and np.array_equal(a, b)
        for a, b in pairs
    )
    return tuple(one) if alike else None


@dataclass(frozen=True)
class _ListedKey:
    owner: DrawList
    number: int


def draw_all(
    keys: Sequence[jax.Array], sizes: Sequence[int], stds: Sequence[float], dtype: np.dtype
) -> list[jax.Array]:
    """Draws normal numbers.

    Args:
        keys: arrays of keys.
        sizes: how many numbers to draw with each key of an array.
        stds: standard deviation of the numbers of an array.
        dtype: float32 or float64.

    Returns:
        For each array of keys the numbers ``[*keys.shape, size]``.
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
    # What XLA makes of the constants of `sqrt(2) * erf_inv(...) * std`.
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
    """Computes ``erf_inv`` of the uniform numbers that ``jax.random.normal`` draws with a key, from a position on."""
    low = start + jnp.arange(count, dtype=jnp.uint32)
    first, second = threefry_2x32(key_2, jnp.concatenate([jnp.zeros_like(low), low])).reshape(2, count)
    bits = first ^ second
    if dtype == np.float64:
        bits = first.astype(jnp.uint64) << 32 | second.astype(jnp.uint64)
    info = jnp.finfo(dtype)
    one = np.array(1, dtype)
    exponent = one.view(bits.dtype)
    floats = lax.bitcast_convert_type(bits >> (info.bits - info.nmant) | exponent, dtype) - one
    lowest = np.nextafter(-one, np.array(0, dtype), dtype=dtype)
    return lax.erf_inv(lax.max(lowest, floats * (one - lowest) + lowest))
