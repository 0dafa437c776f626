"""Weight exchange for the decoupled optimizer: from expert slices to whole experts in slots, and its transpose.

Every rank always holds the same 1/N of each expert's weights. ``materialize`` fills every slot with the weights of the
expert that the placement assigns to it. ``collect``, its transpose, returns to every rank its slice of every expert's
gradient, summed over the replicas. The placement is data: a new one needs no recompilation and transfers as many bytes
as the old one (SYMI, section 3).

Legend: L layers, N ranks, S slots of a rank, E experts, W weights of an expert padded to N * w, w = W / N.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt32

from swift.mesh.per_rank import EXPERT_AXIS


def padded_size(size: int, num_ranks: int) -> int:
    """Rounds ``size`` up to a multiple of ``num_ranks``, so that it can be divided evenly over the ranks."""
    return -(-size // num_ranks) * num_ranks


def to_slices(params_LEW: Float[Array | np.ndarray, "L E W"], num_ranks: int) -> Float[Array | np.ndarray, "L N E w"]:
    """Cuts whole experts ``[L, E, size]`` into zero-padded slices ``[L, N, E, w]``; NumPy arrays stay on the host."""
    pad = np.pad if isinstance(params_LEW, np.ndarray) else jnp.pad
    num_layers, num_classes, size = params_LEW.shape
    padded = pad(params_LEW, ((0, 0), (0, 0), (0, padded_size(size, num_ranks) - size)))
    return padded.reshape(num_layers, num_classes, num_ranks, -1).swapaxes(1, 2)


def from_slices(slices_LNEw: Float[np.ndarray, "L N E w"], size: int) -> Float[np.ndarray, "L E W"]:
    """Joins the ranks' slices on the host into whole experts ``[L, E, size]``; the inverse of ``to_slices``."""
    num_layers, _, num_classes, _ = slices_LNEw.shape
    return slices_LNEw.swapaxes(1, 2).reshape(num_layers, num_classes, -1)[..., :size]


def materialize(
    slices_LEw: Float[Array, "L E w"], placement_LNS: Int[Array, "L N S"], axis: str = EXPERT_AXIS
) -> Float[Array, "L S W"]:
    """Fills this rank's slots with their experts' whole weights.

    Args:
        slices_LEw: this rank's slice of every expert, in the dtype sent over the wire.
        placement_LNS: int32, the expert in every slot of every rank.
        axis: name of the mesh axis of the ranks.

    Returns:
        slots_LSW, the padded weights of this rank's slots.
    """
    # With the rank dim next to the slice dim, whole experts arrive contiguously. With the rank dim first they would
    # have to be copied, which is a third of this function's cost on CPU.
    sent_LSNw = jax.vmap(lambda slices, placement: slices[placement])(slices_LEw, placement_LNS.swapaxes(1, 2))
    received_LSNw = _exchange(sent_LSNw, axis)
    num_layers, num_slots, num_ranks, width = received_LSNw.shape
    return received_LSNw.reshape(num_layers, num_slots, num_ranks * width)


def collect(
    gradients_LSW: Float[Array, "L S W"],
    placement_LNS: Int[Array, "L N S"],
    num_classes: int,
    wire_dtype: DTypeLike,
    axis: str = EXPERT_AXIS,
) -> Float[Array, "L E w"]:
    """Sums all replicas' gradients into this rank's slices: the transpose of ``materialize``.

    Autodiff would compute the same sum. The explicit version allows a wire dtype that is narrower than the dtype of the
    sum, and sums over replicas by a matmul with the one-hot placement, which is deterministic, unlike a scatter-add.

    Args:
        gradients_LSW: gradients of this rank's slots, padded, at least float32.
        placement_LNS: placement of the slots during the backward pass.
        num_classes: number of experts, E.
        wire_dtype: dtype of the exchanged gradients.
        axis: name of the mesh axis of the ranks.

    Returns:
        slices_LEw of the gradient, in the dtype of ``gradients_LSW``.
    """
    num_layers, num_ranks, num_slots = placement_LNS.shape
    sent_LSNw = gradients_LSW.reshape(num_layers, num_slots, num_ranks, -1).astype(wire_dtype)
    received_LSNw = _exchange(sent_LSNw, axis)
    is_class_LNSE = jax.nn.one_hot(placement_LNS, num_classes, dtype=wire_dtype)  # zeros and ones: exact in any dtype
    return jnp.einsum(
        "lnse,lsnw->lew",
        is_class_LNSE,
        received_LSNw,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=gradients_LSW.dtype,
    )


