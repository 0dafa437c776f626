"""Bytes in the slots of tick tables, held against what the planner's memory model says of the same schedule."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swift.schedules.lowering.lower import LiveBytes, SlotBytes, allocated_bytes, live_bytes, lower
from swift.schedules.planners.adaptive import adaptive
from swift.schedules.planners.baselines import one_f_one_b
from swift.schedules.planners.names import shape_of
from swift.schedules.problem import Costs, Kind, Problem
from swift.schedules.registry import PLANNERS
from swift.schedules.schedule import peak_memory
from swift.topology import Topology

SIZES = SlotBytes(stash_for_b=300, stash_for_b_and_w=500, stash_for_w=200)
COSTS = Costs(f_stash=SIZES.stash_for_b + SIZES.stash_for_b_and_w, w_stash=SIZES.stash_for_b_and_w + SIZES.stash_for_w)
PLANNED = [name for name in PLANNERS if name != "milp"]


def planned_bytes(schedule):
    """The planner's peak of every live worker."""
    live = schedule.problem.topology.live_workers(schedule.problem.failed)
    return peak_memory(schedule)[[d * schedule.problem.num_stages + p for d, p in live]]


def slow_held(table, sizes):
    """Computes what is alive in every slot at every moment, slot by slot, from the words of the table."""
    T, R = table.opcode_TR.shape
    between, within = np.zeros((2, T, R), np.int64)
    first_read = {
        (kind, name, row): t
        for t, row in np.argwhere(table.opcode_TR > 0).tolist()
        for kind, name in [(table.opcode_TR[t, row] - 1, int(table.data_TR[t, row]))]
    }
    for (kind, name, row), t in first_read.items():
        if kind in (Kind.F, Kind.B):
            b, w = first_read[Kind.B, name, row], first_read[Kind.W, name, row]
            keeps = (
                [(sizes.stash_for_b, b), (sizes.stash_for_b_and_w, w)] if kind == Kind.F else [(sizes.stash_for_w, w)]
            )
            keeps += [(sizes.gradient, b)] if table.loss_TR[t, row] >= 0 else []
            for size, until in keeps:
                between[t:until, row] += size
                within[t : until + 1, row] += size
    for moves, kind, size in (
        (table.activations, Kind.F, sizes.activation),
        (table.gradients, Kind.B, sizes.gradient),
    ):
        for t, turn, row in np.argwhere(moves.slot_TQR >= 0).tolist():
            slot, later = moves.slot_TQR[t, turn, row], np.arange(T) > t
            reads = later & (table.opcode_TR[:, row] == kind + 1) & (table.inbox_TR[:, row] == slot)
            until = int(np.argmax(reads))
            between[t:until, row] += size
            within[t + 1 : until + 1, row] += size
    return LiveBytes(between.max(axis=0), within.max(axis=0))


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), sizes=st.builds(SlotBytes, *[st.integers(0, 9)] * 5))
def test_what_is_held(problems, random_schedule, data, sizes):
    problem = data.draw(problems(memory_limit=None))
    table = lower(random_schedule(problem, data.draw(st.randoms(use_true_random=False))))
    held = live_bytes(table, sizes)
    for ours, slow in zip(held, slow_held(table, sizes), strict=True):
        np.testing.assert_array_equal(ours, slow)
    assert held.within_ticks_R.max() <= allocated_bytes(table, sizes)


@pytest.mark.parametrize("failed", [(), ((0, 3),), ((1, 0), (2, 2))], ids=str)
@pytest.mark.parametrize("most", [None, 3, 6])
@pytest.mark.parametrize("name", PLANNED)
def test_stashes_take_what_the_planner_said(name, most, failed):
    """Between ticks, to the byte. Within a tick B writes its stash beside what it reads; planners say over it."""
    if failed and name in ("gpipe", "one_f_one_b", "zero_bubble"):
        pytest.skip("plans no failures")
    shape = shape_of(name, 4)
    limit = None if most is None else most * COSTS.microbatch_peak * len(shape) / 4
    problem = Problem(Topology(3, 4), 6, frozenset(failed), COSTS, limit, stage_of_chunk=(shape,) * 3)
    schedule = PLANNERS[name](problem)
    held, planned = live_bytes(lower(schedule), SIZES), planned_bytes(schedule)
    np.testing.assert_array_equal(held.between_ticks_R, planned)
    assert (planned <= held.within_ticks_R).all()
    assert (held.within_ticks_R <= planned + min(SIZES.stash_for_b, SIZES.stash_for_w)).all()


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), counts=st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(0, 9)))
def test_any_schedule_takes_what_the_planner_says_of_it(problems, random_schedule, data, counts):
    problem, sizes = data.draw(problems(memory_limit=None)), SlotBytes(*counts)
    costs = replace(
        problem.costs,
        f_stash=sizes.stash_for_b + sizes.stash_for_b_and_w,
        w_stash=sizes.stash_for_b_and_w + sizes.stash_for_w,
        inbox=0,
    )
    schedule = random_schedule(replace(problem, costs=costs), data.draw(st.randoms(use_true_random=False)))
    np.testing.assert_array_equal(live_bytes(lower(schedule), sizes).between_ticks_R, planned_bytes(schedule))


def test_by_hand():
    """One micro-batch on two stages: the last one keeps the gradient of its loss as well."""
    sizes = SlotBytes(stash_for_b=1, stash_for_b_and_w=10, stash_for_w=100, activation=1_000, gradient=10_000)
    table = lower(one_f_one_b(Problem(Topology(1, 2), 1, num_iterations=1)))
    held = live_bytes(table, sizes)
    # The first stage holds most in B, which reads all but what it writes; the last one in F, which reads a message.
    assert held.within_ticks_R.tolist() == [10_000 + 1 + 10 + 100, 1_000 + 10_000 + 1 + 10]
    # What F kept waits for B on both, and at last so does a gradient.
    assert held.between_ticks_R.tolist() == [10_000 + 11, 10_000 + 11]
    assert allocated_bytes(table, sizes) == 11_111


def test_for_evaluation_there_are_messages_alone():
    sizes = SlotBytes(1, 10, 100, activation=1_000, gradient=10_000)
    table = lower(adaptive(Problem(Topology(2, 3), 4, num_iterations=1))).forward_only()
    assert set(live_bytes(table, sizes).within_ticks_R.tolist()) <= {0, 1_000, 2_000}
    assert allocated_bytes(table, sizes) == table.activations.num_slots * 1_000
