"""Experts: routing, dispatch, placement, and the optimizer that is decoupled from both."""

from swift.experts.config import ExpertConfig
from swift.experts.exchange import collect, exchange_bytes, from_slices, materialize, padded_size, to_slices
from swift.experts.layer import Load, Matmul, expert_parallel_moe
from swift.experts.reference import dropless_moe, reference_moe

__all__ = [
    "ExpertConfig",
    "Load",
    "Matmul",
    "collect",
    "dropless_moe",
    "exchange_bytes",
    "expert_parallel_moe",
    "from_slices",
    "materialize",
    "padded_size",
    "reference_moe",
    "to_slices",
]
