"""Measures of a run, as tables compare them.

Shape suffixes: T steps.
"""

from typing import Any

import numpy as np

from swift.runlog.reading import Run

NUM_LOSS_STEPS = 10
NUM_COMPILING_STEPS = 3


def measure(run: Run, target_loss: float | None) -> dict[str, Any]:
    """Computes the measures of a run from its metrics.

    Args:
        run: run, ended or not.
        target_loss: loss to count the steps to, in nats per token; None if the run has none.

    Returns:
        ``final_loss``, nats per token, the mean of the last 10 steps; ``dropped_percent`` of the tokens routed in all
        steps; ``steps_to_target``, see :func:`steps_to_target`; ``median_step_ms`` without the first 3 steps, which
        compile; ``discarded_percent`` of the steps whose window was run again step by step; and ``validation_loss``,
        the newest. None if a run does not have the value.

    Raises:
        SettingError: the metrics are damaged.
    """
    losses_T, validation_T, step_ms_T = (scalars(run, name) for name in ("loss", "validation_loss", "step_ms"))
    dropped, routed = (np.nansum(scalars(run, name)) for name in ("tokens_dropped", "tokens_routed"))
    num_to_target = steps_to_target(losses_T, target_loss)
    validation_T = validation_T[np.isfinite(validation_T)]
    discarded_T = scalars(run, "was_discarded")
    discarded_T = discarded_T[np.isfinite(discarded_T)]
    return {
        "final_loss": _finite(np.mean(losses_T[-NUM_LOSS_STEPS:])) if losses_T.size else None,
        "dropped_percent": _finite(100 * ratio(dropped, routed)),
        "steps_to_target": int(run.metrics.steps_T[num_to_target - 1]) if num_to_target else None,
        "median_step_ms": _median(step_ms_T[NUM_COMPILING_STEPS:]),
        "discarded_percent": _finite(100 * np.mean(discarded_T)) if discarded_T.size else None,
        "validation_loss": float(validation_T[-1]) if validation_T.size else None,
    }


def steps_to_target(losses_T: np.ndarray, target_loss: float | None) -> int | None:
    """Counts the steps until the mean loss of 10 consecutive ones is at most the target.

    Args:
        losses_T: float64[T], loss of each step in nats per token; NaN where it was not finite.
        target_loss: target in nats per token; None if the run has none.

    Returns:
        Number of losses up to and including the first step that reaches it; None if none does.
    """
    if target_loss is None:
        return None
    reached_T = running_mean(losses_T, NUM_LOSS_STEPS) <= target_loss
    return int(reached_T.argmax()) + 1 if reached_T.any() else None


def scalars(run: Run, name: str) -> np.ndarray:
    """Returns one metric over the run's steps, float64[T], see ``Metrics.scalars``."""
    return run.metrics.scalars(name)


def ratio(counts: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Returns ``counts / totals``; NaN where a total is zero."""
    totals = np.broadcast_to(totals, counts.shape)
    return np.divide(counts, totals, out=np.full(counts.shape, np.nan), where=totals != 0)


def running_mean(values_T: np.ndarray, window: int) -> np.ndarray:
    """Computes the mean of the last ``window`` values at each step.

    Returns:
        float64[T]; NaN at the steps before the window is full, and where a value in it is NaN.
    """
    means_T = np.full(len(values_T), np.nan)
    if len(values_T) >= window:
        means_T[window - 1 :] = np.lib.stride_tricks.sliding_window_view(values_T, window).mean(axis=-1)
    return means_T


def _median(values: np.ndarray) -> float | None:
    values = values[np.isfinite(values)]
    return float(np.median(values)) if values.size else None


def _finite(value: np.ndarray) -> float | None:
    return float(value) if np.isfinite(value) else None
