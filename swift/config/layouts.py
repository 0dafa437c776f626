"""Chooses the layout of each group's master weights, and the attention kernel, from a run's settings."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from swift.errors import renamed_settings
from swift.experts.config import ExpertConfig
from swift.experts.optimizer import OptimizerConfig
from swift.experts.placement.policy import PlacementPolicy, Static
from swift.experts.state_layouts import Decoupled, FetchedPerMicrobatch, Instances, Layout, ReplicaShards
from swift.mesh.live import LiveMesh
from swift.models.attention_kernels import choose_kernel
from swift.models.config import AttentionKernel
from swift.models.gpt import GPT
from swift.models.vocabulary.layouts import ColumnSharded, RowSharded
from swift.models.vocabulary.lookup import num_hot_rows
from swift.pipeline.step.single_worker import sequences_per_rank


def make_layouts(
    gpt: GPT,
    experts: ExpertConfig,
    optimizer: OptimizerConfig,
    placement: PlacementPolicy,
    num_ranks: int,
    compute_dtype: str,
    wire_dtype: str,
) -> dict[str, Layout]:
    """Makes the layout of each parameter group.

    Args:
        gpt: architecture of the model.
        experts: settings of the expert layers.
        optimizer: settings of the optimizer; its layout says whether expert state is tied to slots.
        placement: placement policy; if state is tied to slots, it decides whether slots keep their experts.
        num_ranks: number of expert ranks of a worker.
        compute_dtype: dtype of slots.
        wire_dtype: dtype of gradients on the wire; ``compute`` is the dtype of slots.
    """
    compute, layouts = jnp.dtype(compute_dtype), dict[str, Layout]()
    wire = compute if wire_dtype == "compute" else jnp.dtype(wire_dtype)
    for name, group in gpt.groups.items():
        shape = group.num_classes, group.size, num_ranks
        if group.is_expert and experts.is_exact:
            layouts[name] = FetchedPerMicrobatch(*shape, compute, wire)
        elif name == "embedding" and gpt.embedding_ranks > 1:
            layouts[name] = RowSharded(*shape, compute, wire, gpt.vocab_size, gpt.config.model_dim)
        elif name == "head" and gpt.head_ranks > 1:
            layouts[name] = ColumnSharded(*shape, compute, wire, gpt.config.model_dim, gpt.vocab_size)
        elif not group.is_expert or optimizer.layout == "decoupled":
            layouts[name] = Decoupled(*shape, compute, wire)
        elif isinstance(placement, Static):
            layouts[name] = ReplicaShards(*shape, experts.slots_per_rank, compute)
        else:
            layouts[name] = Instances(*shape, compute, wire)
    return layouts


def sharing_ranks(live: LiveMesh, *, embedding: str, head: str) -> dict[str, int]:
    """Returns how many ranks share the embedding and the head's matrix, as arguments of ``GPT``; 1: not sharded."""
    settings = ("embedding", embedding), ("head", head)
    return {f"{name}_ranks": live.num_ranks if setting == "sharded" else 1 for name, setting in settings}


def num_hot(gpt: GPT, num_sequences: int, num_microbatches: int) -> int:
    """Returns how many of a sharded embedding's rows a rank may hold copies of; 0 if it is not sharded.

    Args:
        gpt: architecture of the model.
        num_sequences: number of sequences in a micro-batch, over all ranks.
        num_microbatches: number of micro-batches of an iteration in a pipeline.
    """
    if gpt.embedding_ranks == 1:
        return 0
    num_tokens = sequences_per_rank(num_sequences, gpt.embedding_ranks) * gpt.config.sequence_length
    return num_hot_rows(num_tokens, gpt.vocab_size, num_microbatches)


def kernel(settings: Mapping[str, Any], live: LiveMesh, platform: str | None) -> AttentionKernel:
    """Chooses the attention kernel for the devices of a mesh, or for a platform that this process does not have."""
    where = platform or live.mesh.devices.flat[0].platform
    asked, dtype, model = (settings[name] for name in ("attention", "compute_dtype", "model"))
    separates, is_here = settings["separate_documents"], platform is None
    with renamed_settings({"choose_kernel.asked": "Experiment.attention"}):
        return choose_kernel(asked, where, dtype, model, separates=separates, is_here=is_here)
