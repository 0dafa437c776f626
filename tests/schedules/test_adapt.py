"""Plans after a failure: never worse than what they replace, and what moves is what has to."""

import random
from dataclasses import replace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as some

from swift.errors import SettingError
from swift.schedules.adapt.choice import adapt, fault_free, recut, rerouted
from swift.schedules.adapt.layouts import BlockProblem, layouts
from swift.schedules.adapt.moves import relocate
from swift.schedules.lowering.ticks import assign_ticks, lockstep_period
from swift.schedules.planners.adaptive import adaptive
from swift.schedules.problem import Chunk, Costs, Problem
from swift.schedules.rules import violations
from swift.schedules.schedule import Schedule, period, round_of
from swift.topology import Topology
from tests.schedules.adapt_checks import UNSHRUNK, check_choice, whole_pipelines


def of_blocks(D, P, a_stage, M, costs=None, limit=None, head=0.0):
    """A problem of stages with equally many blocks, the last with a head."""
    blocks = [Chunk.of_size(1 / a_stage, 1) for _ in range(P * a_stage)]
    blocks[-1] = Chunk.of_size(1 / a_stage, 1, more_f=head)
    chunks = tuple(Chunk.of_size(1.0, a_stage, more_f=head * (p == P - 1)) for p in range(P))
    problem = Problem(Topology(D, P), M, costs=costs or Costs(), chunks=chunks, num_iterations=2)
    return BlockProblem(problem.limited(limit), tuple(blocks), (a_stage,) * P)


def over_ideal(work, plan, without=None):
    return (without or fault_free(work).period) / plan.period / plan.ideal_throughput


@pytest.mark.parametrize(
    ("shape", "worker", "least"),
    [((4, 8), (1, 2), 0.97), ((4, 8), (3, 7), 0.97), ((3, 4), (0, 0), 0.95), ((8, 4), (5, 1), 0.95)],
)
def test_one_failure_costs_hardly_more_than_the_worker(shape, worker, least):
    work = of_blocks(*shape, 4, 2 * shape[1])
    plan = adapt(work, frozenset({worker}))
    assert plan.mode == "recut"
    assert not violations(plan.schedule)
    assert over_ideal(work, plan) >= least
    assert over_ideal(work, rerouted(work, frozenset({worker}))) < 0.9


def test_several_failures_with_unequal_costs_and_little_memory():
    work = of_blocks(4, 8, 4, 16, Costs(t_b=1.3, t_w=0.8, t_comm=0.1), limit=8)
    without = fault_free(work).period
    for failed in ({(0, 3)}, {(0, 3), (2, 3), (1, 7)}):
        plan = recut(work, frozenset(failed))
        assert not violations(plan.schedule)
        assert over_ideal(work, plan, without) >= (0.94 if len(failed) == 1 else 0.87)


@given(some.data())
def test_in_a_layout_every_survivor_has_a_place_and_every_stage_is_taken(data):
    """Also with whole pipelines down, and with fewer survivors than whole pipelines would need."""
    D, P, a_stage = (data.draw(some.integers(*bounds)) for bounds in ((2, 5), (1, 5), (1, 3)))
    workers = Topology(D, P).workers
    failed = frozenset(data.draw(some.sets(some.sampled_from(workers), min_size=1)))
    assume({p for _, p in set(workers) - failed} == set(range(P)))
    found = list(layouts(of_blocks(D, P, a_stage, 2 * P), failed))
    for layout in found:
        assert len(layout.places) == D * P - len(failed)
        assert {p for _, p in layout.places} == set(range(P))
        for runs in layout.runs_DP:
            held = [block for run in runs if run for block in range(*run)]
            assert held in ([], list(range(P * a_stage)))
    assert found


def test_in_a_run_no_pipeline_is_shorter_than_one_that_lost_the_most():
    """A worker that held a pipeline's blocks alone would need the memory of all."""
    work, failed = of_blocks(3, 3, 2, 6), frozenset({(0, 0), (2, 1)})

    def shortest(layout):
        return min(sum(run is not None for run in runs) for runs in layout.runs_DP if any(runs))

    assert min(map(shortest, layouts(work, failed))) == 1
    assert min(map(shortest, layouts(work, failed, in_run=True))) == 2


