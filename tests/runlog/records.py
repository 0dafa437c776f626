"""Metrics of runs that were never written, from records as ``Metrics`` returns them."""

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from swift.runlog.expert_counts import CLASS_COUNTS, KINDS, ClassCounts, CountsWriter, counts_array
from swift.runlog.files import METRICS, Metrics


def metrics_of(records: Iterable[Mapping[str, Any]], name: str = METRICS) -> Metrics:
    """Metrics of some records, whose counts by expert class go into a file, as those of a run."""
    records = [dict(record) for record in records]
    with tempfile.TemporaryDirectory() as directory:
        writer = CountsWriter.open(Path(directory) / CLASS_COUNTS)
        for record in records:
            by_kind = [record.pop(kind, None) for kind in KINDS]
            if any(by_kind):
                writer.write(record["step"], counts_array(name, record["step"], by_kind))
        writer.close()
        return Metrics.of(records, name, lambda: ClassCounts.open(Path(directory) / CLASS_COUNTS))
