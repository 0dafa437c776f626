"""The one operator of the decoupled optimizer: slices of classes -> whole experts in slots, and its transpose.

Every rank holds 1/N of each class's weights, always the same 1/N. ``materialize`` brings every slot the weights of
whatever class the placement puts there; ``collect``, its transpose, brings every rank its slice of every class's
gradient, summed over the replicas. Placement is data: a new one costs the same bytes as the old one (SYMI, section 3)
and no recompilation.

Legend: L layer rows, N ranks, S slots of a rank, E classes, W weights of a class padded to N * w, w = W / N.
"""

import jax
import jax.numpy as jnp
from jax import lax

from swift.mesh import EXPERT_AXIS


def padded_size(size: int, num_ranks: int) -> int:
    """``size`` rounded up to a multiple of ``num_ranks``, so that any number of ranks can share it evenly."""
    return -(-size // num_ranks) * num_ranks


def to_slices(params_LEW: jax.Array, num_ranks: int) -> jax.Array:
    """Cuts whole classes ``[L, E, size]`` into the ranks' slices ``[L, N, E, w]``, zero-padded."""
    num_layers, num_classes, size = params_LEW.shape
    padded = jnp.pad(params_LEW, ((0, 0), (0, 0), (0, padded_size(size, num_ranks) - size)))
    return padded.reshape(num_layers, num_classes, num_ranks, -1).swapaxes(1, 2)


def from_slices(slices_LNEw: jax.Array, size: int) -> jax.Array:
    """Joins the ranks' slices ``[L, N, E, w]`` to whole classes ``[L, E, size]``: the inverse of ``to_slices``."""
    num_layers, _, num_classes, _ = slices_LNEw.shape
    return slices_LNEw.swapaxes(1, 2).reshape(num_layers, num_classes, -1)[..., :size]


def materialize(slices_LEw: jax.Array, placement_LNS: jax.Array) -> jax.Array:
    """Brings every slot of this rank the whole weights of its class.

    Args:
        slices_LEw: this rank's slice of every class, in the type that goes over the wire.
        placement_LNS: int32, the class in every slot of every rank.

    Returns:
        slots_LSW, the padded weights of this rank's slots.
    """
    # With the ranks next to the slice, what arrives is whole experts already; with the ranks in front it would take
    # one more copy (on CPU a third of the operator's cost).
    sent_LSNw = jax.vmap(lambda slices, placement: slices[placement])(slices_LEw, placement_LNS.swapaxes(1, 2))
    received_LSNw = lax.all_to_all(sent_LSNw, EXPERT_AXIS, split_axis=2, concat_axis=2)
    num_layers, num_slots, num_ranks, width = received_LSNw.shape
    return received_LSNw.reshape(num_layers, num_slots, num_ranks * width)


def collect(
    gradients_LSW: jax.Array, placement_LNS: jax.Array, num_classes: int, wire_dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Sums the gradients of all replicas into this rank's slice of every class: the transpose of ``materialize``.

    Autodiff gives the same; written out, the wire type can be narrower than the sum's and the sum over replicas is a
    matmul with the one-hot placement, which is deterministic where a scatter-add is not.

    Args:
        gradients_LSW: gradients of this rank's slots, padded, at least float32.
        placement_LNS: the placement that the slots had.
        num_classes: E.
        wire_dtype: type of the exchanged gradients.

    Returns:
        slices_LEw of the gradient, in the type of ``gradients_LSW``.
    """
    num_layers, num_ranks, num_slots = placement_LNS.shape
    sent_NLSw = gradients_LSW.reshape(num_layers, num_slots, num_ranks, -1).transpose(2, 0, 1, 3).astype(wire_dtype)
    received_NLSw = lax.all_to_all(sent_NLSw, EXPERT_AXIS, split_axis=0, concat_axis=0)
    is_class_LNSE = jax.nn.one_hot(placement_LNS, num_classes, dtype=wire_dtype)  # ones, exact in any type
    return jnp.einsum(
        "lnse,nlsw->lew",
        is_class_LNSE,
        received_NLSw,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=gradients_LSW.dtype,
    )


def exchange_bytes(num_layers: int, num_ranks: int, slots_per_rank: int, size: int, itemsize: int) -> int:
    """Bytes that one collect and one materialize exchange in all, the chunks that ranks keep for themselves counted.

    The closed form of SYMI, section 3: 2 * slots * ranks * W * bytes for each layer. It does not depend on the
    placement.

    >>> exchange_bytes(num_layers=1, num_ranks=8, slots_per_rank=4, size=1000, itemsize=4)
    256000
    """
    return 2 * num_layers * slots_per_rank * num_ranks * padded_size(size, num_ranks) * itemsize
