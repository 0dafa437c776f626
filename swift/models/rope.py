"""Rotary position embeddings: rotates queries and keys by angles that grow with the position (arXiv 2104.09864).

Legend: B sequences, T positions, H heads, C channels of a head, F = C / 2 pairs of channels.
"""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

RopeScaling: TypeAlias = Literal["none", "linear", "yarn"]

_FAST, _SLOW = 32, 1
"""YaRN's bounds, in rotations over the original length: pairs above ``_FAST`` keep their wavelengths, those of pairs
below ``_SLOW`` are stretched."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding with given wavelengths.

    Attributes:
        channels: channels of a head, C.
        theta: base of the wavelengths.
        scaling: which wavelengths are stretched: ``none``, all (``linear``), or the long ones (``yarn``).
        factor: factor by which they are stretched.
        length: sequence length of the original training, for ``yarn``.
    """

    channels: int
    theta: float
    scaling: RopeScaling = "none"
    factor: float = 1.0
    length: int = 4096

    @property
    def frequencies_F(self) -> np.ndarray:
        """Radians per position for each pair of channels, float64."""
        frequencies_F = self.theta ** -(np.arange(0, self.channels, 2) / self.channels)
        if self.scaling == "linear":
            return frequencies_F / self.factor
        if self.scaling == "yarn":
            kept_F = self._kept_share_F()
            return frequencies_F * (kept_F + (1 - kept_F) / self.factor)
        return frequencies_F

    @property
    def magnitude(self) -> float:
        """Factor by which rotated queries and keys are multiplied; with YaRN it sharpens attention."""
        return 0.1 * math.log(self.factor) + 1 if self.scaling == "yarn" else 1.0

    def _kept_share_F(self) -> np.ndarray:
        """Returns 1 for pairs that keep their frequency, 0 for stretched pairs, and a linear ramp between them."""

        def pair(rotations: float) -> float:
            """Returns the (fractional) pair that makes this many rotations over the original length."""
            ratio = self.length / (rotations * 2 * math.pi)
            return self.channels * math.log(ratio) / (2 * math.log(self.theta))

        low, high = max(math.floor(pair(_FAST)), 0), min(math.ceil(pair(_SLOW)), self.channels - 1)
        # If ``low`` exceeds ``high``, the ramp is descending, as in the code of the paper's authors.
        ramp_F = (np.arange(self.channels // 2) - low) / (high - low or 0.001)
        return 1 - np.clip(ramp_F, 0, 1)

    def rotate(self, x_BTHC: Float[Array, "B T H C"], position_BT: Int[Array, "#B T"]) -> Float[Array, "B T H C"]:
        """Rotates the pairs (c, c + C/2) of queries or keys by their positions."""
        wide = jnp.promote_types(x_BTHC.dtype, jnp.float32)
        frequencies_111F = jnp.asarray(self.frequencies_F, wide)[None, None, None]
        angles_BT1F = jnp.asarray(position_BT)[..., None, None].astype(wide) * frequencies_111F
        # Without the barrier XLA recomputes the angles for each head, in fusions each of which takes the TPU compiler
        # seconds.
        cos, sin = lax.optimization_barrier([self.magnitude * function(angles_BT1F) for function in (jnp.cos, jnp.sin)])
        first, second = jnp.split(x_BTHC.astype(wide), 2, axis=-1)
        rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return rotated.astype(x_BTHC.dtype)
