"""Compares runs in a table, and writes one page about all of them.

    python examples/compare_runs.py RUN_DIR ...

The record of a run is read into numpy arrays, which pandas takes as they are: ``pandas.DataFrame(table(run))``.
"""

import sys
from pathlib import Path

import numpy as np

from swift.report.page import write_report
from swift.runlog import Run, read_run, scalars

METRICS = ("step", "loss", "drop_fraction", "load_imbalance", "grad_norm", "learning_rate", "tokens_per_s")


def table(run: Run) -> dict[str, np.ndarray]:
    """Reads the metrics of a run, a column for each; NaN where a step does not have one."""
    return {name: scalars(run, name) for name in METRICS}


def busiest(run: Run) -> str:
    """Describes the expert that received the most tokens, with its share of tokens and of replicas."""
    counts_KTLE = [np.array([record[kind] for record in run.metrics]) for kind in ("popularity", "replicas")]
    tokens_LE, replicas_LE = (counts.sum(0) / counts.sum((0, 2))[:, None] for counts in counts_KTLE)
    layer, expert = np.unravel_index(tokens_LE.argmax(), tokens_LE.shape)
    shares = f"{tokens_LE[layer, expert]:.1%} of the tokens, {replicas_LE[layer, expert]:.1%} of the replicas"
    return f"expert {expert} of layer {layer}: {shares}"


def main() -> None:
    runs = [read_run(Path(path)) for path in sys.argv[1:]]
    for run in runs:
        columns = table(run)
        means = ", ".join(f"{name} {np.nanmean(columns[name][-20:]):.4g}" for name in METRICS[1:])
        print(f"{run.name}, means of the last 20 iterations: {means}\n  {busiest(run)}")
    if runs:
        page = runs[0].path.parent / "examples.html"
        write_report(runs, page)
        print(page)


if __name__ == "__main__":
    main()
