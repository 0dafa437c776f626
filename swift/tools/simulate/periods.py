"""Duration of an iteration by the number of live workers in each stage, from the real planner.

P: stages.
"""

from dataclasses import dataclass, field, replace

from swift.schedules import Problem, adaptive, one_f_one_b, period, spread, tight_bound
from swift.schedules.plans import canonical

MAX_PLANNED_OPS = 50_000
"""Limit on the ops of an iteration: for a larger problem the planner takes seconds per failure set."""


@dataclass(frozen=True)
class Periods:
    """Periods of one problem under any failures, each computed once.

    A problem of at most ``MAX_PLANNED_OPS`` ops is planned by ``adaptive``. For a larger one the tight bound is used,
    which plans of such sizes exceed by a few thousandths.

    Attributes:
        problem: problem without failures.
    """

    problem: Problem
    _known: dict[tuple[int, ...], float] = field(default_factory=dict, repr=False, compare=False)
    _known_single: dict[int, float] = field(default_factory=dict, repr=False, compare=False)
    _known_spread: dict[int, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)

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
