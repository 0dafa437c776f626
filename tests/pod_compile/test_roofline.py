"""Predicted time: ticks as the plan has them, and everything that takes time told once."""

import numpy as np
import pytest

from swift.mesh.hlo_collectives import Collective, Loop
from swift.mesh.live import live_mesh
from swift.pipeline import scopes
from swift.pipeline.reconfigure.configuration import Configurator, PlanSettings
from swift.pod_compile.costs import EMBEDDING, HEAD, Interconnect, OpCounts, Work, predict, total_flops
from swift.pod_compile.pods import Pod
from swift.schedules.problem import Costs, Problem
from swift.topology import Topology
from swift.train.build import make_step_spec
from tests.pod_compile.conftest import experiment

PEAK = 197e12
TOPOLOGY, FAILED = Topology(3, 2, 2), frozenset({(1, 1)})


@pytest.fixture(scope="module")
def planned():
    """(plan, runs) of windows of 2 in which B takes twice as long as F."""
    settings = PlanSettings(Problem(TOPOLOGY, 4, costs=Costs(t_b=2, t_w=1), num_iterations=2))
    configuration = Configurator(settings).configure(FAILED)
    spec = make_step_spec(experiment(TOPOLOGY, num_microbatches=4), live_mesh(TOPOLOGY, "emulated"))
    spec = spec.at(spec.live.with_rows(configuration.rows))
    plan = configuration.plans[2]
    return plan, OpCounts(spec, plan.table, 2)


def works(**seconds):
    """Parts that take so many seconds of computing on a v5e."""
    names = (scopes.FORWARD, scopes.BACKWARD_INPUT, scopes.BACKWARD_WEIGHT, scopes.UPDATE, HEAD, EMBEDDING)
    return {name: Work(int(PEAK * seconds.get(name, 0)), 0) for name in names}


def links():
    return Interconnect(Pod.parse("v5e:4x4"), [(x, y) for y in range(4) for x in range(4)][:10])


def test_ticks_take_what_the_plan_says(planned):
    plan, runs = planned
    told = predict(runs, works(F=1, B=2, W=1), [], links(), "bfloat16")
    assert told["step_ms"] == told["compute_ms"] == pytest.approx(1e3 * plan.period)
    later = predict(runs, works(F=1, B=2, W=1, head=5), [], links(), "bfloat16")
    assert later["step_ms"] > told["step_ms"] + 4 * 2 * 1e3


def test_collectives_of_an_op_run_when_it_does(planned):
    plan, runs = planned
    pairs = tuple((2 * row, 2 * row + 1) for row in range(5))
    # Two in a loop in F: together as long as F itself.
    inside = Collective("all-to-all", 45 * 10**9, pairs, path=("F", "while"), loops=(Loop(("F", "while"), 2),))
    assert runs.trips_C(inside).tolist() == [2, 2]
    assert runs.of(inside).tolist() == (2 * (plan.table.opcode_TR == 1).sum(axis=0)).tolist()
    told = predict(runs, works(F=1, B=2, W=1), [inside], links(), "bfloat16")
    assert told["compute_ms"] == pytest.approx(1e3 * plan.period)
    assert told["tokens_ms"] > 0
    assert told["step_ms"] == pytest.approx(sum(value for name, value in told.items() if name != "step_ms"))


def test_every_micro_batch_runs_once_on_some_worker(planned):
    _, runs = planned
    for name in (scopes.FORWARD, scopes.BACKWARD_INPUT, scopes.BACKWARD_WEIGHT):
        assert runs.ops(name).sum() == 3 * 4 * 2 * 2  # pipelines, micro-batches, stages, iterations
    flops = total_flops(runs, {**works(), scopes.FORWARD: Work(7, 0)})
    assert flops == 7 * 3 * 4 * 2 * 2  # of an iteration, on 2 ranks


def test_rounds_of_messages_run_as_the_table_says(planned):
    plan, runs = planned
    moves = plan.table.activations
    for turn in range(moves.permutation_TQ.shape[1]):
        for index, pairs in enumerate(moves.permutations):
            path = ("while", "body", scopes.ACTIVATIONS, f"round_{turn}", "cond", f"branch_{index + 1}_fun", "ppermute")
            one = Collective("collective-permute", 8, pairs=pairs, path=path, loops=(Loop(("while",), None),))
            assert runs.part(one) == scopes.ACTIVATIONS
            assert set(runs.of(one)) == {int((moves.permutation_TQ[:, turn] == index).sum())}


def test_updates_run_once_an_iteration_and_ends_where_they_are_used(planned):
    _, runs = planned
    body = ("while", "body", "cond", "branch_1_fun", "U", "collect")
    of = lambda *more: runs.of(Collective("all-to-all", 8, path=(*body, *more), loops=(Loop(("while",), 4),)))  # noqa: E731
    assert of("expert").tolist() == [2] * 5
    assert runs.part(Collective("all-to-all", 8, path=(*body, "expert"))) == "collect/expert"
    stage_R = runs.spec.live.stage_R
    assert of("embedding", "cond", "branch_1_fun").tolist() == (2 * (stage_R == 0)).tolist()
    assert of("head", "cond", "branch_1_fun").tolist() == (2 * (stage_R == 1)).tolist()
    np.testing.assert_array_equal(runs.of(Collective("all-reduce", 8, path=("psum",))), np.ones(5))
