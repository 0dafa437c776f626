"""The roles to leave empty after failures, where workers may take those of others, and who moves.

Where pipelines are alike, ReCycle's dynamic program spreads the failures over the stages. Elsewhere every role is one
of its own, and they are left empty one after the other, each time the one without which the bound of the period is
smallest.
"""

from dataclasses import replace

from swift.schedules.bounds import tight_bound
from swift.schedules.plans.normalize import Move, moves, spread
from swift.schedules.problem import Problem
from swift.topology import Worker


def moves_to_spread(problem: Problem) -> tuple[Move, ...]:
    """Finds the moves after which the failures of a problem cost least, by the bound of the period.

    Args:
        problem: problem with failures; every chunk has a live worker.

    >>> from swift.topology import Topology
    >>> moves_to_spread(Problem(Topology(3, 4), num_microbatches=6, failed=frozenset({(1, 2)})))
    (Move(worker=(1, 0), role=(1, 2)),)
    >>> apart = (0, 0, 1), (0, 1, 1), (0, 1, 1)
    >>> moves_to_spread(Problem(Topology(3, 2), 2, frozenset({(1, 0), (2, 0)}), stage_of_chunk=apart))
    (Move(worker=(0, 1), role=(2, 0)),)
    """
    if problem.is_alike:
        return moves(problem, spread(problem, len(problem.failed)))
    failed, empty = problem.failed, roles_to_leave(problem)
    return tuple(Move(*pair) for pair in zip(sorted(empty - failed), sorted(failed - empty), strict=True))


def roles_to_leave(problem: Problem) -> frozenset[Worker]:
    """Chooses as many roles as there are failures; those of the failed workers where no others are better."""
    empty = frozenset[Worker]()
    for _ in problem.failed:
        ways = [empty | {role} for role in problem.topology.workers if role not in empty]
        found = [(_bound(problem, way), way) for way in ways if _is_possible(problem, way)]
        if not found:
            return problem.failed
        empty = min(found, key=lambda one: (one[0], len(one[1] - problem.failed), sorted(one[1])))[1]
    return empty if _bound(problem, empty) < _bound(problem, problem.failed) else problem.failed


def _bound(problem: Problem, failed: frozenset[Worker]) -> float:
    """The bound, rounded, so that its last bits decide nothing."""
    return round(tight_bound(replace(problem, failed=failed)), 9)


def _is_possible(problem: Problem, failed: frozenset[Worker]) -> bool:
    """Whether every stage and every chunk has a worker."""
    places = [(p,) * problem.num_pipelines for p in range(problem.num_stages)] + problem.stage_DP.T.tolist()
    return all(any((d, p) not in failed for d, p in enumerate(stage_D)) for stage_D in places)