def random_problem(seed):
    """Blocks, costs, memory and failures of all kinds."""
    draw = random.Random(seed)
    D, P, a_stage = draw.choice(((2, 2, 4), (3, 2, 2), (2, 4, 1), (3, 3, 2), (4, 3, 1), (2, 3, 3), (5, 2, 3)))
    costs = Costs(
        t_b=draw.choice((1.0, 1.3)),
        t_w=draw.choice((1.0, 0.7)),
        t_u=draw.choice((0.0, 0.0, 0.4)),
        t_comm=draw.choice((0.0, 0.1)),
        inbox=draw.choice((0.0, 0.0, 0.2)),
    )
    limit = draw.choice((None, P + 1.0, P + 2.0))
    work = of_blocks(D, P, a_stage, draw.randint(P, 2 * P + 1), costs, limit, draw.choice((0.0, 0.2)))
    while True:
        failed = frozenset(draw.sample(work.problem.topology.workers, draw.randint(1, min(3, D * P - P))))
        if all(any((d, p) not in failed for d in range(D)) for p in range(P)):
            return work, failed


def check_random(seed):
    """That the choice is a valid plan of the same work, and no worse than each other way."""
    work, failed = random_problem(seed)
    plan = check_choice(work, failed, lambda whole: period(adaptive(whole)), seed)
    least = sum(work.cost_L) * work.problem.total_microbatches / (len(work.problem.topology.workers) - len(failed))
    assert plan.period >= least * (1 - 1e-9)


@settings(max_examples=8, phases=UNSHRUNK)
@given(some.integers(0, 10_000))
@example(963)  # whole pipelines, whose planner finds less for all of them than for those that differ
def test_the_choice_is_never_worse_than_another_way(seed):
    check_random(seed)


@settings(max_examples=10, phases=UNSHRUNK)
@given(some.integers(0, 10_000))
def test_what_is_copied_is_what_a_worker_lacks(seed):
    work, failed = random_problem(seed)
    plan = recut(work, failed)
    if plan is None:
        return
    held = {worker: set(range(*work.runs_P[worker[1]])) for worker in work.problem.topology.without(failed)}
    got = {worker: set() for worker in held}
    for block, giver, taker in plan.relocation.transfers:
        assert block in held[giver]
        assert block not in held[taker] | got[taker]
        got[taker].add(block)
    for worker, runs in plan.blocks_of_worker.items():
        wanted = {block for run in runs for block in range(*run)}
        assert wanted <= held[worker] | got[worker]
        assert got[worker] <= wanted
    assert set(plan.relocation.place_of.values()) == set(plan.layout.places)
    for d in plan.layout.pipelines:
        ends = [run for run in plan.layout.runs_DP[d] if run]
        assert [first for first, _ in ends] == [0, *(end for _, end in ends[:-1])]
        assert ends[-1][1] == len(work.blocks)


def test_a_place_changes_hands_only_where_that_saves_copies():
    work = of_blocks(3, 4, 2, 8)
    failed = frozenset({(0, 0), (1, 0)})
    plan = recut(work, failed)
    in_place = {worker: worker for worker in work.problem.topology.without(failed)}
    if set(plan.layout.places) == set(in_place):
        assert plan.relocation.place_of == in_place
    assert relocate(work, rerouted(work, failed).layout, failed).place_of == in_place


def test_for_a_short_downtime_nothing_moves():
    work, failed = of_blocks(4, 4, 4, 8), frozenset({(1, 2)})
    plan = adapt(work, failed)
    stayed = rerouted(work, failed)
    seconds = plan.relocation.seconds()
    pays_after_s = plan.pays_after_s(stayed, seconds)
    assert adapt(work, failed, downtime_s=0.9 * pays_after_s).mode == "reroute"
    assert adapt(work, failed, downtime_s=1.1 * pays_after_s).mode == "recut"
    # Until then, as much is done with two moves as without one.
    assert (pays_after_s - 2 * seconds) / plan.period == pytest.approx(pays_after_s / stayed.period)


