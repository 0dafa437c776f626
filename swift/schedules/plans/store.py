"""Plans on disk, ready for failures: one JSON file for every normalized problem and planner.

A file holds one iteration. Its name is a hash of the problem and planner, and it contains a hash of its content:
``{"sha256": HASH, "plan": {"version", "solver", "problem", "round"}}``. Arrays are flat lists, in C order; floats
round-trip exactly, and null stands for the times of micro-batches that a pipeline does not have.

D: pipelines, M: micro-batches of the pipeline with the most, P: chunks, 3: the kinds F, B, W.
"""

import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from swift.errors import SettingError
from swift.files import replace_file
from swift.schedules.chunks import Chunk
from swift.schedules.planners.registry import Planner
from swift.schedules.plans.json_format import chunk_fields
from swift.schedules.plans.normalize import canonical, denormalize, failure_counts, normalize
from swift.schedules.problem import Costs, Problem
from swift.schedules.rounds import round_of
from swift.schedules.schedule import Round, Schedule
from swift.schedules.verify import verify
from swift.topology import Topology

VERSION = 1
"""Version of the format and of the planners' results; raising it makes every problem be planned again."""


class DamagedPlanError(ValueError):
    """A file of the store does not hold the plan that its name promises; the message says why."""


@dataclass(frozen=True)
class PlanStore:
    """A directory of plans that any number of processes may read and write concurrently.

    Plans are never trusted: a file that is damaged, of another version or not a valid schedule of its problem is
    reported by ``warn`` in one line and treated as missing.

    Attributes:
        directory: directory of the plans, created if missing.
        warn: function called with a line that names a damaged file and the reason.

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
        """Looks up the plan of a problem, or makes and stores a new one.

        Args:
            problem: problem to plan, in its normalized form, so that all failure sets with the same number of failures
                in each stage share a plan.
            solver: name that ``planner`` gives its schedules.
            planner: planner to call if the store has no valid plan.

        Raises:
            SettingError: a new plan cannot be written to the directory.
        """
        found = self.get(problem, solver)
        if found is not None:
            return found
        normalized = normalize(problem)
        made = planner(normalized.problem)
        assert made.solver == solver, f"a plan of {made.solver} would not be found under {solver}"
        self.put(made)
        return denormalize(made, normalized)

    def get(self, problem: Problem, solver: str) -> Schedule | None:
        """Looks up the stored plan of a problem; None if there is none, or only a damaged one, which is reported."""
        normalized = normalize(problem)
        path = self.path(problem, solver)
        try:
            schedule = decode(path.read_bytes(), normalized.problem, solver)
        except FileNotFoundError:
            return None
        except (OSError, DamagedPlanError) as error:
            self.warn(f"damaged plan {path} is ignored and planned again: {error}")
            return None
        return denormalize(schedule, normalized)

    def put(self, schedule: Schedule) -> None:
        """Stores the plan of a normalized problem, replacing any other.

        Raises:
            ScheduleError: the schedule is not valid.
            SettingError: the file cannot be written.
        """
        assert schedule.problem == normalize(schedule.problem).problem, "plans are stored for normalized problems"
        verify(schedule)
        path = self.path(schedule.problem, schedule.solver)
        try:
            replace_file(path, encode(schedule))
        except OSError as error:
            raise SettingError("plan store", str(path), f"cannot be written: {error.strerror}") from error

    def path(self, problem: Problem, solver: str) -> Path:
        """Path of a problem's plan; the same for all problems with the same normalized form."""
        return self.directory / f"{plan_key(problem, solver)}.json"

    def _unusable(self, error: OSError) -> SettingError:
        allowed = f"must be a directory that can be written to: {error.strerror}"
        return SettingError("plan store", str(self.directory), allowed)


def plan_key(problem: Problem, solver: str) -> str:
    """Hashes a problem's normalized form, the planner's name and the version, in hexadecimal."""
    return sha256(_dump(_header(problem, solver))).hexdigest()


def plan_document(schedule: Schedule) -> dict[str, Any]:
    """Describes the plan of a normalized problem as JSON: the ``plan`` of a file."""
    one = round_of(schedule)
    arrays = {name: _flat(value) for name, value in vars(one).items() if name != "period"}
    return _header(schedule.problem, schedule.solver) | {"round": arrays | {"period": one.period}}


