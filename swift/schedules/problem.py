"""What is to be planned: how many micro-batches over which live workers, at what costs, in how much memory."""

import math
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from swift.errors import SettingError, check_count, check_number
from swift.topology import Topology, Worker


@dataclass(frozen=True)
class Costs:
    """What one op of one micro-batch takes, in any one unit of time and any one unit of memory.

    Attributes:
        t_f: time of F, the forward of one micro-batch through one stage.
        t_b: time of B, the gradient with respect to the stage's input.
        t_w: time of W, the gradient with respect to the stage's parameters.
        t_u: time of U, the reduction over peers and the update; once per iteration.
        t_comm: time from the end of an op to the arrival of its output at the neighbouring stage.
        f_stash: memory that F takes and B gives back.
        w_stash: memory that B leaves for W, and W gives back.
        inbox: memory of one message, held from the end of the op that sends it to the end of the op that reads it.
    """

    t_f: float = 1.0
    t_b: float = 1.0
    t_w: float = 1.0
    t_u: float = 0.0
    t_comm: float = 0.0
    f_stash: float = 1.0
    w_stash: float = 1.0
    inbox: float = 0.0

    def __post_init__(self) -> None:
        for name in ("t_f", "t_b", "t_w", "f_stash"):
            check_number(f"Costs.{name}", getattr(self, name), above=0)
        for name in ("t_u", "t_comm", "w_stash", "inbox"):
            check_number(f"Costs.{name}", getattr(self, name), least=0)
        for item in fields(self):
            object.__setattr__(self, item.name, float(getattr(self, item.name)))

    @property
    def op_times(self) -> tuple[float, float, float, float]:
        """Times of F, B, W and U: indexed by ``Kind``."""
        return self.t_f, self.t_b, self.t_w, self.t_u

    @property
    def microbatch_peak(self) -> float:
        """The most memory that one micro-batch takes on a worker: F's stash turns into W's while B runs."""
        return max(self.f_stash, self.w_stash) + self.inbox


@dataclass(frozen=True)
class Problem:
    """A configuration and its work: what every planner is given, and what ``verify`` holds a schedule against.

    Attributes:
        topology: its expert ranks do not matter here: a worker's ranks do the same op together.
        num_microbatches: per pipeline and iteration.
        failed: the workers that are down.
        memory_limit: per worker, in the unit of the costs' stashes; None: no limit.
        num_iterations: the window, planned as one schedule.
        decoupled: False holds every W to its B, as a plain backward does; the neighbour's B waits for both (ablation).
        staggered: False holds every U until all stages have their last W (ablation).

    Raises:
        SettingError: a failed worker is outside the topology, a stage has no survivor, or the memory limit is below
            what a single micro-batch takes.
    """

    topology: Topology
    num_microbatches: int
    failed: frozenset[Worker] = frozenset()
    costs: Costs = field(default_factory=Costs)
    memory_limit: float | None = None
    num_iterations: int = 3
    decoupled: bool = True
    staggered: bool = True

    def __post_init__(self) -> None:
        check_count("Problem.num_microbatches", self.num_microbatches, least=1)
        check_count("Problem.num_iterations", self.num_iterations, least=1)
        self.topology.live_workers(self.failed)
        if self.memory_limit is not None:
            check_number("Problem.memory_limit", self.memory_limit, above=0)
            if self.memory_limit < self.costs.microbatch_peak:
                least = math.ceil(1000 * self.costs.microbatch_peak) / 1000
                takes = "which a single micro-batch takes with its message and while B runs"
                raise SettingError("Problem.memory_limit", self.memory_limit, f"must be at least {least:g}, {takes}")

    @property
    def num_pipelines(self) -> int:
        """D."""
        return self.topology.num_pipelines

    @property
    def num_stages(self) -> int:
        """P."""
        return self.topology.num_stages

    @property
    def num_ops(self) -> int:
        """Fs, Bs and Ws of one iteration."""
        return 3 * self.num_pipelines * self.num_microbatches * self.num_stages

    def single_pipeline(self) -> "Problem":
        """The work of one pipeline whose workers are all up."""
        return replace(self, topology=Topology(num_stages=self.num_stages), failed=frozenset())

    def if_drained(self) -> "Problem":
        """The same, but for a window of one iteration with a barrier: what counts there is when all stages end."""
        return replace(self, staggered=self.staggered and self.num_iterations > 1)

    def most_loaded(self, num_survivors: int) -> int:
        """How many micro-batches the most loaded worker of a stage with so many live workers runs at least: n_p."""
        return math.ceil(self.num_microbatches * self.num_pipelines / num_survivors)

    @cached_property
    def survivors(self) -> tuple[tuple[int, ...], ...]:
        """For every stage, the pipelines whose worker of that stage is up, ascending: the peers."""
        live = self.topology.live_workers(self.failed)
        by_stage: list[list[int]] = [[] for _ in range(self.num_stages)]
        for d, p in live:
            by_stage[p].append(d)
        return tuple(tuple(pipelines) for pipelines in by_stage)
