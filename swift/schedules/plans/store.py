"""Plans on disk, ready for failures, and a JSON document that describes a schedule and its measures.

The store has one JSON file for every normalized problem and planner. The file holds one iteration, which the schedule
repeats. The file's name is a hash of the problem and planner, and the file contains a hash of its content:
``{"sha256": HASH, "plan": {"version", "solver", "problem", "round"}}``. Arrays are flat lists in C order. Floats
round-trip exactly. null is padding for pipelines with fewer micro-batches.

Shape suffixes: D pipelines, M micro-batches (the maximum over pipelines), P chunks, 3 the kinds F, B, W.

In the document (``document``) times are in the unit of the costs, memory is in F-stashes, and workers are written
``d:p``. The keys are:

- ``topology`` {``num_pipelines``, ``num_stages``}, ``failed``, ``num_microbatches``, ``costs``, ``memory_limit``,
  ``decoupled``, ``staggered``, ``iterations``: the problem. The names of costs are those of ``--costs``, and their
  stashes and inbox are in the unit used there. ``num_microbatches`` is a list if pipelines differ. ``chunks``, present
  if chunks differ: cost factors and number of blocks of each. ``stage_of_chunk``, present if stages are not the chunks:
  a list per pipeline. ``blocks``, present if chunk sizes are known: the first block and the end of each run of blocks,
  for each worker.
- ``solver``, ``planning_ms``: the planner, and its planning time in milliseconds; 0 if the plan came from a store.
- ``period``, ``window_period``, ``lockstep_period``: time per iteration in steady state, in a window that drains, and
  with all workers running tick by tick. ``makespan``: time of the whole window.
- ``lower_bound`` on the period; ``gap``: period / lower_bound - 1; ``tight_bound``, which is at least as high;
  ``bubble_share``: idle fraction of the live workers' time.
- ``tick_table``: sizes of the table that an SPMD program would interpret: number of ``ticks``, numbers of distinct
  ``activation_permutations`` and ``gradient_permutations``, ``most_rounds`` of messages in a tick, and numbers of slots
  that every worker needs.
- ``peak_memory``: peak of each worker; 0 for a failed worker.
- ``fault_free`` {``one_f_one_b``, ``zero_bubble``}: periods of these planners with the same costs and memory limit,
  without failures; empty if pipelines differ or stages are not the chunks. ``throughput_vs_one_f_one_b``,
  ``throughput_vs_zero_bubble``: these periods / period, above 1 if the schedule is faster; missing if ``fault_free`` is
  empty.
- ``ops``, on request: ``worker``, ``kind``, ``iteration``, ``pipeline``, ``microbatch`` (null for U), ``stage``,
  ``start``, ``end`` of every op, worker by worker; also ``chunk`` if stages are not the chunks.
"""

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from swift.errors import SettingError
from swift.files import replace_file
from swift.schedules.bounds import lower_bound, tight_bound
from swift.schedules.lowering.lower import lower
from swift.schedules.lowering.tick_table import TickTable
from swift.schedules.lowering.ticks import assign_ticks, lockstep_period
from swift.schedules.planners.baselines import one_f_one_b, zero_bubble
from swift.schedules.plans.normalize import (
    VERSION,
    canonical,
    chunk_fields,
    denormalize,
    normalize,
    plan_document,
    plan_header,
)
from swift.schedules.problem import COST_NAMES, Chunk, Costs, Kind, Problem
from swift.schedules.registry import Planner
from swift.schedules.rules import verify
from swift.schedules.schedule import (
    Round,
    Schedule,
    bubble_share,
    makespan,
    peak_memory,
    period,
    window_period,
)
from swift.topology import Topology, worker_name, worker_names


def document(schedule: Schedule, planning_ms: float, *, with_ops: bool = False) -> dict[str, Any]:
    """Describes a schedule in plain JSON values; the module's docstring lists the keys.

    Args:
        schedule: valid schedule.
        planning_ms: planning time, in milliseconds.
        with_ops: whether to list all ops.
    """
    problem = schedule.problem
    bound, own_period, fault_free = lower_bound(problem), period(schedule), _fault_free_periods(problem)
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


