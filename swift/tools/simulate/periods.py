"""Duration of an iteration by the number of live workers in each stage, or of all, from the real planners.

P: stages.
"""

import math
from dataclasses import dataclass, field, replace

from swift.schedules.adapt.choice import recut
from swift.schedules.adapt.work import BlockProblem
from swift.schedules.bounds import tight_bound
from swift.schedules.chunks import Chunk
from swift.schedules.measures import period
from swift.schedules.planners.adaptive import adaptive
from swift.schedules.planners.baselines import one_f_one_b
from swift.schedules.plans.normalize import canonical, spread
from swift.schedules.problem import Problem

MAX_PLANNED_OPS = 50_000
"""Limit on the ops of an iteration: for a larger problem the planner takes seconds per failure set."""
BLOCKS_OF_STAGE = 4
"""Blocks of a stage that is cut anew."""


@dataclass(frozen=True)
class Periods:
    """Periods of one problem under any failures, each computed once.

    A problem of at most ``MAX_PLANNED_OPS`` ops is planned by ``adaptive``. For a larger one the tight bound is used,
    which plans of 1,536 workers exceed by 0.3 % with M = P and by 2.4 % with M = 2P, in 1F1B's memory and with unequal
    costs: a trace has thousands of failure sets, and each plan would take seconds.

    Attributes:
        problem: problem without failures.
    """

    problem: Problem
    _known: dict[tuple[int, ...], float] = field(default_factory=dict, repr=False, compare=False)
    _known_single: dict[int, float] = field(default_factory=dict, repr=False, compare=False)
    _known_spread: dict[int, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)
    _known_recut: dict[int, float] = field(default_factory=dict, repr=False, compare=False)

    @property
    def are_planned(self) -> bool:
        """True if the periods are those of plans, False if they are bounds."""
        return self.problem.num_ops <= MAX_PLANNED_OPS

    def ratio(self, failures_P: tuple[int, ...]) -> float:
        """Divides the period under failures by the fault-free one; at least 1.

        If it were less, the plan for fewer workers would be better for all workers, too.

        Args:
            failures_P: failures of every stage, each less than D.

        Raises:
            SettingError: a stage has no survivor.
        """
        return max(1.0, self._period(failures_P) / self._period((0,) * self.problem.num_stages))

    def spread(self, num_failures: int) -> tuple[int, ...]:
        """Distributes failures over the stages if roles can be moved; see ``schedules.spread``."""
        if num_failures not in self._known_spread:
            self._known_spread[num_failures] = spread(self.problem, num_failures)
        return self._known_spread[num_failures]

    def elastic_ratio(self, num_pipelines: int) -> float:
        """Divides the 1F1B period of fewer pipelines that share all micro-batches by that of all pipelines.

        Args:
            num_pipelines: number of remaining pipelines, at least one.
        """
        share = self.problem.most_loaded(num_pipelines)
        return self._single_period(share) / self._single_period(self.problem.most_microbatches)

    def recut_ratio(self, num_workers: int) -> float:
        """Divides the period of this many workers, whose pipelines are cut anew, by the fault-free one; at least 1.

        For a problem that is too large to plan, both are tight bounds, as in ``ratio``: how long workers wait for
        each other counts before and after.

        Args:
            num_workers: live workers, at least one for each stage.
        """
        if num_workers not in self._known_recut:
            self._known_recut[num_workers] = self._recut_period(num_workers)
        return max(1.0, self._known_recut[num_workers] / self._period((0,) * self.problem.num_stages))

    def _recut_period(self, num_workers: int) -> float:
        problem, workers = self.problem, self.problem.topology.workers
        if num_workers == len(workers):
            return self._period((0,) * problem.num_stages)
        if not self.are_planned:
            return self._recut_bound(num_workers)
        blocks = (Chunk.of_size(1 / BLOCKS_OF_STAGE, 1),) * (BLOCKS_OF_STAGE * problem.num_stages)
        work = BlockProblem(problem, blocks, (BLOCKS_OF_STAGE,) * problem.num_stages)
        # Whole pipelines first: their workers are the first ones.
        plan = recut(work, frozenset(workers[num_workers:]))
        return math.inf if plan is None else plan.period

    def _recut_bound(self, num_workers: int) -> float:
        """Tight bound of pipelines whose stages run as many blocks' micro-batches as each worker's share is.

        Shares are not whole micro-batches: between two bounds, in proportion.
        """
        problem = self.problem
        units = math.ceil(problem.total_microbatches * problem.num_stages * BLOCKS_OF_STAGE / num_workers)
        number, more = divmod(units, BLOCKS_OF_STAGE)
        low, high = (tight_bound(replace(problem, num_microbatches=number + one)) for one in (0, 1))
        return low + more / BLOCKS_OF_STAGE * (high - low)

    def _single_period(self, num_microbatches: int) -> float:
        if num_microbatches not in self._known_single:
            lone = replace(self.problem.single_pipeline(), num_microbatches=num_microbatches)
            self._known_single[num_microbatches] = period(one_f_one_b(lone))
        return self._known_single[num_microbatches]

    def _period(self, failures_P: tuple[int, ...]) -> float:
        if failures_P not in self._known:
            problem = canonical(self.problem, failures_P)
            self._known[failures_P] = period(adaptive(problem)) if self.are_planned else tight_bound(problem)
        return self._known[failures_P]
