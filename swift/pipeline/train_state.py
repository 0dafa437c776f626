"""The training state, and its layout on a live mesh.

Every leaf has a leading ``worker`` dim: a mesh row has the state of the chunks that its worker holds. Master weights,
moments and slots are RANKED ``[worker, layer, rank, ...]``; the iteration, the placement and the policy's own state are
SHARED ``[worker, ...]``. Every worker has an embedding and a head, so that all have arrays of one shape; only the
workers of the first and of the last chunk use them. For the same reason a worker with fewer blocks than another has
layers of zeros, which are padding: their gradients are zero, and nothing reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax

EMBEDDING_AND_HEAD = ("embedding", "head")
"""The groups that only the first and the last chunk use."""

KINDS: Mapping[str, bool | None] = {"attention": None, "mlp": False, "router": True, "expert": True}
"""The kind of block that has a module of each group, by whether it is a mixture of experts; None: both."""

DeviceBatch: TypeAlias = Any
"""A ``Batch`` of ``jax.Array``."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that an iteration reads and writes, or a tree of specs of the same structure."""

    step: Any  # int32[worker], iterations done
    master: Any  # {group: master weights, at least float32 [worker, layer, rank, ...]}
    moments: Any  # the optimizer's state over master; its counters are [worker]
    slots: Any  # {group: compute type [worker, layer, rank, slot, size]}, made from master and placement
    placement: Any  # int32[worker, MoE layer of the worker, rank, slot], the expert in every slot
    policy: Any  # the placement policy's state
