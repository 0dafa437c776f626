"""The layout of each group's master weights, and the kernel of attention, by the settings of a run."""

import jax.numpy as jnp

from swift.errors import renamed_settings
from swift.experts import Decoupled, ExpertConfig, Fetched, Instances, Layout, ReplicaShards
from swift.mesh import LiveMesh
from swift.models import GPT, AttentionKernel, ColumnShares, ModelConfig, choose_kernel


def make_layouts(
    gpt: GPT, experts: ExpertConfig, num_ranks: int, compute_dtype: str, wire_dtype: str, tied: str | None
) -> dict[str, Layout]:
    """Makes the layout of each group.

    Args:
        gpt: architecture of the model.
        experts: settings of the expert layers.
        num_ranks: expert ranks of a worker.
        compute_dtype: dtype of slots.
        wire_dtype: dtype of gradients on the wire; ``compute`` is that of slots.
        tied: how the experts' state is tied to slots, which are ``static`` or ``moving``; None: not at all.
    """
    compute, layouts = jnp.dtype(compute_dtype), dict[str, Layout]()
    wire = compute if wire_dtype == "compute" else jnp.dtype(wire_dtype)
    for name, group in gpt.groups.items():
        shape = group.num_classes, group.size, num_ranks
        if group.is_expert and experts.is_exact:
            layouts[name] = Fetched(*shape, compute, wire)
        elif name == "head" and gpt.head_ranks > 1:
            layouts[name] = ColumnShares(*shape, compute, wire, gpt.config.model_dim, gpt.vocab_size)
        elif not group.is_expert or tied is None:
            layouts[name] = Decoupled(*shape, compute, wire)
        elif tied == "static":
            layouts[name] = ReplicaShards(*shape, experts.slots_per_rank, compute)
        else:
            layouts[name] = Instances(*shape, compute, wire)
    return layouts


def head_ranks(head: str, live: LiveMesh) -> int:
    """Expert ranks that share the head's matrix; 1: it is whole."""
    return live.num_ranks if head == "shares" else 1


def kernel(asked: str, live: LiveMesh, dtype: str, model: ModelConfig, *, separates: bool) -> AttentionKernel:
    """Chooses the kernel of attention for the devices of a mesh; see ``choose_kernel``."""
    with renamed_settings({"choose_kernel.asked": "Experiment.attention"}):
        return choose_kernel(asked, live.mesh.devices.flat[0].platform, dtype, model, separates=separates)
