"""The document says what the library measures, in the units and under the names that a program relies on."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.schedules.bounds import lower_bound
from swift.schedules.lowering.lower import lower
from swift.schedules.lowering.ticks import lockstep_period
from swift.schedules.planners.adaptive import adaptive
from swift.schedules.planners.baselines import one_f_one_b
from swift.schedules.plans.store import document
from swift.schedules.problem import COST_NAMES, Costs, Kind, Op, Problem, TimedOp
from swift.schedules.rules import verify
from swift.schedules.schedule import Schedule, bubble_share, makespan, peak_memory, period, window_period
from swift.topology import Topology

PAPER = Problem(Topology(3, 4), 6, frozenset({(1, 2)}))
UNEQUAL = Costs(1.0, 1.3, 0.8, 0.1, 0.1, f_stash=4.0, w_stash=2.0, inbox=0.5)
KEYS = {
    *("topology", "failed", "solver", "iterations", "period", "window_period", "lockstep_period", "makespan"),
    *("lower_bound", "gap", "bubble_share", "peak_memory", "fault_free", "throughput_vs_one_f_one_b"),
    *("throughput_vs_zero_bubble", "planning_ms", "num_microbatches", "costs", "memory_limit", "decoupled"),
    *("staggered", "tight_bound", "tick_table"),
}


def test_the_papers_example():
    told = document(adaptive(PAPER), 1.5)
    assert set(told) == KEYS
    assert told["topology"] == {"num_pipelines": 3, "num_stages": 4}
    assert told["failed"] == ["1:2"]
    assert (told["solver"], told["iterations"], told["planning_ms"]) == ("adaptive", 3, 1.5)
    assert (told["period"], told["lower_bound"], told["gap"]) == (27.0, 27.0, 0.0)
    assert told["fault_free"] == {"one_f_one_b": 27.0, "zero_bubble": 19.0}
    assert told["throughput_vs_one_f_one_b"] == 1.0
    assert told["throughput_vs_zero_bubble"] == pytest.approx(19 / 27)
    # 11 live workers run 3 ops of 6 x 3 micro-batches at each of 4 stages.
    assert told["bubble_share"] == pytest.approx(1 - 3 * 6 * 3 * 4 / (11 * 27))
    assert told["memory_limit"] is None
    assert told["tight_bound"] == 27.0


def test_the_tick_table_is_told_by_its_sizes():
    schedule = adaptive(PAPER)
    table, told = lower(schedule), document(schedule, 0.0)["tick_table"]
    assert told["ticks"] == table.num_ticks
    assert told["activation_permutations"] == len(table.activations.permutations)
    assert told["gradient_permutations"] == len(table.gradients.permutations)
    assert told["most_rounds"] == max(table.num_rounds_T)
    assert (told["b_stash_slots"], told["w_stash_slots"]) == (table.num_b_stash, table.num_w_stash)
    assert told["held_slots"] == table.num_held
    assert told["activation_slots"] == table.activations.num_slots
    assert told["gradient_slots"] == table.gradients.num_slots


@settings(max_examples=25, deadline=None)
@given(data=st.data(), random=st.randoms(use_true_random=False))
def test_it_says_what_the_library_measures(problems, random_schedule, data, random):
    schedule = random_schedule(data.draw(problems(memory_limit=None)), random)
    told, problem = document(schedule, 0.0, with_ops=True), schedule.problem
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert told["period"] == period(schedule)
    assert told["window_period"] == window_period(schedule)
    assert told["lockstep_period"] == lockstep_period(schedule)
    assert told["makespan"] == makespan(schedule)
    assert told["lower_bound"] == lower_bound(problem)
    assert told["gap"] == pytest.approx(period(schedule) / lower_bound(problem) - 1)
    assert told["bubble_share"] == bubble_share(schedule)
    assert list(told["peak_memory"]) == [f"{d}:{p}" for d, p in problem.topology.workers]
    stashes = [peak * problem.costs.f_stash for peak in told["peak_memory"].values()]
    assert stashes == pytest.approx(peak_memory(schedule).tolist())
    assert told["failed"] == sorted(f"{d}:{p}" for d, p in problem.failed)
    assert Costs(**{field: told["costs"][name] for name, field in COST_NAMES.items()}) == problem.costs
    assert (told["decoupled"], told["staggered"]) == (problem.decoupled, problem.staggered)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), random=st.randoms(use_true_random=False))
def test_the_schedule_can_be_made_again_of_its_ops(problems, random_schedule, data, random):
    schedule = random_schedule(data.draw(problems(memory_limit=None)), random)
    again = Schedule.from_ops(schedule.problem, "again", map(read_op, document(schedule, 0.0, with_ops=True)["ops"]))
    verify(again)
    assert list(again.ops()) == list(schedule.ops())


def read_op(op):
    assert list(op) == ["worker", "kind", "iteration", "pipeline", "microbatch", "stage", "start", "end"]
    kind, worker = Kind[op["kind"]], tuple(map(int, op["worker"].split(":")))
    assert (op["microbatch"] is None) == (kind == Kind.U)
    microbatch = -1 if op["microbatch"] is None else op["microbatch"]
    return TimedOp(Op(kind, op["iteration"], op["pipeline"], microbatch, op["stage"]), worker, op["start"], op["end"])


def test_memory_is_in_f_stashes():
    told = document(adaptive(replace(PAPER, costs=UNEQUAL, memory_limit=32.0)), 0.0)
    assert told["memory_limit"] == 8.0
    assert 1 < max(told["peak_memory"].values()) <= 8.0
    assert told["peak_memory"]["1:2"] == 0.0


def test_it_is_compared_with_both_baselines_at_its_costs_and_limit():
    problem = replace(PAPER, costs=UNEQUAL, memory_limit=32.0, decoupled=False, staggered=False)
    told = document(adaptive(problem), 0.0)
    sound = replace(problem, failed=frozenset())
    assert told["fault_free"]["one_f_one_b"] == period(one_f_one_b(sound))
    # Without failures, and with all that makes bubbles small, whatever the schedule itself does without.
    best = replace(sound, decoupled=True, staggered=True)
    assert told["fault_free"] == document(adaptive(best), 0.0)["fault_free"]
    assert told["fault_free"]["zero_bubble"] == pytest.approx(lower_bound(best), rel=0.15)
    for name, of_baseline in told["fault_free"].items():
        assert told[f"throughput_vs_{name}"] == of_baseline / told["period"] < 1


def test_a_baseline_has_a_document_as_well():
    told = document(one_f_one_b(replace(PAPER, failed=frozenset())), 0.0)
    assert (told["solver"], told["decoupled"], told["staggered"]) == ("one_f_one_b", False, False)
    assert told["throughput_vs_one_f_one_b"] == 1.0
    assert told["throughput_vs_zero_bubble"] < 1.0
