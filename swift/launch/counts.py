"""What a run of processes has counted: the keeper reads it from the metrics, which somebody else writes."""

import json
import os
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
    """The whole lines after an iteration, the newest first; those before are neither read nor parsed."""
    for line in lines_from_end(metrics) if metrics.exists() else ():
        record = json.loads(line)
        if record["step"] <= after:
            return
        yield record


def lines_from_end(path: Path, block_bytes: int = 2**16) -> Iterator[bytes]:
    """The whole lines of a file, the last one first; what follows it is being written.

    Args:
        path: of the file.
        block_bytes: how much is read at once.
    """
    with path.open("rb") as file:
        start, rest, is_torn = file.seek(0, os.SEEK_END), b"", True
        while start:
            end, start = start, max(start - block_bytes, 0)
            file.seek(start)
            rest, *lines = (file.read(end - start) + rest).split(b"\n")
            if lines and is_torn:
                lines.pop()
                is_torn = False
            yield from reversed(lines)
        if not is_torn:
            yield rest
