"""Problems, schedules as rows, what they are worth and hold, and the bound's basics."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from swift.errors import SettingError
from swift.schedules.bounds import lower_bound
from swift.schedules.problem import NO_MICROBATCH, Costs, Kind, Op, Problem, TimedOp
from swift.schedules.schedule import (
    Round,
    Schedule,
    bubble_share,
    iteration_ends,
    makespan,
    peak_memory,
    period,
    window_period,
)
from swift.topology import Topology

COLUMNS = ("worker", "kind", "iteration", "pipeline", "microbatch", "chunk", "start", "end")


def one_after_another(problem):
    """One micro-batch of two stages: F F B W at stage 1, then B W at stage 0."""
    start_3DMP = np.array([[0.0, 1.0], [3.0, 2.0], [4.0, 3.0]]).reshape(3, 1, 1, 2)
    return Schedule.from_round(problem, "hand", Round(np.zeros((1, 1, 2), np.int32), start_3DMP, np.array([5, 4]), 5))


def test_a_schedule_repeats_its_round():
    schedule = one_after_another(Problem(Topology(1, 2), 1, num_iterations=2))
    assert schedule.num_ops == 16
    assert schedule.bounds.tolist() == [0, 8, 16]
    names = [f"{row.op.kind.name}{row.op.iteration}@{row.start:g}-{row.end:g}" for row in schedule.ops_of((0, 1))]
    assert names == ["F0@1-2", "B0@2-3", "W0@3-4", "U0@4-4", "F1@6-7", "B1@7-8", "W1@8-9", "U1@9-9"]
    assert next(schedule.ops()) == TimedOp(Op(Kind.F, 0, 0, 0, 0), (0, 0), 0, 1)
    assert schedule.ops_of((0, 0))[-1].op == Op(Kind.U, 1, 0, NO_MICROBATCH, 0)


def test_measures_by_hand():
    schedule = one_after_another(Problem(Topology(1, 2), 1, num_iterations=3))
    assert iteration_ends(schedule).tolist() == [5, 10, 15]
    assert (makespan(schedule), period(schedule), window_period(schedule)) == (15, 5, 5)
    assert bubble_share(schedule) == pytest.approx(1 - 6 / 10)
    lone = one_after_another(Problem(Topology(1, 2), 1, num_iterations=1))
    assert (makespan(lone), period(lone), window_period(lone)) == (5, 5, 5)


def test_a_window_that_drains_costs_more_than_the_period():
    """Stage 1 starts its next iteration while stage 0 is still at its last."""
    one = Round(np.zeros((1, 1, 2), np.int32), np.array([0.0, 1, 3, 2, 6, 3]).reshape(3, 1, 1, 2), np.array([7, 4]), 7)
    schedule = Schedule.from_round(Problem(Topology(1, 2), 1, num_iterations=2), "hand", replace(one, period=6.5))
    assert (period(schedule), window_period(schedule)) == (6.5, 13.5 / 2)


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_ops_in_any_order_make_the_same_schedule(problems, random_schedule, data):
    random = data.draw(st.randoms(use_true_random=False))
    schedule = random_schedule(data.draw(problems()), random)
    rows = list(schedule.ops())
    random.shuffle(rows)
    again = Schedule.from_ops(schedule.problem, "again", rows)
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(again, name), getattr(schedule, name), err_msg=name)
        assert getattr(again, name).dtype == getattr(schedule, name).dtype


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_rows_are_by_worker_iteration_and_start(problems, random_schedule, data):
    problem = data.draw(problems(memory_limit=None))
    schedule = random_schedule(problem, data.draw(st.randoms(use_true_random=False)))
    rows = [(row.worker, row.op.iteration, row.start) for row in schedule.ops()]
    assert rows == sorted(rows)
    by_worker = [schedule.ops_of(worker) for worker in problem.topology.workers]
    assert [row for ops in by_worker for row in ops] == list(schedule.ops())
    assert np.diff(schedule.bounds).tolist() == [len(ops) for ops in by_worker]
    for worker, ops in zip(problem.topology.workers, by_worker, strict=True):
        updates = sum(row.op.kind == Kind.U for row in ops)
        assert updates == (0 if worker in problem.failed else problem.num_iterations)
    assert -1e-9 <= bubble_share(schedule) < 1
    assert period(schedule) >= lower_bound(problem) * (1 - 1e-9)


def test_no_ops_are_a_schedule_without_rows():
    schedule = Schedule.from_ops(Problem(Topology(1, 2), 1), "empty", [])
    assert schedule.num_ops == 0
    assert list(schedule.ops()) == []
    assert peak_memory(schedule).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("costs", "peaks"),
    [
        (Costs(), [1, 1]),
        (Costs(w_stash=3), [3, 3]),
        (Costs(f_stash=2, w_stash=0), [2, 2]),
        # Stage 0 reads a B beside its F-stash, stage 1 an F beside the stash that it takes.
        (Costs(inbox=0.5), [1.5, 1.5]),
        (Costs(w_stash=3, inbox=0.5), [3.5, 3]),
    ],
    ids=["units", "larger W-stash", "no W-stash", "inbox", "larger W-stash and inbox"],
)
def test_peak_memory_of_one_microbatch(costs, peaks):
    problem = Problem(Topology(1, 2), 1, costs=costs)
    assert peak_memory(one_after_another(problem)).tolist() == peaks
    assert max(peaks) <= costs.microbatch_peak


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_memory_of_one_worker_that_holds_all(problems, data, random_schedule):
    """All Fs, then all Bs, then all Ws at a lone worker: between F and W everything is held."""
    problem = data.draw(problems(st.just(1), st.just(1), num_iterations=1, decoupled=True, memory_limit=None))
    costs, M = problem.costs, problem.num_microbatches
    schedule = random_schedule(problem, data.draw(st.randoms(use_true_random=False)))
    lengths = np.repeat([costs.t_f, costs.t_b, costs.t_w], M)
    start_3DMP = np.concatenate([[0], np.cumsum(lengths)[:-1]]).reshape(3, 1, M, 1)
    one = Round(np.zeros((1, M, 1), np.int32), start_3DMP, np.array([lengths.sum()]), lengths.sum() + costs.t_u)
    together = Schedule.from_round(problem, "hand", one)
    peak = M * max(costs.f_stash, costs.w_stash)
    np.testing.assert_allclose(peak_memory(together), [peak])
    assert peak_memory(schedule)[0] <= peak * (1 + 1e-9)


@pytest.mark.parametrize("P", [1, 2, 4, 8])
@pytest.mark.parametrize("M", [1, 2, 4, 8, 20])
def test_bound_of_unit_times_without_failure(P, M):
    assert lower_bound(Problem(Topology(3, P), M)) == max(3 * M, 2 * P - 1 + 2 * M)
    assert lower_bound(Problem(Topology(3, P), M, decoupled=False, staggered=False)) == 3 * M + 3 * (P - 1)


def test_bound_of_the_paper_s_example():
    for worker in Topology(3, 4).workers:
        assert lower_bound(Problem(Topology(3, 4), 6, frozenset({worker}))) == 27


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_the_bound_grows_with_failures_and_with_every_restriction(problems, data):
    problem = data.draw(problems(st.integers(2, 3), decoupled=True, staggered=True))
    bound = lower_bound(problem)
    for restriction in ({"decoupled": False}, {"staggered": False}, {"decoupled": False, "staggered": False}):
        assert lower_bound(replace(problem, **restriction)) >= bound
    assert lower_bound(replace(problem, memory_limit=None)) <= bound
    assert lower_bound(replace(problem, failed=frozenset())) <= bound
    assert lower_bound(replace(problem, num_microbatches=problem.num_microbatches + 1)) > bound
    assume(problem.num_iterations > 1)
    assert lower_bound(replace(problem, num_iterations=2)) == bound


def test_survivors_are_by_stage():
    problem = Problem(Topology(3, 2), 4, frozenset({(0, 1), (2, 1)}))
    assert problem.survivors == ((0, 1, 2), (1,))
    assert (problem.num_pipelines, problem.num_stages) == (3, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"failed": {(0, 2), (1, 2)}}, "stage 2 has no live worker: restore from a checkpoint"),
        ({"failed": {(2, 0)}}, "failed worker = '2:0': no such worker among 2 pipelines x 3 stages"),
        ({"failed": {(0, 3)}}, "failed worker = '0:3': no such worker"),
        (
            {"memory_limit": 0.5},
            "Problem.memory_limit = 0.5: must be at least 1, which a single micro-batch takes with its ",
        ),
        ({"memory_limit": 2.0, "costs": Costs(w_stash=2, inbox=0.5)}, "must be at least 2.5"),
        ({"memory_limit": 0}, "Problem.memory_limit = 0: must be a number above 0"),
        ({"num_microbatches": 0}, "Problem.num_microbatches = 0: must be a whole number of at least 1"),
        ({"num_iterations": 0}, "Problem.num_iterations = 0: must be a whole number of at least 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_problems_are_refused_in_a_line(settings, message):
    settings = {"num_microbatches": 4, "failed": frozenset()} | settings
    with pytest.raises(SettingError) as error:
        Problem(Topology(2, 3), **settings | {"failed": frozenset(settings["failed"])})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["t_f", "t_b", "t_w", "f_stash"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "1", None, True])
def test_bad_costs_are_refused(name, value):
    with pytest.raises(SettingError, match=rf"Costs\.{name} = .*must be a number above 0"):
        Costs(**{name: value})


@pytest.mark.parametrize("name", ["t_u", "t_comm", "w_stash", "inbox"])
def test_what_may_cost_nothing_may_not_cost_less(name):
    assert getattr(Costs(**{name: 0}), name) == 0
    with pytest.raises(SettingError, match=rf"Costs\.{name} = -1: must be a number of at least 0"):
        Costs(**{name: -1})


def test_costs_are_floats_whatever_they_were_given_as():
    assert Costs(2, 3, 4) == Costs(2.0, 3.0, 4.0)
    assert isinstance(Costs(2).t_f, float)
    assert Costs(w_stash=2, inbox=0.5).microbatch_peak == 2.5


def test_schedules_do_without_jax():
    code = (
        "import pkgutil, sys, swift.schedules as package\n"
        "for one in pkgutil.walk_packages(package.__path__, 'swift.schedules.'): __import__(one.name)\n"
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
