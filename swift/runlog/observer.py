"""Observers of a run, which receive its iterations and events: trackers, or code of your own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

GROUPS = {
    "train": ("loss", "aux_loss", "validation_loss", "grad_norm", "learning_rate"),
    "speed": ("step_ms", "input_ms", "tokens_per_s", "mfu", "bubble_share", "period_ratio"),
    "experts": (
        *("tokens", "tokens_routed", "tokens_dropped", "tokens_overflowed"),
        *("drop_share", "load_imbalance"),
    ),
    "workers": ("live_workers", "live_ranks"),
}
"""Names of metrics by the group in which trackers show them."""
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}


class Observer:
    """Receives what a run records, once it is written. Override the methods that you need.

    An observer that raises is not called again, and the run continues. Calls come one at a time, in the order of the
    record, and the run waits for them; ``launch`` makes them in a thread of its supervisor.
    """

    def begin(self, run_dir: Path, step: int, config: str) -> None:
        """Begins or continues a run.

        Args:
            run_dir: run directory.
            step: iterations done so far; above 0 in a resumed run.
            config: operative configuration, one ``Name.setting = value`` a line.
        """

    def on_step(self, record: Mapping[str, Any]) -> None:
        """Receives the record of an iteration, as in ``metrics.jsonl``, with the counts by expert class."""

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Receives the record of an event, as in ``events.jsonl``, with ``event``, ``step`` and ``time``."""

    def end(self) -> None:
        """Ends the run, or this invocation of it."""


def grouped_scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a record by tag, such as ``train/loss``.

    >>> grouped_scalars({"step": 3, "time": "...", "loss": 2.5, "replicas": [[1]], "mine": 1})
    {'train/loss': 2.5, 'other/mine': 1.0}
    """
    return {
        f"{_GROUP_OF.get(name, 'other')}/{name}": float(value)
        for name, value in record.items()
        if name != "step" and isinstance(value, int | float)
    }
