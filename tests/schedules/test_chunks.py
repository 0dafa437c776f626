"""Chunks with costs of their own, held by any stage, and pipelines that are cut differently: every part of planning."""

import json
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from swift.errors import SettingError
from swift.schedules.bounds import lower_bound, tight_bound
from swift.schedules.milp.chunks import prove_chunks
from swift.schedules.milp.proof import milp_proof
from swift.schedules.planners.adaptive import adaptive
from swift.schedules.planners.lockstep import lockstep
from swift.schedules.plans.normalize import normalize, plan_document
from swift.schedules.plans.store import read_plan
from swift.schedules.problem import Chunk, Costs, Kind, Problem, common_chunks
from swift.schedules.rules import violations
from swift.schedules.schedule import peak_memory, period, round_of
from swift.topology import Topology

WHOLE = st.sampled_from([1.0, 2.0])
WHOLE_OR_NONE = st.sampled_from([0.0, 1.0])
WHOLE_COSTS = st.builds(
    Costs, WHOLE, WHOLE, WHOLE, WHOLE_OR_NONE, WHOLE_OR_NONE, st.just(1.0), st.sampled_from([0.5, 1.0])
)
WHOLE_CHUNKS = st.builds(Chunk, st.just(0), WHOLE, WHOLE, WHOLE, WHOLE_OR_NONE)
V = Problem(Topology(2, 2), 3, costs=Costs(t_comm=0.5), stage_of_chunk=((0, 1, 1, 0),) * 2)
UNEVEN = Problem(
    Topology(2, 2), (4, 2), chunks=tuple(Chunk.of_size(n, n) for n in (2, 1, 3)), stage_of_chunk=((0, 0, 1), (0, 1, 1))
)
no_time_limit = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(autouse=True, scope="module")
def short_search():
    """A search of a few policies: what is held here is that plans are valid."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["swift.schedules.planners.adaptive"], "_MAX_OPS", 2_000)
        patch.setattr(sys.modules["swift.schedules.planners.lockstep"], "_MAX_OPS", 1)
        yield


@no_time_limit
@given(data=st.data())
def test_plans_are_valid_and_never_below_the_bound(chunk_problems, data):
    problem = data.draw(chunk_problems())
    is_small = problem.num_ops * problem.num_iterations <= 200
    for plan in (adaptive, lockstep) if is_small else (adaptive,):
        schedule = plan(problem)
        assert violations(schedule) == []
        assert lower_bound(problem) <= tight_bound(problem) * (1 + 1e-9)
        assert period(schedule) >= tight_bound(problem) * (1 - 1e-9)
        if problem.memory_limit is not None:
            assert peak_memory(schedule).max() <= problem.memory_limit * (1 + 1e-9)


@no_time_limit
@given(data=st.data())
def test_any_order_that_can_be_kept_is_valid_in_its_memory(chunk_problems, random_schedule, data):
    problem = replace(data.draw(chunk_problems()), memory_limit=None)
    schedule = random_schedule(problem, data.draw(st.randoms(use_true_random=False)))
    most = float(peak_memory(schedule).max())
    assert violations(schedule) == []
    assume(most >= problem.microbatch_peak)
    assert violations(replace(schedule, problem=replace(problem, memory_limit=most))) == []
    if most * 0.999 >= problem.microbatch_peak:
        short = replace(schedule, problem=replace(problem, memory_limit=most * 0.999))
        assert any("exceeds the memory limit" in line for line in violations(short))


@no_time_limit
@given(data=st.data())
def test_a_plan_is_read_back_to_the_bit(chunk_problems, random_schedule, data):
    drawn = data.draw(chunk_problems(num_iterations=3))
    problem = normalize(replace(drawn, memory_limit=None)).problem
    schedule = random_schedule(problem, data.draw(st.randoms(use_true_random=False)))
    again = read_plan(json.loads(json.dumps(plan_document(schedule))))
    assert again.problem == problem
    for name in ("worker", "kind", "pipeline", "microbatch", "chunk"):
        np.testing.assert_array_equal(getattr(again, name), getattr(schedule, name))
    np.testing.assert_allclose(again.start, schedule.start, rtol=0, atol=1e-9)
    np.testing.assert_array_equal(round_of(again).executor_DMP, round_of(schedule).executor_DMP)


def moved(schedule, row, **columns):
    """The schedule with one row changed, in order again."""
    rows = {name: getattr(schedule, name).copy() for name in ("worker", "kind", "iteration", "pipeline", "microbatch")}
    rows |= {name: getattr(schedule, name).copy() for name in ("chunk", "start", "end")}
    for name, value in columns.items():
        rows[name][row] = value
    order = np.lexsort((rows["end"], rows["start"], rows["iteration"], rows["worker"]))
    return replace(schedule, **{name: column[order] for name, column in rows.items()})


def row(schedule, kind, chunk, microbatch=0, pipeline=0):
    wanted = {"kind": kind, "chunk": chunk, "pipeline": pipeline, "microbatch": microbatch, "iteration": 0}
    (found,) = np.flatnonzero(np.all([getattr(schedule, name) == value for name, value in wanted.items()], axis=0))
    return int(found)


def shifted(schedule, at, start):
    return moved(schedule, at, start=start, end=start + schedule.end[at] - schedule.start[at])


def found(schedule, sentence):
    return any(sentence in line for line in violations(schedule))


def test_the_rules_of_chunks_are_told():
    plan = adaptive(V)
    # From chunk 1 to chunk 2 on one worker nothing is sent; from chunk 0 to chunk 1 a message takes its time.
    for kind, chunk, lag in ((Kind.F, 1, 0.5), (Kind.F, 2, 0.0), (Kind.B, 2, 0.5), (Kind.B, 1, 0.0)):
        reader, sender = row(plan, kind, chunk), row(plan, kind, chunk - 1 if kind == Kind.F else chunk + 1)
        arrives = plan.end[sender] + lag
        op = f"{kind.name} of micro-batch 0:0 at chunk {chunk}, iteration 0"
        early, late = (shifted(plan, reader, start) for start in (arrives - 0.01, arrives))
        assert found(early, f"{op} starts at {arrives - 0.01:.9g}, before the output of {kind.name}")
        assert not found(late, f"{op} starts at {arrives:.9g}, before the output of {kind.name}")
    at = row(plan, Kind.F, 0)
    assert found(moved(plan, at, worker=1), "not its own")
    assert found(moved(plan, at, end=plan.end[at] + 0.1), "instead of 1")
    update = row(plan, Kind.U, 3, -1)
    assert found(shifted(plan, update, plan.start[update] - 1), "before the last W of its chunk")
    assert found(shifted(plan, update, plan.start[update] + 1), "that of a peer at")
    assert found(moved(plan, update, chunk=1), "runs on worker 0:0, not its own")
    first_of_next = int(np.flatnonzero((plan.worker == 0) & (plan.iteration == 1))[0])
    assert found(shifted(plan, first_of_next, plan.start[update] - 5), "begins iteration 1 at")


def test_a_micro_batch_that_a_pipeline_does_not_have_is_told():
    plan = adaptive(UNEVEN)
    assert violations(plan) == []
    assert found(moved(plan, row(plan, Kind.F, 0, 1, 1), microbatch=2), "is not an op of the problem")
    assert (np.bincount(plan.pipeline[plan.kind == Kind.F]) == [4 * 3 * 3, 2 * 3 * 3]).all()


def test_times_and_stashes_are_those_of_the_chunk():
    plan = adaptive(UNEVEN)
    lengths = (plan.end - plan.start)[plan.kind != Kind.U]
    np.testing.assert_allclose(lengths, np.array([2.0, 1.0, 3.0])[plan.chunk[plan.kind != Kind.U]])
    alone = replace(UNEVEN, topology=Topology(1, 2), num_microbatches=1, stage_of_chunk=((0, 0, 1),), num_iterations=1)
    assert peak_memory(adaptive(alone)).tolist() == [3.0, 3.0]
    assert alone.microbatch_peak == 3.0
    assert UNEVEN.runs_of((0, 0)) == ((0, 3),)
    assert UNEVEN.runs_of((1, 1)) == ((2, 6),)


def test_cuts_are_refined():
    assert common_chunks([(3, 3), (2, 4)]) == ((2, 1, 3), ((0, 0, 1), (0, 1, 1)))
    assert common_chunks([(2, 0, 2), (1, 1, 2)]) == ((1, 1, 2), ((0, 0, 2), (0, 1, 2)))


def test_a_pipeline_goes_on_with_one_stage_less():
    """Worker 0:1 is down, and pipeline 0 has three stages for the same 12 blocks: nothing is re-routed."""
    sizes, holders = common_chunks([(4, 0, 4, 4), (3, 3, 3, 3)])
    chunks = tuple(Chunk.of_size(size / 3, size) for size in sizes)
    problem = Problem(Topology(2, 4), (6, 8), frozenset({(0, 1)}), chunks=chunks, stage_of_chunk=holders)
    plan = adaptive(problem)
    assert violations(plan) == []
    ran = plan.kind != Kind.U
    np.testing.assert_array_equal(plan.worker[ran] // 4, plan.pipeline[ran])
    rerouted = adaptive(Problem(Topology(2, 4), 7, frozenset({(0, 1)})))
    assert period(plan) < 0.75 * period(rerouted)


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_the_exact_planner_of_chunks_agrees_with_the_other_one(problems, data):
    """Two models without a common line: of counts, and of single ops on workers."""
    num_pipelines = data.draw(st.integers(1, 2))
    sizes = {"num_microbatches": data.draw(st.integers(1, 3 - num_pipelines)), "costs": data.draw(WHOLE_COSTS)}
    problem = data.draw(problems(st.just(num_pipelines), st.integers(1, 2), 1, **sizes))
    proof = milp_proof(problem)
    barrier = problem.if_drained()
    schedule, bound = prove_chunks(barrier, adaptive(barrier), 0.0, time.monotonic() + 2)
    assert violations(schedule) == []
    assert bound <= proof.bound * (1 + 1e-9) <= period(schedule) * (1 + 1e-6)
    assume(period(schedule) <= bound * (1 + 1e-9))
    assert bound == pytest.approx(proof.bound)


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_no_plan_is_better_than_the_proven_optimum(chunk_problems, random_schedule, data):
    some = {"num_microbatches": data.draw(st.integers(1, 2)), "num_pipelines": st.integers(1, 2)}
    problem = data.draw(chunk_problems(num_stages=st.integers(1, 2), costs=WHOLE_COSTS, chunks=WHOLE_CHUNKS, **some))
    assume(problem.num_ops <= 24)
    proof = milp_proof(problem, time_limit_s=2)
    assert violations(proof.schedule) == []
    assert proof.bound <= period(proof.schedule) * (1 + 1e-9) <= period(adaptive(problem)) * (1 + 1e-6)
    random = data.draw(st.randoms(use_true_random=False))
    for _ in range(20):
        other = random_schedule(problem, random)
        if violations(other) == []:
            assert period(other) >= proof.bound * (1 - 1e-9)


def test_a_single_iteration_updates_a_chunk_as_soon_as_its_gradients_are_there():
    """The first stage's U fits before its last W, so that no barrier may stand between them."""
    chunks = (Chunk(u=0.0), Chunk(u=0.0), Chunk(), Chunk(w=2.0, u=0.0))
    costs = Costs(t_u=1.0)
    problem = Problem(Topology(1, 2), 2, costs=costs, chunks=chunks, stage_of_chunk=((0, 1, 0, 1),), num_iterations=1)
    proof = milp_proof(problem)
    assert violations(proof.schedule) == []
    assert (proof.bound, period(proof.schedule)) == (15.0, 15.0)


