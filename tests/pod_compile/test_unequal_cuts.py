"""Programs for pods of pipelines that are cut differently, or twice: told by chunk, run as the table says."""

from dataclasses import replace

import numpy as np
import pytest

from swift.config.cuts import planning_problem
from swift.mesh.hlo_collectives import Collective, Loop
from swift.mesh.live import live_mesh
from swift.pipeline import scopes
from swift.pipeline.reconfigure.configuration import Configurator, PlanSettings
from swift.pod_compile.compile import FITS, check_pod, compile_one, configurations
from swift.pod_compile.costs import EMBEDDING, HEAD, Interconnect, OpCounts, Work, op_costs, predict, total_flops
from swift.pod_compile.pods import Pod
from swift.schedules.problem import Chunk, Costs
from swift.topology import Topology
from swift.train.build import make_step_spec
from swift.train.emulated import FailedSet
from tests.pod_compile.conftest import NOBODY, experiment

PEAK = 197e12
APART = ((3, 1), (1, 3))
OPS = scopes.FORWARD, scopes.BACKWARD_INPUT, scopes.BACKWARD_WEIGHT


def runs_of(cut, chunks=(), window=2, **settings):
    """(plan, runs) of two pipelines of two stages of 2 ranks, 3 micro-batches each, layers dense and with experts."""
    one = experiment(Topology(2, 2, 2), num_microbatches=3, window=window, cut=cut, **settings)
    problem = planning_problem(one, Costs(t_b=2, t_w=1), chunks)
    configuration = Configurator(PlanSettings(problem)).configure(frozenset())
    spec = make_step_spec(one, live_mesh(one.topology, "emulated"))
    spec = spec.at(spec.live.with_rows(configuration.rows))
    plan = configuration.plans[window]
    return plan, OpCounts(spec, plan.table, window)


@pytest.fixture(scope="module")
def apart():
    """Three chunks, of a layer, two layers and a layer."""
    return runs_of(APART, tuple(map(Chunk.of_size, (1, 2, 1))))


def test_what_layers_cost_does_not_depend_on_the_cut(apart):
    _, alike = runs_of(None)
    found = []
    for runs in (apart[1], alike):
        work = op_costs(runs.spec, 2)
        work = {**work, scopes.UPDATE: Work(0, 0)}
        found.append((total_flops(runs, work), *[sum(runs.ops(name).sum(axis=0)) for name in OPS]))
        assert work[HEAD].num_flops > work[EMBEDDING].num_flops > 0
    (apart_flops, *of_chunks), (alike_flops, *of_stages) = found
    assert apart_flops == alike_flops > 0
    assert (of_chunks, of_stages) == ([6 * 2 * 3] * 3, [6 * 2 * 2] * 3)


def test_a_tick_takes_as_long_as_its_longest_chunk(apart):
    plan, runs = apart
    sizes = {f"{name}/{chunk}": size for chunk, size in enumerate((1, 2, 1)) for name in OPS}
    times = dict(zip(OPS, (1, 2, 1), strict=True))
    work = {name: Work(int(PEAK * size * times[name.split("/")[0]]), 0) for name, size in sizes.items()}
    work |= dict.fromkeys((scopes.UPDATE, HEAD, EMBEDDING), Work(0, 0))
    links = Interconnect(Pod.parse("v5e:4x4"), [(x, y) for y in range(4) for x in range(4)][:8])
    told = predict(runs, work, [], links, "bfloat16")
    assert told["step_ms"] == pytest.approx(1e3 * plan.period)


def test_an_op_waits_for_the_collectives_of_its_own_chunk(apart):
    """Tokens travel in the two later chunks, those of the head in the last one alone, each for a second."""
    _, runs = apart
    nothing = dict.fromkeys((f"{name}/{chunk}" for name in OPS for chunk in range(3)), Work(0, 0))
    nothing |= dict.fromkeys((scopes.UPDATE, HEAD, EMBEDDING), Work(0, 0))
    links = Interconnect(Pod.parse("v5e:4x4"), [(x, y) for y in range(4) for x in range(4)][:8])
    pairs = tuple((2 * row, 2 * row + 1) for row in range(4))
    in_blocks, in_head = ("F", "while", scopes.BLOCKS), ("F", scopes.HEAD)
    found = [
        Collective("collective-permute", 45 * 10**9, pairs=pairs, path=in_blocks, loops=(Loop(in_blocks, 2),)),
        Collective("collective-permute", 45 * 10**9, pairs=pairs, path=in_head),
    ]
    assert [runs.trips_C(one).tolist() for one in found] == [[0, 1, 1], [0, 0, 1]]
    told = predict(runs, nothing, found, links, "bfloat16")
    table = runs.table
    seconds_TR = np.where(table.opcode_TR == 1, np.array([0, 1, 2])[table.chunk_TR], 0)
    assert seconds_TR.max() == 2
    assert told["tokens_ms"] == pytest.approx(1e3 / 2 * seconds_TR.max(axis=1).sum(), rel=1e-5)


