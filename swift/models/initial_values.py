"""Initial parameters: what the modules' initializers draw, computed by a program in which a draw is written once.

XLA takes a second to compile a draw of normal numbers, and a model has one for every shape of a matrix. So the draws of
a model are listed first, by making its modules with a stand-in for keys, and then run as one loop over equal pieces.
The values are those that the initializers return when they are called with keys, bit for bit: with JAX's partitionable
Threefry, a number depends on its key and its position only.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry_2x32
from jax.typing import DTypeLike

_SMALLEST_PIECE, _LARGEST_PIECE, _NUM_PIECES = 2**10, 2**20, 2**10


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
        return jax.random.normal(key, tuple(shape), dtype) * jnp.array(self.std, dtype)


@dataclass
class DrawList:
    """Stands in for the keys of a module that is made, and lists its draws.

    Attributes:
        draws: draws so far; the parameter of each is filled with its number, counted from -1 downwards.
    """

    draws: list[Draw] = field(default_factory=list)
    _num_keys: int = 0

    def params(self) -> "_ListedKey":
        """Returns what stands for the next key, as ``nnx.Rngs.params`` does."""
        self._num_keys += 1
        return _ListedKey(self, self._num_keys - 1)

    def add(self, draw: Draw, shape: Sequence[int]) -> np.ndarray:
        """Lists a draw, and returns what stands for its numbers."""
        self.draws.append(draw)
        return np.full(shape, -len(self.draws), draw.dtype)

    def found(self, leaf: Any) -> Draw | np.ndarray:
        """Returns the draw of a parameter; or the parameter, if it is constant."""
        values = np.asarray(leaf).reshape(-1)
        return self.draws[-int(values[0]) - 1] if values[0] < 0 else values


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