def read_plan(document: Mapping[str, Any]) -> Schedule:
    """Reads the plan of a document, for whatever problem it names.

    Raises:
        DamagedPlanError: the document is not a plan, has another version, or is not a valid schedule of its problem.
    """
    with _reported_as_damage():
        said = document["problem"]
        topology = Topology(said["num_pipelines"], said["num_stages"])
        costs = Costs(**said["costs"])
        names = ("num_microbatches", "memory_limit", "num_iterations", "decoupled", "staggered")
        chunks = tuple(Chunk(**chunk) for chunk in said.get("chunks", ()))
        holders = tuple(map(tuple, said.get("stage_of_chunk", ())))
        failed = frozenset((d, p) for d, p in said.get("failed", ()))
        fields = {name: said[name] for name in names} | {"chunks": chunks, "stage_of_chunk": holders}
        problem = Problem(topology, costs=costs, failed=failed, **fields)
        if problem.is_alike:
            problem = canonical(problem, tuple(said["failures"]))
        return _read_plan(dict(document), problem, document["solver"])


def encode(schedule: Schedule) -> bytes:
    """Encodes a plan as the content of a file."""
    body = _dump(plan_document(schedule))
    return b'{"sha256": "%b", "plan": %b}\n' % (sha256(body).hexdigest().encode(), body)


def decode(content: bytes, problem: Problem, solver: str) -> Schedule:
    """Decodes the plan of a normalized problem from the content of a file.

    Raises:
        DamagedPlanError: the content is damaged, or not a valid schedule of that problem by that planner.
    """
    match = re.fullmatch(rb'\{"sha256": "([0-9a-f]{64})", "plan": (.*)\}\n', content, re.DOTALL)
    if match is None:
        raise DamagedPlanError("it is not a whole plan file")
    if sha256(match[2]).hexdigest().encode() != match[1]:
        raise DamagedPlanError("its content does not have its hash")
    with _reported_as_damage():
        return _read_plan(json.loads(match[2]), problem, solver)


@contextmanager
def _reported_as_damage() -> Iterator[None]:
    try:
        yield
    except DamagedPlanError:
        raise
    except KeyError as error:
        raise DamagedPlanError(f"it has no {error}") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise DamagedPlanError(f"it holds no valid plan: {error}") from error


def _read_plan(plan: dict[str, Any], problem: Problem, solver: str) -> Schedule:
    if plan["version"] != VERSION:
        raise DamagedPlanError(f"it has version {plan['version']}, not {VERSION}")
    fields = plan.pop("round")
    if plan != _header(problem, solver):
        raise DamagedPlanError("it holds the plan of another problem")
    one = _read_round(fields, problem)
    schedule = Schedule.from_round(problem, solver, one)
    verify(schedule)
    return schedule


def _read_round(fields: dict[str, Any], problem: Problem) -> Round:
    shape = D, M, P = problem.num_pipelines, problem.most_microbatches, problem.num_chunks
    executor = np.array(fields["executor_DMP"])
    exists = np.broadcast_to((np.arange(M) < np.array(problem.microbatches)[:, None])[:, :, None], shape)
    right = executor.dtype.kind == "i" and executor.size == exists.size
    if not right or executor.max() >= D or ((executor >= 0) != exists.ravel()).any():
        raise DamagedPlanError(f"its executors are not pipelines below {D}")
    start, update, period = (np.array(fields[name], float) for name in ("start_3DMP", "update_P", "period"))
    start = start.reshape(3, *shape)
    if not all(np.isfinite(times).all() for times in (start[:, exists], update, period)):
        raise DamagedPlanError("it has times that are not finite")
    return Round(executor.astype(np.int32).reshape(shape), start, update.reshape(P), float(period))


def _flat(values: np.ndarray) -> list[Any]:
    return [None if math.isnan(value) else value for value in values.ravel().tolist()]


def _header(problem: Problem, solver: str) -> dict[str, Any]:
    """Describes a problem and its planner, identically for all problems with the same normalized form."""
    limit, number, of_chunks = problem.memory_limit, problem.num_microbatches, chunk_fields(problem)
    if not problem.is_alike:
        of_chunks["failed"] = [list(worker) for worker in sorted(problem.failed)]
    return {
        "version": VERSION,
        "solver": solver,
        "problem": of_chunks
        | {
            "num_pipelines": problem.num_pipelines,
            "num_microbatches": number if isinstance(number, int) else list(number),
            "num_stages": problem.num_stages,
            "failures": list(failure_counts(problem)),
            # Equal problems may differ in 8 and 8.0, or in 0.0 and -0.0.
            "costs": {name: value + 0.0 for name, value in asdict(problem.costs).items()},
            "memory_limit": None if limit is None else float(limit),
            "num_iterations": problem.num_iterations,
            "decoupled": problem.decoupled,
            "staggered": problem.staggered,
        },
    }


def _dump(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