def test_a_single_iteration_ends_with_the_longest_update():
    problem = Problem(Topology(1, 2), 1, costs=Costs(t_u=10.0), chunks=(Chunk(u=0.0), Chunk()), num_iterations=1)
    proof = milp_proof(problem)
    assert violations(proof.schedule) == []
    # F and F, B and W of the last stage, and its U, beside which the first stage has its B and W.
    assert (proof.bound, period(proof.schedule)) == (14.0, 14.0)


WRONG = [
    ({"num_microbatches": (1, 2, 3)}, "must be one number for each of the 2 pipelines"),
    ({"num_microbatches": (0, 0)}, "must be at least one micro-batch"),
    ({"num_microbatches": (1, -1)}, "must be whole numbers of at least 0"),
    ({"chunks": (Chunk(), Chunk(), Chunk.of_size(2.0))}, "must be 2, as many as the stages hold"),
    ({"stage_of_chunk": ((0, 1),)}, "must be one for each of the 2 pipelines"),
    ({"stage_of_chunk": ((0, 1, 1), (0, 1))}, "must name a stage for each chunk"),
    ({"stage_of_chunk": ((0, 2), (0, 1))}, "must be stages: whole numbers from 0 to 1"),
    ({"stage_of_chunk": ((0, 1), (1, 0)), "failed": frozenset({(0, 0), (1, 1)})}, "chunk 0 has no live worker"),
    ({"stage_of_chunk": ((0, 0), (0, 1)), "memory_limit": 1.5}, "must be at least 2"),
]


@pytest.mark.parametrize(("fields", "allowed"), WRONG)
def test_wrong_chunks_are_told(fields, allowed):
    with pytest.raises(SettingError, match=allowed):
        Problem(Topology(2, 2), **{"num_microbatches": 1} | fields)


def test_what_says_nothing_new_is_left_out():
    plain = Problem(Topology(2, 3), 4)
    said = Problem(Topology(2, 3), (4, 4), chunks=(Chunk(),) * 3, stage_of_chunk=((0, 1, 2),) * 2)
    assert said == plain
    assert said.is_plain
    assert not {"chunks", "stage_of_chunk", "failed"} & set(plan_document(adaptive(plain))["problem"])