def _fault_free_periods(problem: Problem) -> dict[str, float]:
    """Returns the fault-free periods of ``one_f_one_b`` and ``zero_bubble``, or {} for a problem that they cannot plan.

    Raises:
        SettingError: the memory limit is too small for one of them.
    """
    problem = replace(problem, failed=frozenset(), decoupled=True, staggered=True)
    if not (problem.is_plain and problem.is_uniform):
        return {}
    return {"one_f_one_b": period(one_f_one_b(problem)), "zero_bubble": period(zero_bubble(problem))}


def _describe(problem: Problem) -> dict[str, Any]:
    limit, number, fields = problem.memory_limit, problem.num_microbatches, chunk_fields(problem)
    runs = {worker_name(worker): problem.runs_of(worker) for worker in problem.live_workers}
    if any(runs.values()):
        fields["blocks"] = {worker: [list(run) for run in worker_runs] for worker, worker_runs in runs.items()}
    return fields | {
        "topology": {"num_pipelines": problem.num_pipelines, "num_stages": problem.num_stages},
        "failed": worker_names(problem.failed),
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
    return dict(zip(map(worker_name, workers), peaks.tolist(), strict=True))


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
    for (kind, iteration, pipeline, microbatch, chunk), worker, start, end in schedule.ops():
        yield {
            "worker": worker_name(worker),
            "kind": kind.name,
            "iteration": iteration,
            "pipeline": pipeline,
            "microbatch": None if kind == Kind.U else microbatch,
            "stage": worker[1],
            **({} if is_plain else {"chunk": chunk}),
            "start": start,
            "end": end,
        }


class CorruptPlanError(ValueError):
    """A plan is damaged, has another version, or does not match its problem; the message gives the reason."""


@dataclass(frozen=True)
class PlanStore:
    """A directory of plans, which processes can read and write concurrently.

    Stored plans are not trusted. A file that is damaged, has another version or is not a valid schedule of its problem
    is reported to ``warn`` and treated as missing.

    Attributes:
        directory: directory of the plans; created if missing.
        warn: called with a one-line message that names a damaged file and the reason.

    Raises:
        SettingError: the directory cannot be created.
    """

    directory: Path
    warn: Callable[[str], None] = warnings.warn

    def __post_init__(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(error) from error

    def plan(self, problem: Problem, solver: str, planner: Planner) -> Schedule:
        """Returns the stored plan of a problem; if there is none, plans the problem and stores the plan.

        Args:
            problem: problem to plan. It is planned in normalized form, so all failure sets with equal numbers of
                failures in each stage share a plan.
            solver: name of the planner, which its schedules have as ``Schedule.solver``.
            planner: planner to call if the store has no valid plan.

        Raises:
            SettingError: a new plan cannot be written to the directory.
        """
        stored_plan = self.get(problem, solver)
        if stored_plan is not None:
            return stored_plan
        normalized = normalize(problem)
        new_plan = planner(normalized.problem)
        assert new_plan.solver == solver, f"a plan of {new_plan.solver} would not be found under {solver}"
        self.put(new_plan)
        return denormalize(new_plan, normalized)

    def get(self, problem: Problem, solver: str) -> Schedule | None:
        """Returns the stored plan of a problem, or None if it is missing or damaged; a damaged one is reported."""
        normalized = normalize(problem)
        path = self.path(problem, solver)
        try:
            schedule = decode(path.read_bytes(), normalized.problem, solver)
        except FileNotFoundError:
            return None
        except (OSError, CorruptPlanError) as error:
            self.warn(f"damaged plan {path} is ignored and planned again: {error}")
            return None
        return denormalize(schedule, normalized)

    def put(self, schedule: Schedule) -> None:
        """Stores the plan of a normalized problem; replaces an existing plan.

        Raises:
            ScheduleError: the schedule is not valid.
            SettingError: the file cannot be written.
        """
        assert schedule.problem == normalize(schedule.problem).problem, "plans are stored for normalized problems"
        verify(schedule)
        path = self.path(schedule.problem, schedule.solver)
        try:
            # Atomic, so that concurrent readers find a complete file or none.
            replace_file(path, encode(schedule))
        except OSError as error:
            raise SettingError("plan store", str(path), f"cannot be written: {error.strerror}") from error

    def path(self, problem: Problem, solver: str) -> Path:
        """Returns the path of a problem's plan; problems with the same normalized form share it."""
        return self.directory / f"{plan_key(problem, solver)}.json"

    def _unusable(self, error: OSError) -> SettingError:
        allowed = f"must be a directory that can be written to: {error.strerror}"
        return SettingError("plan store", str(self.directory), allowed)


def plan_key(problem: Problem, solver: str) -> str:
    """Returns a hexadecimal hash of a problem's normalized form, the planner's name and the format version.

    The store names the plan's file after it.
    """
    return sha256(_dump(plan_header(problem, solver))).hexdigest()


def read_plan(document: Mapping[str, Any]) -> Schedule:
    """Reads a plan from a document made by ``plan_document``, for the problem that the document describes.

    Raises:
        CorruptPlanError: the document is not a plan, has another version, or is not a valid schedule of its problem.
    """
    with _reported_as_damage():
        entries = document["problem"]
        topology = Topology(entries["num_pipelines"], entries["num_stages"])
        costs = Costs(**entries["costs"])
        names = ("num_microbatches", "memory_limit", "num_iterations", "decoupled", "staggered")
        chunks = tuple(Chunk(**chunk) for chunk in entries.get("chunks", ()))
        holders = tuple(map(tuple, entries.get("stage_of_chunk", ())))
        failed = frozenset((d, p) for d, p in entries.get("failed", ()))
        fields = {name: entries[name] for name in names} | {"chunks": chunks, "stage_of_chunk": holders}
        problem = Problem(topology, costs=costs, failed=failed, **fields)
        if problem.is_uniform:
            problem = canonical(problem, tuple(entries["failures"]))
        return _read_plan(dict(document), problem, document["solver"])


def encode(schedule: Schedule) -> bytes:
    """Encodes the plan of a normalized problem as a file's content, with a hash."""
    body = _dump(plan_document(schedule))
    return b'{"sha256": "%b", "plan": %b}\n' % (sha256(body).hexdigest().encode(), body)


def decode(content: bytes, problem: Problem, solver: str) -> Schedule:
    """Decodes the plan of a normalized problem from a file's content.

    Raises:
        CorruptPlanError: the content is damaged, or is not a valid schedule of that problem by that planner.
    """
    match = re.fullmatch(rb'\{"sha256": "([0-9a-f]{64})", "plan": (.*)\}\n', content, re.DOTALL)
    if match is None:
        raise CorruptPlanError("it is not a whole plan file")
    if sha256(match[2]).hexdigest().encode() != match[1]:
        raise CorruptPlanError("its content does not have its hash")
    with _reported_as_damage():
        return _read_plan(json.loads(match[2]), problem, solver)


@contextmanager
def _reported_as_damage() -> Iterator[None]:
    try:
        yield
    except CorruptPlanError:
        raise
    except KeyError as error:
        raise CorruptPlanError(f"it has no {error}") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise CorruptPlanError(f"it holds no valid plan: {error}") from error


def _read_plan(plan: dict[str, Any], problem: Problem, solver: str) -> Schedule:
    if plan["version"] != VERSION:
        raise CorruptPlanError(f"it has version {plan['version']}, not {VERSION}")
    fields = plan.pop("round")
    if plan != plan_header(problem, solver):
        raise CorruptPlanError("it holds the plan of another problem")
    iteration_plan = _read_round(fields, problem)
    schedule = Schedule.from_round(problem, solver, iteration_plan)
    verify(schedule)
    return schedule


def _read_round(fields: dict[str, Any], problem: Problem) -> Round:
    shape = D, M, P = problem.num_pipelines, problem.most_microbatches, problem.num_chunks
    executor = np.array(fields["executor_DMP"])
    exists = np.broadcast_to((np.arange(M) < np.array(problem.microbatches)[:, None])[:, :, None], shape)
    right = executor.dtype.kind == "i" and executor.size == exists.size
    if not right or executor.max() >= D or ((executor >= 0) != exists.ravel()).any():
        raise CorruptPlanError(f"its executors are not pipelines from 0 to {D - 1}")
    start, update, period = (np.array(fields[name], float) for name in ("start_3DMP", "update_P", "period"))
    start = start.reshape(3, *shape)
    if not all(np.isfinite(times).all() for times in (start[:, exists], update, period)):
        raise CorruptPlanError("it has times that are not finite")
    return Round(executor.astype(np.int32).reshape(shape), start, update.reshape(P), float(period))


def _dump(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
