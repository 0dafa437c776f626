"""A schedule and its measures as one JSON document.

Times are in the unit of the costs, memory is in F-stashes, workers are written ``d:p``. The keys:

- ``topology`` {``num_pipelines``, ``num_stages``}, ``failed``, ``num_microbatches``, ``costs``, ``memory_limit``,
  ``decoupled``, ``staggered``, ``iterations``: the problem. Costs are named as ``--costs`` takes them, and
  their stashes and inbox are in the unit used there. ``num_microbatches`` is a list where pipelines have different
  numbers of them. Where chunks are not alike, ``chunks``: what each costs, as factors, and its number of blocks; where
  stages are not the chunks, ``stage_of_chunk``, pipeline by pipeline. Where blocks are known, ``blocks``: the first
  block and the end of each run of blocks that a worker holds.
- ``solver``, ``planning_ms``: the planner, and the time that it took; 0 if the plan came from a store.
- ``period``, ``window_period``, ``lockstep_period``, ``makespan``: the steady-state time of an iteration, its time in a
  window that drains, its time where all workers run the ops tick by tick, and the time of the whole window.
- ``lower_bound`` of the period; ``gap``: period / lower_bound - 1; ``tight_bound``, which is at least as high;
  ``bubble_share`` of the live workers' time.
- ``tick_table``: sizes of the table that an SPMD program would interpret: ``ticks``, distinct
  ``activation_permutations`` and ``gradient_permutations``, ``most_rounds`` of messages in a tick, and the slots that
  every worker needs.
- ``peak_memory``: peak of each worker; 0 for a failed one.
- ``fault_free`` {``one_f_one_b``, ``zero_bubble``}: their periods at the same costs and limit, without failures;
  ``throughput_vs_one_f_one_b``, ``throughput_vs_zero_bubble``: these periods / period; above 1 the schedule is faster.
  Empty, and missing, where pipelines are not alike or stages are not the chunks.
- ``ops``, on request: ``worker``, ``kind``, ``iteration``, ``pipeline``, ``microbatch`` (null for U), ``stage``,
  ``start``, ``end`` of every op, worker by worker; ``chunk`` as well where stages are not the chunks.
"""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from swift.schedules.bounds import lower_bound, tight_bound
from swift.schedules.lowering.lower import lower
from swift.schedules.lowering.tick_table import TickTable
from swift.schedules.lowering.ticks import assign_ticks, lockstep_period
from swift.schedules.measures import bubble_share, makespan, period, window_period
from swift.schedules.memory import peak_memory
from swift.schedules.ops import Kind
from swift.schedules.planners.baselines import one_f_one_b, zero_bubble
from swift.schedules.problem import Problem
from swift.schedules.schedule import Schedule

COST_NAMES = {
    "tF": "t_f",
    "tB": "t_b",
    "tW": "t_w",
    "tU": "t_u",
    "tComm": "t_comm",
    "F-stash": "f_stash",
    "W-stash": "w_stash",
    "inbox": "inbox",
}
"""Fields of ``Costs`` by the names used on the command line and in documents."""


def document(schedule: Schedule, planning_ms: float, *, with_ops: bool = False) -> dict[str, Any]:
    """Describes a schedule by plain numbers, strings, lists and dictionaries; the module's docstring lists the keys.

    Args:
        schedule: valid schedule.
        planning_ms: planning time, in milliseconds.
        with_ops: True to list the ops.
    """
    problem = schedule.problem
    bound, own_period, fault_free = lower_bound(problem), period(schedule), fault_free_periods(problem)
    tick_n = assign_ticks(schedule)
    described = {
        **_describe(problem),
        "solver": schedule.solver,
        "planning_ms": planning_ms,
        "period": own_period,
        "window_period": window_period(schedule),
        "lockstep_period": lockstep_period(schedule),
        "makespan": makespan(schedule),
        "lower_bound": bound,
        "gap": own_period / bound - 1,
        "tight_bound": tight_bound(problem),
        "bubble_share": bubble_share(schedule),
        "peak_memory": _peaks(schedule),
        "fault_free": fault_free,
        **{f"throughput_vs_{name}": without / own_period for name, without in fault_free.items()},
        "tick_table": _sizes(lower(schedule, tick_n)),
    }
    return described | {"ops": list(_ops(schedule))} if with_ops else described


def fault_free_periods(problem: Problem) -> dict[str, float]:
    """Periods without failures, of ``one_f_one_b`` and of a decoupled, staggered ``zero_bubble``.

    Raises:
        SettingError: the memory limit is too small for one of them.
    """
    problem = replace(problem, failed=frozenset(), decoupled=True, staggered=True)
    if not (problem.is_plain and problem.is_alike):
        return {}
    return {
        "one_f_one_b": period(one_f_one_b(problem)),
        "zero_bubble": period(zero_bubble(problem)),
    }


def chunk_fields(problem: Problem) -> dict[str, Any]:
    """Describes the chunks of a problem, and the stages that hold them, where the problem names them."""
    fields: dict[str, Any] = {}
    if problem.chunks:
        fields["chunks"] = [asdict(chunk) for chunk in problem.chunks]
    if problem.stage_of_chunk:
        fields["stage_of_chunk"] = [list(stages) for stages in problem.stage_of_chunk]
    return fields


def _describe(problem: Problem) -> dict[str, Any]:
    limit, number, of_chunks = problem.memory_limit, problem.num_microbatches, chunk_fields(problem)
    runs = {f"{d}:{p}": problem.runs_of((d, p)) for d, p in problem.live_workers}
    if any(runs.values()):
        of_chunks["blocks"] = {worker: [list(run) for run in found] for worker, found in runs.items()}
    return of_chunks | {
        "topology": {"num_pipelines": problem.num_pipelines, "num_stages": problem.num_stages},
        "failed": [f"{d}:{p}" for d, p in sorted(problem.failed)],
        "num_microbatches": number if isinstance(number, int) else list(number),
        "iterations": problem.num_iterations,
        "costs": {name: getattr(problem.costs, field) for name, field in COST_NAMES.items()},
        "memory_limit": None if limit is None else limit / problem.costs.f_stash,
        "decoupled": problem.decoupled,
        "staggered": problem.staggered,
    }


def _peaks(schedule: Schedule) -> dict[str, float]:
    peaks = peak_memory(schedule) / schedule.problem.costs.f_stash
    workers = schedule.problem.topology.workers
    return {f"{d}:{p}": peak for (d, p), peak in zip(workers, peaks.tolist(), strict=True)}


def _sizes(table: TickTable) -> dict[str, int]:
    return {
        "ticks": table.num_ticks,
        "activation_permutations": len(table.activations.permutations),
        "gradient_permutations": len(table.gradients.permutations),
        "most_rounds": int(table.num_rounds_T.max()),
        "b_stash_slots": table.num_b_stash,
        "held_slots": table.num_held,
        "w_stash_slots": table.num_w_stash,
        "activation_slots": table.activations.num_slots,
        "gradient_slots": table.gradients.num_slots,
    }


def _ops(schedule: Schedule) -> Iterator[dict[str, Any]]:
    is_plain = schedule.problem.is_plain
    for (kind, iteration, pipeline, microbatch, chunk), (d, p), start, end in schedule.ops():
        yield {
            "worker": f"{d}:{p}",
            "kind": kind.name,
            "iteration": iteration,
            "pipeline": pipeline,
            "microbatch": None if kind == Kind.U else microbatch,
            "stage": p,
            **({} if is_plain else {"chunk": chunk}),
            "start": start,
            "end": end,
        }
