"""Fault-free baselines: GPipe and 1F1B with a fused backward pass and a barrier, and the zero-bubble schedule."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from swift.errors import SettingError
from swift.schedules.bounds import max_in_flight
from swift.schedules.planners.adaptive import adaptive
from swift.schedules.problem import Kind, Problem
from swift.schedules.schedule import Round, Schedule, fits
from swift.schedules.sequences import time_round

_Order = Callable[[Problem, int, int], list[tuple[int, int, int]]]
"""Function (problem, stage, largest number of micro-batches in memory) -> ops of that stage in pipeline 0, in order."""


def gpipe(problem: Problem) -> Schedule:
    """Plans all Fs, then all backward passes, in flushes of as many micro-batches as the memory limit allows.

    This is GPipe (arXiv 1811.06965, section 2.3). With unit times and no memory limit, the period is 3M + 3(P-1).

    Returns:
        A schedule of ``problem`` with neither a decoupled backward nor staggered updates.

    Raises:
        SettingError: the problem has a failed worker.
    """
    return _repeated(problem, "gpipe", _flushes, problem.most_microbatches)


def one_f_one_b(problem: Problem) -> Schedule:
    """Plans one F and one backward pass alternately (1F1B), after a warm-up of P - p Fs at stage p.

    This is PipeDream-Flush (arXiv 2006.09503, section 2.2). With unit times and a memory limit of at least P
    micro-batches, the period is 3M + 3(P-1). A lower limit shortens all warm-ups in proportion, because stages with
    equal numbers of micro-batches in flight would wait for each other in every turn.

    Returns:
        A schedule of ``problem`` with neither a decoupled backward nor staggered updates.

    Raises:
        SettingError: the problem has a failed worker.
    """
    return _repeated(problem, "one_f_one_b", _alternating, problem.num_stages)


def zero_bubble(problem: Problem) -> Schedule:
    """Plans a zero-bubble schedule with the adaptive planner.

    In zero bubble pipeline parallelism (arXiv 2401.10241), the handcrafted schedule ZB-H1 finishes an iteration of unit
    times within 3M + P - 1. Here a search under the memory limit replaces the handcrafted schedules. The problem
    determines whether the backward pass is decoupled and updates are staggered.

    Raises:
        SettingError: the problem has a failed worker.
    """
    _refuse_failures(problem, "zero_bubble")
    return replace(adaptive(problem), solver="zero_bubble")


def _flushes(problem: Problem, _: int, num_held: int) -> list[tuple[int, int, int]]:
    microbatches = range(problem.total_microbatches)
    order: list[tuple[int, int, int]] = []
    for flush in (microbatches[i : i + num_held] for i in range(0, len(microbatches), num_held)):
        order += [(Kind.F, 0, m) for m in flush]
        order += [(kind, 0, m) for m in flush for kind in (Kind.B, Kind.W)]
    return order


def _alternating(problem: Problem, stage: int, num_held: int) -> list[tuple[int, int, int]]:
    M, P = problem.total_microbatches, problem.num_stages
    ahead = math.ceil(num_held * (P - stage) / P)
    order: list[tuple[int, int, int]] = [(Kind.F, 0, m) for m in range(min(ahead, M))]
    for m in range(M):
        order += [(Kind.B, 0, m), (Kind.W, 0, m)]
        if m + ahead < M:
            order.append((Kind.F, 0, m + ahead))
    return order


def _repeated(problem: Problem, name: str, order: _Order, most_held: int) -> Schedule:
    """Plans one pipeline with as many micro-batches in memory as the limit allows, and copies it to all pipelines."""
    _refuse_failures(problem, name)
    if not (problem.is_plain and problem.is_uniform):
        allowed = f"{name} plans pipelines that are alike, with one chunk on each stage: try adaptive"
        if problem.is_plain:
            raise SettingError("Problem.num_microbatches", problem.num_microbatches, allowed)
        raise SettingError("Problem.stage_of_chunk", problem.stage_of_chunk, allowed)
    problem = replace(problem, decoupled=False, staggered=False)
    return Schedule.planned(
        problem, name, lambda lone: _largest_that_fits(replace(lone, num_iterations=1), order, most_held)
    )


def _refuse_failures(problem: Problem, name: str) -> None:
    if problem.failed:
        raise SettingError("Problem.failed", sorted(problem.failed), f"{name} cannot plan for failures: try adaptive")


def _largest_that_fits(problem: Problem, order: _Order, num_held: int) -> Round:
    executor_DMP = np.zeros((1, problem.most_microbatches, problem.num_stages), np.int32)
    num_stashes = max_in_flight(problem, float(problem.stash_2P[0].max()))
    if num_stashes < problem.most_microbatches:
        num_held = min(num_held, int(num_stashes))
    while True:
        sequences = [order(problem, p, num_held) for p in range(problem.num_stages)]
        plan = time_round(problem, executor_DMP, sequences)
        # How long messages occupy inboxes is known only now: hold fewer micro-batches until they fit; one always does.
        if num_held == 1 or fits(problem, plan):
            return plan
        num_held -= 1
