"""What a step's arrays say in numbers: the record of ``metrics.jsonl``."""

from collections.abc import Mapping
from typing import Any

import numpy as np


def step_record(step: int, metrics: Mapping[str, np.ndarray], step_s: float, live_workers: int) -> dict[str, Any]:
    """The record of one iteration.

    Args:
        step: iterations done, from 1.
        metrics: what the step returned, on the host, without its worker dim.
        step_s: how long the iteration took, in seconds.
        live_workers: workers that took part.
    """
    popularity_LE, dropped_LE, replicas_LE = (metrics[name] for name in ("popularity", "dropped", "replicas"))
    routed, dropped, tokens = int(popularity_LE.sum()), int(dropped_LE.sum()), int(metrics["tokens"])
    return {
        "step": step,
        "loss": float(metrics["loss"]),
        "aux_loss": float(metrics["aux_loss"]),
        "tokens": tokens,
        "tokens_routed": routed,
        "tokens_dropped": dropped,
        "drop_share": dropped / max(routed, 1),
        "load_imbalance": float(metrics["load_imbalance"]),
        "grad_norm": float(metrics["grad_norm"]),
        "learning_rate": float(metrics["learning_rate"]),
        "step_ms": 1000 * step_s,
        "tokens_per_s": tokens / step_s,
        "live_workers": live_workers,
        "popularity": popularity_LE.tolist(),
        "replicas": replicas_LE.tolist(),
        "dropped": dropped_LE.tolist(),
    }
