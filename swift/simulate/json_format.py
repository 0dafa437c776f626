"""Results of a simulation as one JSON document, with these keys:

- ``trace`` {``hours``: length of the trace, ``failures``: their number, ``most_nodes``: largest number of nodes present
  at once, ``mean_time_between_failures_s``: null if there are no failures}.
- ``job``: the fields of ``Job``; ``num_pipelines``, ``num_stages``, ``num_expert_ranks``, ``num_microbatches``,
  ``costs`` and ``memory_limit`` replace its problem.
- ``hours``: edges of the bins of every ``goodput``, in hours.
- ``strategies``, one entry for each strategy that can run: ``name``; ``source`` of its figures; ``ettr``, the effective
  training time ratio; ``iterations``, the number of kept iterations; ``samples_per_s``, null if the number of samples
  is unknown; ``iteration_s``, the duration of an iteration with all nodes; ``spent_s``, seconds by cause
  (``engine.CAUSES``), which sum to the length of the trace; ``goodput``, kept iterations in each bin relative to a run
  without failures; ``out_of_memory``, whether the strategy ran out of memory at any time. For a strategy that is out of
  memory from the start, ``out_of_memory`` is true, ``reason`` is given, and all keys but these and ``name`` are null.
- ``left_out``: ``name`` and ``reason`` of strategies that cannot run.
"""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from swift.simulate.engine import Outcome
from swift.simulate.job import Job
from swift.simulate.registry import CannotRun
from swift.simulate.traces import Trace

_NUM_BINS = 120


def document(job: Job, trace: Trace, results: Iterable[Outcome | CannotRun]) -> dict[str, Any]:
    """Builds the results in plain JSON values; the module's docstring lists the keys."""
    outcomes = list(results)
    mtbf_s = trace.mean_time_between_failures_s
    return {
        "trace": {
            "hours": trace.horizon_s / 3600,
            "failures": trace.num_failures,
            "most_nodes": trace.most_nodes,
            "mean_time_between_failures_s": mtbf_s if trace.num_failures else None,
        },
        "job": _describe(job),
        "hours": [trace.horizon_s / 3600 * index / _NUM_BINS for index in range(_NUM_BINS + 1)],
        "strategies": [
            _row(result) if isinstance(result, Outcome) else _without_memory(result)
            for result in outcomes
            if isinstance(result, Outcome) or result.out_of_memory
        ],
        "left_out": [
            {"name": result.name, "reason": result.reason}
            for result in outcomes
            if isinstance(result, CannotRun) and not result.out_of_memory
        ],
    }


def _describe(job: Job) -> dict[str, Any]:
    problem, topology = job.problem, job.problem.topology
    return {
        **{name: value for name, value in vars(job).items() if name != "problem"},
        "num_pipelines": topology.num_pipelines,
        "num_stages": topology.num_stages,
        "num_expert_ranks": topology.num_expert_ranks,
        "num_microbatches": problem.num_microbatches,
        "costs": asdict(problem.costs),
        "memory_limit": problem.memory_limit,
    }


def _row(outcome: Outcome) -> dict[str, Any]:
    _, goodput = outcome.goodput(_NUM_BINS)
    return {
        "name": outcome.name,
        "source": outcome.source,
        "out_of_memory": outcome.spent_s["out_of_memory"] > 0,
        "ettr": outcome.ettr,
        "iterations": outcome.iterations,
        "samples_per_s": outcome.samples_per_s,
        "iteration_s": outcome.iteration_s,
        "spent_s": outcome.spent_s,
        "goodput": goodput.tolist(),
    }


def _without_memory(result: CannotRun) -> dict[str, Any]:
    nothing = dict.fromkeys(("source", "ettr", "iterations", "samples_per_s", "iteration_s", "spent_s", "goodput"))
    return {"name": result.name, "out_of_memory": True, "reason": result.reason, **nothing}