def test_collectives_run_for_the_blocks_of_the_chunks_that_a_row_runs(apart):
    """The layers with experts are the first of the middle chunk and the last chunk's."""
    plan, runs = apart
    loop = Loop(("F", "while", scopes.BLOCKS), 2)
    tokens = Collective("all-to-all", 8, path=("F", "while", scopes.BLOCKS), loops=(loop,))
    table, chunk_TR = plan.table.opcode_TR, plan.table.chunk_TR
    wanted = ((table == 1) & (chunk_TR > 0)).sum(axis=0)
    assert runs.of(tokens).tolist() == wanted.tolist()
    assert wanted.sum() == 6 * 2 * 2


def test_without_a_loop_over_blocks_the_chunks_with_experts_run_collectives():
    """Stage 0 holds the first layer, which is dense, and the last; stage 1 the second and the third, which is dense."""
    _, runs = runs_of(None, (Chunk(),) * 4, planner="v")
    assert runs.spec.chunks.stage_DC == ((0, 1, 1, 0),) * 2
    tokens = Collective("all-to-all", 8, path=("F", "while", "branch_1_fun"), loops=(Loop(("while",), None),))
    assert runs.of(tokens).tolist() == [3 * 2] * 4, "half of the ops that a row runs"
    assert runs.of(Collective("all-to-all", 8, path=("U", "collect", "expert"))).tolist() == [2 * 2] * 4


def test_updates_run_once_for_each_chunk_or_once_for_each_round(apart):
    """Rows have the chunks 0 and 1; 2; 0; 1 and 2. The sum of the middle chunk is in the second round."""
    _, runs = apart
    of = lambda *path: runs.of(Collective("all-to-all", 8, path=("while", "branch_1_fun", *path))).tolist()  # noqa: E731
    assert of("U", "collect", "expert") == [4, 2, 2, 4]
    assert of("U", "collect", "embedding", "branch_1_fun") == [2, 0, 2, 0]
    assert of("U", "collect", "head", "branch_1_fun") == [0, 2, 0, 2]
    assert of("U", "peers", "expert", "round_0", "branch_1_fun") == [2, 2, 2, 2]
    assert of("U", "peers", "expert", "round_1", "branch_1_fun") == [2, 0, 0, 2]
    assert of("round_1", "U", "collect", "expert") == [2, 2, 2, 2]
    assert of("round_1", "U", "peers", "head", "branch_1_fun") == [0, 0, 0, 0]
    assert runs.num_updates == 6
    np.testing.assert_array_equal(runs.end_rows, [[True, False, True, False], [False, True, False, True]])


def test_such_a_run_and_its_neighbours_are_accepted():
    one = experiment(Topology(2, 2, 2), cut=APART)
    check_pod(one, Pod.parse("cpu:8"))
    near = configurations(one, frozenset({(0, 0)}), near=True)
    down = sorted(sorted(other.workers) for other in near)
    assert down == [[], [(0, 0)], [(0, 0), (0, 1)]], "the others leave a chunk without a worker"


@pytest.mark.slow
@pytest.mark.parametrize("window", [2, 1])
def test_the_program_of_pipelines_that_are_cut_differently(window):
    one = experiment(Topology(2, 2, 2), num_microbatches=2, window=window, cut=APART, microbatches=(1, 3))
    report = compile_one(one, Pod.parse("cpu:8"), NOBODY)
    assert (report["result"], report["program"]) == (FITS, "window" if window == 2 else "single")
    assert report["tokens"]["compiled_bytes"] == report["tokens"]["formula_bytes"] > 0
    compiled, formula = report["exchange"]["compiled_bytes"], report["exchange"]["formula_bytes"]
    assert compiled == formula if window == 2 else compiled > formula > 0


@pytest.mark.slow
@pytest.mark.parametrize(("cut", "down"), [((1, 1, 1, 1), []), ((1, 2, 1, 2), [(0, 0)])])
def test_the_program_of_two_runs_a_worker(cut, down):
    one = experiment(Topology(2, 2, 2), num_microbatches=2, window=2, planner="v")
    one = replace(one, cut=cut, model=replace(one.model, num_layers=sum(cut)))
    report = compile_one(one, Pod.parse("cpu:8"), FailedSet(frozenset(down), frozenset()))
    assert report["result"] == FITS
    for name in ("tokens", "exchange"):
        assert report[name]["compiled_bytes"] == report[name]["formula_bytes"] > 0
