"""Records of steps and plans, as ``metrics.jsonl`` and ``events.jsonl`` have them."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from swift.data import Batch, Loader
from swift.experts.placement import unsound
from swift.pipeline import Steps, StepSpec, Sums
from swift.schedules import plan_document


def step_record(step: int, metrics: Mapping[str, np.ndarray], step_s: float, spec: StepSpec) -> dict[str, Any]:
    """Makes the record of one iteration; with ``misplaced`` if its placement, and so the iteration, was not sound.

    Args:
        step: iterations done, from 1.
        metrics: metrics of the step, on the host, without their worker dim.
        step_s: duration of the iteration in seconds.
        spec: spec of the step, with the workers and expert ranks that took part.
    """
    live = spec.live
    popularity_LE, dropped_LE, replicas_LE = (metrics[name] for name in ("popularity", "dropped", "replicas"))
    routed, dropped, tokens = int(popularity_LE.sum()), int(dropped_LE.sum()), int(metrics["tokens"])
    flaw = unsound(replicas_LE, live.num_ranks * spec.experts.slots_per_rank)
    return ({} if flaw is None else {"misplaced": flaw}) | {
        "step": step,
        "loss": float(metrics["loss"]),
        "aux_loss": float(metrics["aux_loss"]),
        "tokens": tokens,
        "tokens_routed": routed,
        "tokens_dropped": dropped,
        "tokens_overflowed": int(metrics["overflowed"].sum()),
        "drop_share": dropped / max(routed, 1),
        "load_imbalance": float(metrics["load_imbalance"]),
        "grad_norm": float(metrics["grad_norm"]),
        "learning_rate": float(metrics["learning_rate"]),
        "step_ms": 1000 * step_s,
        "tokens_per_s": tokens / step_s,
        "live_workers": live.num_live,
        "live_ranks": live.num_ranks,
        "popularity": popularity_LE.tolist(),
        "replicas": replicas_LE.tolist(),
        "dropped": dropped_LE.tolist(),
    }


def plan_facts(steps: Steps) -> dict[str, Any]:
    """Returns the fields of a pipeline's plan in ``events.jsonl``: failed workers and schedule, see ``read_plan``."""
    failed = [f"{d}:{p}" for d, p in sorted(steps.configuration.failed)]
    return {"failed": failed, "plan": plan_document(steps.plan.schedule)}


def plan_record(steps: Steps, period_ratio: float, **more: Any) -> dict[str, Any]:
    """Fields that the plan adds to the record of an iteration; none with a single worker.

    Args:
        steps: step functions of the live workers.
        period_ratio: planned time of an iteration, as a multiple of that without failures.
        **more: further fields of a pipeline's record.
    """
    if steps.spec.is_single_worker:
        return {}
    return {"bubble_share": steps.plan.bubble_share, "period_ratio": period_ratio, **more}


def mean_loss(evaluate: Callable[[Batch], Sums], validation: Loader, num_batches: int) -> float:
    """Computes the mean loss of the first batches of a split, in nats per token.

    Args:
        evaluate: function that returns the sums of one batch.
        validation: batches of the split.
        num_batches: number of batches at most; no more than a pass over the split.
    """
    loss, tokens = 0.0, 0
    for index in range(min(num_batches, validation.num_batches_per_epoch)):
        sums = evaluate(validation.batch(index))
        loss, tokens = loss + float(sums.loss), tokens + int(sums.tokens)
    return loss / max(tokens, 1)
