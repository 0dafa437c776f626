"""The training state, and its layout on a live mesh.

Every leaf has a leading ``worker`` dim: a row holds the state of the chunks that its worker holds. Master weights,
moments and slots are RANKED ``[worker, row, rank, ...]``; the iteration, the placement and the policy's own state are
SHARED ``[worker, ...]``. Embedding and head are in every row, so that all rows have one shape; only the
workers of the first and of the last chunk use them. For the same reason a worker with fewer blocks than another has
rows of zeros, which are padding: their gradients are zero, and nothing reads them.
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
    master: Any  # {group: master weights, at least float32 [worker, row, rank, ...]}
    moments: Any  # the optimizer's state over master; its counters are [worker]
    slots: Any  # {group: compute type [worker, row, rank, slot, size]}, made from master and placement
    placement: Any  # int32[worker, MoE row of the worker, rank, slot], the expert in every slot
    policy: Any  # the placement policy's state
