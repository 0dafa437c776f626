"""Conversion between a state on the host, with a row for every stage or worker, and the parts of processes.

A process has ``Shards`` of every array, see ``swift.mesh.process_shards``: for each of its devices, RANKED
``[1, layer, 1, ...]``, or SHARED ``[1, ...]``, equal on all devices.

Legend: P stages or workers, N expert ranks.
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from swift.mesh.per_rank import RANKED, is_spec, map_specs
from swift.mesh.process_shards import Shards


def process_parts(specs: Any, tree: Any, index: int, ranks: Sequence[int]) -> Any:
    """Returns the part of a state that one process has.

    Args:
        specs: RANKED or SHARED for each array, or a prefix tree of them.
        tree: arrays on the host, RANKED ``[P, layer, N, ...]`` and SHARED ``[P, ...]``.
        index: which of the P is the process's.
        ranks: expert ranks of its devices.

    Returns:
        A tree of ``Shards``, which are views.
    """

    def cut(spec: PartitionSpec, whole: np.ndarray) -> Shards:
        own = whole[index : index + 1]
        return [own[:, :, rank : rank + 1] if spec == RANKED else own for rank in ranks]

    return map_specs(cut, specs, tree)


def join_parts(specs: Any, shapes: Any, parts: Sequence[Any]) -> Any:
    """Returns whole arrays from the parts of all their processes.

    Args:
        specs: RANKED or SHARED for each array, or a prefix tree of them.
        shapes: shapes of the result.
        parts: trees of ``Shards`` of the processes of the first stage or worker by rank, then those of the next.

    Returns:
        Arrays on the host, RANKED ``[P, layer, N, ...]`` and SHARED ``[P, ...]``.
    """

    def join(spec: PartitionSpec, whole: Any, *given: Shards) -> np.ndarray:
        shards, num_stages = list(chain(*given)), whole.shape[0]
        num_ranks = len(shards) // num_stages
        rows = [shards[stage * num_ranks : (stage + 1) * num_ranks] for stage in range(num_stages)]
        return np.concatenate([np.concatenate(row, axis=2) if spec == RANKED else row[0] for row in rows])

    return jax.tree.map(
        lambda spec, *below: jax.tree.map(partial(join, spec), *below), specs, shapes, *parts, is_leaf=is_spec
    )
