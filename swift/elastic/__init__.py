"""Training by real processes, one for each worker or expert rank, that may die and return.

``membership`` decides who runs in which generation, ``coordinator`` carries that out, ``worker`` trains, ``services``
write checkpoints and compile ahead, ``transport`` carries messages within and between nodes, ``state`` outlives
processes, and ``events`` records what happens. Here are the groups of processes that JAX forms.
"""

from swift.elastic.elastic_programs import is_elastic
from swift.elastic.jax_group import LOOPBACK, check_support

__all__ = [
    "LOOPBACK",
    "check_support",
    "is_elastic",
]
