"""Exact products and quotients of whole numbers and fractions, where a product does not fit into 32 bits.

JAX has no 64-bit integers unless a program asks for them, and what all ranks have to agree on to the last token is not
computed in floating point. So fractions are whole numbers of units of 2^-30, and a product is computed in two halves of
15 bits, whose partial products fit.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

BITS = 30
ONE = 1 << BITS
"""The fraction 1."""

_HALF = BITS // 2
_LOW = (1 << _HALF) - 1


class Product(NamedTuple):
    """A whole number and what is behind its point."""

    whole: jax.Array  # int32
    rest: jax.Array  # int32, in units of 2^-30


def times(number: jax.Array, fraction: jax.Array) -> Product:
    """The exact product.

    Args:
        number: int32, 0 to 2^30.
        fraction: int32, 0 to 1 in units of 2^-30, of a shape that broadcasts with that of the number.

    >>> [int(part) for part in times(jnp.int32(10**9), jnp.int32(ONE // 3))]
    [333333333, 24580608]
    """
    high, low = number >> _HALF, number & _LOW
    fraction_high, fraction_low = fraction >> _HALF, fraction & _LOW
    lowest = low * fraction_low
    middle = high * fraction_low + low * fraction_high + (lowest >> _HALF)
    return Product(high * fraction_high + (middle >> _HALF), ((middle & _LOW) << _HALF) | (lowest & _LOW))


def cumulated(product: Product) -> jax.Array:
    """The sums over the first dim up to each entry, rounded down; exact for up to 2^15 entries that sum below 2^31."""
    low = jnp.cumsum(product.rest & _LOW, axis=0, dtype=jnp.int32) >> _HALF
    high = jnp.cumsum(product.rest >> _HALF, axis=0, dtype=jnp.int32)
    return jnp.cumsum(product.whole, axis=0, dtype=jnp.int32) + ((high + low) >> _HALF)


def fraction_of(part: jax.Array, total: jax.Array, most: int) -> jax.Array:
    """The fraction ``part / total``, rounded down to 30 bits behind the point.

    Args:
        part: int32, at least 0.
        total: int32, at least the part and at least 1.
        most: what no total is above; below 2^30.

    >>> int(fraction_of(jnp.int32(1), jnp.int32(3), most=8)), ONE // 3
    (357913941, 357913941)
    """
    step = 31 - most.bit_length()  # bits of the quotient that one division of 32-bit numbers gives
    quotient, rest, missing = part // total, part % total, BITS
    while missing:
        bits = min(step, missing)
        rest = rest << bits
        quotient, rest, missing = (quotient << bits) | (rest // total), rest % total, missing - bits
    return quotient
