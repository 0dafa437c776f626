"""Results of a simulation as one JSON document. The keys:

- ``trace`` {``hours``, ``failures``, ``most_nodes``, ``mean_time_between_failures_s``; null without failures}.
- ``job``: the fields of ``Job``, its problem as {``num_pipelines``, ``num_stages``, ``num_expert_ranks``,
  ``num_microbatches``, ``costs``, ``memory_limit``}.
- ``hours``: edges of the bins of every ``goodput``.
- ``strategies``, one for each that can run: ``name``; ``source`` of its figures; ``ettr``, the effective training time
  ratio; ``iterations`` that are kept; ``samples_per_s``, null if samples are unknown; ``iteration_s`` with all nodes;
  ``spent_s``, seconds by cause (``outcome.CAUSES``), which sum to the length of the trace; ``goodput``, kept iterations
  in every bin relative to those without failures; ``out_of_memory``, true if it ran out of memory at any time. A
  strategy that is out of memory from the start has null in all other keys, and ``reason``.
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
    """Describes the results by plain numbers, strings, lists and dictionaries."""
    found = list(results)
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
            _row(one) if isinstance(one, Outcome) else _without_memory(one)
            for one in found
            if isinstance(one, Outcome) or one.out_of_memory
        ],
        "left_out": [
            {"name": one.name, "reason": one.why}
            for one in found
            if isinstance(one, CannotRun) and not one.out_of_memory
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


def _without_memory(one: CannotRun) -> dict[str, Any]:
    nothing = dict.fromkeys(("source", "ettr", "iterations", "samples_per_s", "iteration_s", "spent_s", "goodput"))
    return {"name": one.name, "out_of_memory": True, "reason": one.why, **nothing}