def test_in_lockstep_ops_of_one_block_keep_what_cutting_anew_gains():
    work, failed = of_blocks(3, 4, 4, 8), frozenset({(1, 2)})
    plan = recut(work, failed, in_lockstep=True)
    assert not violations(plan.schedule)
    assert plan.period == max(period(plan.schedule), lockstep_period(plan.schedule))
    assert {chunk.num_blocks for chunk in plan.schedule.problem.chunks} == {1}
    assert over_ideal(work, plan) >= 0.95
    assert lockstep_period(adaptive(work.with_failures(failed))) >= 36


def ticks_of_window(schedule, num_iterations):
    """Length of a window of so many of a schedule's iterations, tick by tick."""
    longer = Schedule.from_round(
        replace(schedule.problem, num_iterations=num_iterations), schedule.solver, round_of(schedule)
    )
    tick_n, lengths = assign_ticks(longer), {}
    for tick, took in zip(tick_n.tolist(), (longer.end - longer.start).tolist(), strict=True):
        lengths[tick] = max(took, lengths.get(tick, 0.0))
    return sum(lengths.values())


@pytest.mark.parametrize(("D", "P", "M", "in_lockstep"), [(4, 8, 16, False), (3, 4, 8, True)])
def test_a_period_in_lockstep_is_what_a_long_window_grows_by(D, P, M, in_lockstep):
    """A window of two or three iterations, as planners make, mostly fills and drains."""
    schedule = recut(of_blocks(D, P, 4, M), frozenset({(1, 2)}), in_lockstep=in_lockstep).schedule
    grows_by = (ticks_of_window(schedule, 9) - ticks_of_window(schedule, 6)) / 3
    assert lockstep_period(schedule) == pytest.approx(grows_by)


def test_a_plan_is_the_same_every_time():
    work, failed = of_blocks(3, 4, 4, 8), frozenset({(1, 2)})
    one, other = recut(work, failed), recut(work, failed)
    assert one.layout == other.layout
    assert (one.schedule.start == other.schedule.start).all()


def test_pipelines_that_are_alike_run_alike():
    work = of_blocks(12, 4, 4, 8)
    plan = recut(work, frozenset({(1, 2)}))
    assert not violations(plan.schedule)
    assert plan.period < rerouted(work, frozenset({(1, 2)})).period
    bounds, starts = plan.schedule.bounds, plan.schedule.start
    rows = [starts[bounds[4 * d] : bounds[4 * d + 1]] for d in range(12)]
    assert len({row.tobytes() for row in rows}) < 12


def test_a_pipeline_whose_last_worker_cannot_hold_a_micro_batch_of_the_model_is_not_cut_anew():
    """The last worker of a pipeline of three has memory for one stage: all of its blocks take three."""
    work, failed = of_blocks(2, 3, 1, 4, limit=2), frozenset({(0, 1), (0, 2)})
    plan = adapt(work, failed)
    assert not violations(plan.schedule)
    assert all(run[1] - run[0] <= 2 for run in plan.layout.places.values())


def test_the_memory_of_whole_pipelines_is_that_of_the_workers_that_run():
    """A pipeline without a task holds nothing, however many blocks the model has."""
    work, failed = of_blocks(3, 4, 1, 8, limit=2), frozenset({(2, p) for p in range(3)})
    plan = recut(work, failed)
    assert not violations(plan.schedule)
    assert plan.period <= period(adaptive(whole_pipelines(work, failed))) * (1 + 1e-6)


def test_a_block_without_a_holder_cannot_be_moved():
    work = of_blocks(2, 3, 2, 4)
    for mode in ("auto", "reroute", "reassign", "recut"):
        with pytest.raises(SettingError, match="stage 1 has no live worker: restore from a checkpoint"):
            adapt(work, frozenset({(0, 1), (1, 1)}), mode)


def test_stages_are_blocks_where_nothing_is_said():
    work = BlockProblem.of_stages(Problem(Topology(3, 4), 6))
    plan = adapt(work, frozenset({(1, 2)}))
    assert plan.period < rerouted(work, frozenset({(1, 2)})).period
