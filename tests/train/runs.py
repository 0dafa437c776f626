"""Runs in this process, and what of their records can be compared."""

from swift.runlog import read_run
from swift.train import TrainOptions, train


def run(experiment, run_dir, failures=None, **options):
    """The run's record; what would be compiled ahead is compiled when it is needed, unless told otherwise."""
    train(experiment, TrainOptions(run_dir, "the same", **{"prepare": "none"} | options), failures)
    return read_run(run_dir)


def measured(record):
    """The steps without what a clock says."""
    return [
        {n: v for n, v in step.items() if n not in ("time", "step_ms", "input_ms", "tokens_per_s", "mfu")}
        for step in record.metrics
    ]