def _exchange(sent_LSNw: Float[Array, "L S N w"], axis: str) -> Float[Array, "L S N w"]:
    """Sends every rank its part of each slot, and receives this rank's part from all ranks' slots."""
    if sent_LSNw.shape[:2] == (1, 1) and sent_LSNw.dtype.itemsize == 2 and sent_LSNw.shape[-1] % 2 == 0:
        return _exchange_in_pairs(sent_LSNw, axis)
    return lax.all_to_all(sent_LSNw, axis, split_axis=2, concat_axis=2)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _exchange_in_pairs(sent_11Nw: Float[Array, "1 1 N w"], axis: str) -> Float[Array, "1 1 N w"]:
    """Exchanges the parts of a single slot, two 16-bit numbers at a time.

    A TPU stores rows of 16-bit numbers in pairs. To expand a single row into two, libtpu 0.0.42 generates a program
    without loops: 33 million instructions for an embedding of 50,304 x 2,048.
    """
    received = lax.all_to_all(_paired(sent_11Nw), axis, split_axis=2, concat_axis=2)
    return _unpaired(received, sent_11Nw.dtype)


def _exchange_forward(sent_11Nw: jax.Array, axis: str) -> tuple[jax.Array, None]:
    return _exchange_in_pairs(sent_11Nw, axis), None


def _exchange_backward(axis: str, _: None, d_received_11Nw: jax.Array) -> tuple[jax.Array]:
    """Runs the same exchange: the gradient of each part is sent back to the rank that the part came from."""
    return (_exchange_in_pairs(d_received_11Nw, axis),)


_exchange_in_pairs.defvjp(_exchange_forward, _exchange_backward)


def _paired(narrow: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """Packs each 16-bit number in the first half of the last dim with its counterpart in the second half."""
    bits = lax.bitcast_convert_type(narrow, jnp.uint16).astype(jnp.uint32)
    first, second = jnp.split(bits, 2, axis=-1)
    return first | second << 16


def _unpaired(pairs: UInt32[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """Unpacks 16-bit numbers from pairs: the inverse of ``_paired``."""
    halves = [(pairs & 0xFFFF).astype(jnp.uint16), (pairs >> 16).astype(jnp.uint16)]
    return lax.bitcast_convert_type(jnp.concatenate(halves, axis=-1), dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def fetch(
    slices_Ew: Float[Array, "E w"], placement_NS: Int[Array, "N S"], wire_dtype: DTypeLike, axis: str = EXPERT_AXIS
) -> Float[Array, "S W"]:
    """Fills every slot of this rank in one layer with its expert's weights; the gradient is ``collect``.

    Args:
        slices_Ew: this rank's slice of every expert, in the dtype sent over the wire.
        placement_NS: int32, the expert in every slot of every rank.
        wire_dtype: dtype of the exchanged gradients.
        axis: name of the mesh axis of the ranks.
    """
    del wire_dtype
    return materialize(slices_Ew[None], placement_NS[None], axis)[0]


def _fetch_forward(
    slices_Ew: jax.Array, placement_NS: jax.Array, wire_dtype: DTypeLike, axis: str
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # The backward pass needs no weights, only the number of experts and the dtype, which a slice of one column has.
    return fetch(slices_Ew, placement_NS, wire_dtype, axis), (slices_Ew[:, :1], placement_NS)


def _fetch_backward(
    wire_dtype: DTypeLike, axis: str, residuals: tuple[jax.Array, jax.Array], gradients_SW: jax.Array
) -> tuple[jax.Array, None]:
    slices_E1, placement_NS = residuals
    wide = gradients_SW.astype(jnp.promote_types(gradients_SW.dtype, jnp.float32))
    return collect(wide[None], placement_NS[None], len(slices_E1), wire_dtype, axis)[0].astype(slices_E1.dtype), None


fetch.defvjp(_fetch_forward, _fetch_backward)


def exchange_bytes(num_layers: int, num_ranks: int, slots_per_rank: int, size: int, itemsize: int) -> int:
    """Returns the bytes exchanged by one collect and one materialize, including the chunks that a rank sends to itself.

    The formula of SYMI, section 3: 2 * slots * ranks * W * bytes per layer, independent of the placement.

    >>> exchange_bytes(num_layers=1, num_ranks=8, slots_per_rank=4, size=1000, itemsize=4)
    256000
    """
    return 2 * num_layers * slots_per_rank * num_ranks * padded_size(size, num_ranks) * itemsize
