"""What a run of processes has counted: the keeper reads it from the metrics, which somebody else writes."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

from swift.checkpoint import Ledger
from swift.errors import RunError

_PAUSE_S = 0.05


def counted(ledger: Ledger, metrics: Path, after: int, step: int, patience_s: float) -> Ledger:
    """A ledger with the iterations from ``after`` to ``step``.

    Args:
        ledger: as it was after iteration ``after``.
        metrics: ``metrics.jsonl``, to which iteration ``step`` may yet have to be written.
        after: the last iteration that is counted already.
        step: the last one to count.
        patience_s: how long to wait for it.

    Raises:
        RunError: it has not come.
    """
    deadline = time.monotonic() + patience_s
    while True:
        records = {record["step"]: record for record in _newest(metrics, after) if after < record["step"] <= step}
        if len(records) == step - after:
            break
        if time.monotonic() > deadline:
            raise RunError(f"{metrics} has {len(records)} of the {step - after} iterations up to {step}")
        time.sleep(_PAUSE_S)
    for _, record in sorted(records.items()):
        ledger = ledger.counted(record["popularity"], record["dropped"])
    return ledger


def _newest(metrics: Path, after: int) -> Iterator[dict]:
    """The whole lines after an iteration, the newest first; those before are not parsed."""
    lines = metrics.read_bytes() if metrics.exists() else b""
    rest, _, _ = lines.rpartition(b"\n")  # what follows is being written
    while rest:
        rest, _, line = rest.rpartition(b"\n")
        record = json.loads(line)
        if record["step"] <= after:
            return
        yield record
