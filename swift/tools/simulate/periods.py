"""How long an iteration takes with so many live workers in each stage, by the real planner.

P: stages.
"""

from dataclasses import dataclass, field, replace

from swift.schedules import Problem, adaptive, one_f_one_b, period, spread, tight_bound
from swift.schedules.plans import canonical

MAX_PLANNED_OPS = 50_000
"""Of an iteration. A larger problem takes the planner seconds for each of its failure sets."""


@dataclass(frozen=True)
class Periods:
    """Periods of one problem under any failures, each found once.

    A problem of at most ``MAX_PLANNED_OPS`` ops is planned by ``adaptive``. Of a larger one it is the tight bound that
    counts, which no schedule can be below and which plans of such sizes miss by a few thousandths.

    Attributes:
        problem: without a failure.
    """

    problem: Problem
    _known: dict[tuple[int, ...], float] = field(default_factory=dict, repr=False, compare=False)
    _known_single: dict[int, float] = field(default_factory=dict, repr=False, compare=False)
    _known_spread: dict[int, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def are_planned(self) -> bool:
        """Whether these are periods of plans; or else bounds."""
        return self.problem.num_ops <= MAX_PLANNED_OPS

    @property
    def num_known(self) -> int:
        """How many failure sets, normalized, have been asked for."""
        return len(self._known)

    def ratio(self, failures_P: tuple[int, ...]) -> float:
        """The period with so many failures in every stage, over the one without; at least 1.

        Were it less, the plan for fewer workers would be the better one for all of them, too.

        Args:
            failures_P: each less than D.

        Raises:
            SettingError: a stage has no survivor.
        """
        return max(1.0, self._period(failures_P) / self._period((0,) * self.problem.num_stages))

    def spread(self, num_failures: int) -> tuple[int, ...]:
        """How many failures every stage should have where roles can be moved; see ``schedules.spread``."""
        if num_failures not in self._known_spread:
            self._known_spread[num_failures] = spread(self.problem, num_failures)
        return self._known_spread[num_failures]

    def elastic_ratio(self, num_pipelines: int) -> float:
        """The 1F1B period where fewer pipelines, all whole, share the micro-batches, over that of all pipelines.

        Args:
            num_pipelines: that are left, at least one.
        """
        share = -(-self.problem.num_microbatches * self.problem.num_pipelines // num_pipelines)
        return self._single_period(share) / self._single_period(self.problem.num_microbatches)

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
