"""Exact fixed-point arithmetic: products and quotients of whole numbers and fractions that do not fit into 32 bits.

JAX has no 64-bit integers unless a program enables them, and a result on which all ranks must agree to the last token
cannot be computed in floating point. So fractions are whole multiples of 2^-30, and a product is computed from two
halves of 15 bits, whose partial products fit.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

BITS = 30
ONE = 1 << BITS
"""The fraction 1."""

_HALF = BITS // 2
_LOW = (1 << _HALF) - 1


class Product(NamedTuple):
    """A product as its whole part and its fractional part."""

    whole: jax.Array  # int32
    rest: jax.Array  # int32, in units of 2^-30


def times(number: Int[Array, "..."], fraction: Int[Array, "..."]) -> Product:
    """Multiplies a whole number by a fraction, exactly.

    Args:
        number: int32, 0 to 2^30.
        fraction: int32, 0 to 1 in units of 2^-30, of a shape that broadcasts with the number's.

    >>> [int(part) for part in times(jnp.int32(10**9), jnp.int32(ONE // 3))]
    [333333333, 24580608]
    """
    high, low = number >> _HALF, number & _LOW
    fraction_high, fraction_low = fraction >> _HALF, fraction & _LOW
    lowest = low * fraction_low
    middle = high * fraction_low + low * fraction_high + (lowest >> _HALF)
    return Product(high * fraction_high + (middle >> _HALF), ((middle & _LOW) << _HALF) | (lowest & _LOW))


def cumulated(product: Product) -> Int[Array, "..."]:
    """Cumulative sums over the first dim, rounded down; exact for up to 2^15 entries with a sum below 2^31."""
    low = jnp.cumsum(product.rest & _LOW, axis=0, dtype=jnp.int32) >> _HALF
    high = jnp.cumsum(product.rest >> _HALF, axis=0, dtype=jnp.int32)
    return jnp.cumsum(product.whole, axis=0, dtype=jnp.int32) + ((high + low) >> _HALF)


def fraction_of(part: Int[Array, "..."], total: Int[Array, "..."], most: int) -> Int[Array, "..."]:
    """Computes the fraction ``part / total``, rounded down to a multiple of 2^-30.

    Args:
        part: int32, at least 0.
        total: int32, at least ``part`` and at least 1.
        most: upper bound of all totals, below 2^30.

    >>> int(fraction_of(jnp.int32(1), jnp.int32(3), most=8)), ONE // 3
    (357913941, 357913941)
    """
    step = 31 - most.bit_length()  # quotient bits that one 32-bit division yields
    quotient, rest, missing = part // total, part % total, BITS
    while missing:
        bits = min(step, missing)
        rest = rest << bits
        quotient, rest, missing = (quotient << bits) | (rest // total), rest % total, missing - bits
    return quotient
