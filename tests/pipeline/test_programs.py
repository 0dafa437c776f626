"""Compiled programs: free of deadlocks, compiled once, as large as planned; and evaluation."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from swift.mesh.state_rows import source_rows, transfer_rows
from swift.pipeline.reconfigure.configuration import Configurator, PlanSettings, batch_of_rows
from swift.pipeline.state import StageWeights
from swift.pipeline.step.costs import split_stage, stage_costs, stash_bytes
from swift.pipeline.step.interpreter import empty_carry
from swift.pipeline.step.single_worker import put_batch, single_worker_step
from swift.pipeline.step.tick_arrays import table_arrays
from swift.pipeline.step.train_step import barrier_step, evaluation_step, window_step
from swift.schedules.lowering.lower import SlotBytes, allocated_bytes, live_bytes
from swift.schedules.lowering.tick_table import common_shape
from swift.schedules.problem import Problem
from swift.schedules.schedule import peak_memory
from swift.topology import Topology
from swift.train.build import make_step_spec

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize(
    "case",
    [
        {"topology": (3, 2, 2), "failed": [(0, 1), (2, 1)], "pattern": (False, True)},
        pytest.param({"topology": (2, 2, 2)}, marks=pytest.mark.slow),
        pytest.param(
            {"topology": (2, 2, 1), "pattern": (False, True, True, False), "cut": ((3, 1), (1, 3))},
            marks=pytest.mark.long,
        ),
    ],
    ids=str,
)
def test_no_collective_is_in_a_branch_that_not_all_of_its_devices_take(rig, ppermutes_in_varying_branches, case):
    one = rig(**case, clip_norm=1.0)
    window, single = one.table, one.configuration.plans[1].table
    steps = (
        (window_step(one.spec, window, 2), window),
        (barrier_step(one.spec, single), single),
        (evaluation_step(one.spec, single.forward_only()), single.forward_only()),
    )
    state, batches = one.spec.abstract(with_slots=True), one.draw(0).batches
    for step, table in steps:
        rows = batch_of_rows(batches, table, one.configuration.pipeline_D, one.num_ranks)
        jaxpr = jax.make_jaxpr(step)(state, *table_arrays(table), rows)
        assert "ppermute" in primitives(jaxpr)
        for axis in ("worker", "expert"):
            assert ppermutes_in_varying_branches(jaxpr, axis) == []


def primitives(jaxpr):
    """The names of all that a program does; to print it would take longer than to trace it."""
    inner = (primitives(one) for equation in jaxpr.eqns for one in jaxprs_in_params(equation.params))
    return {equation.primitive.name for equation in jaxpr.eqns}.union(*inner)


def num_equations(jaxpr):
    """Equations of a program, those of loops and branches included."""
    return sum(1 + sum(map(num_equations, jaxprs_in_params(equation.params))) for equation in jaxpr.eqns)


@pytest.mark.parametrize("cut", [None, (1, 2)], ids=str)
def test_a_program_does_not_grow_with_the_number_of_blocks(rig, cut):
    """Blocks of both kinds; stages alike, or one of them longer. A single worker has one stage, whatever the cut."""
    sizes = []
    for times in (2, 5):
        longer = cut and tuple(times * size for size in cut)
        one = rig(pattern=(False, True) * times + (True,) * times * bool(cut), cut=longer)
        table, batches = one.configuration.plans[1].table, one.draw(0, num_batches=1).batches
        arrays = *table_arrays(table), batch_of_rows(batches, table, one.configuration.pipeline_D, 1)
        pipeline = jax.make_jaxpr(barrier_step(one.spec, table))(one.spec.abstract(with_slots=True), *arrays)
        sizes.append([num_equations(pipeline.jaxpr)])
        if cut is None:
            spec = make_step_spec(replace(one.experiment, topology=Topology(), window=1))
            alone = spec.abstract(with_slots=True), put_batch(batches[0], spec.live)
            sizes[-1].append(num_equations(jax.make_jaxpr(single_worker_step(spec))(*alone).jaxpr))
    assert sizes[0] == sizes[1]


@pytest.mark.slow
def test_tables_of_one_shape_share_a_compiled_program(rig):
    """Two planners' schedules of the same problem."""
    one, other = (rig(microbatches=3, planner=planner) for planner in ("gpipe", "zero_bubble"))
    assert one.spec.live == other.spec.live
    assert one.configuration.pipeline_D == other.configuration.pipeline_D
    shape = common_shape([one.table.shape, other.table.shape])
    tables = [each.table.padded(shape) for each in (one, other)]
    assert (tables[0].opcode_TR != tables[1].opcode_TR).any()
    step = window_step(one.spec, tables[0], 2, keep_gradients=True)
    for table in tables:
        one.check(one.draw(0), step, table)
    assert step._cache_size() == 1


@pytest.mark.parametrize(
    ("planner", "failed"),
    [
        ("lockstep", ((0, 1), (2, 1))),
        pytest.param("lockstep", (), marks=pytest.mark.slow),
        pytest.param("adaptive", (), marks=pytest.mark.slow),
        pytest.param("adaptive", ((0, 1), (2, 1)), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_slots_take_as_many_bytes_as_the_planner_thinks(rig, planner, failed):
    one = rig(topology=(3, 3, 1), failed=failed, planner=planner, microbatches=5, pattern=(False, True))
    spec, table_K = one.spec, one.case.window
    costs = replace(stage_costs(spec, num_sequences=2), inbox=0)
    settings = PlanSettings(Problem(one.experiment.topology, 5, costs=costs, num_iterations=table_K), planner)
    configuration = Configurator(settings).configure(one.case.failed)
    schedule, table = configuration.plans[table_K].schedule, configuration.plans[table_K].table
    parts, (_, _, message) = split_stage(spec, num_sequences=2)
    stashes = SlotBytes(*map(stash_bytes, parts.stash_shapes))

    peaks = peak_memory(schedule).reshape(3, 3) * (stashes.stash_for_b + stashes.stash_for_b_and_w)
    planned_R = [peaks[worker] for worker in table.workers]
    np.testing.assert_allclose(live_bytes(table, stashes).between_ticks_R, planned_R, rtol=0.05)

    slots = stashes._replace(activation=stash_bytes((message,)), gradient=stash_bytes((message,)))
    of_rank = {n: leaf[0, :, 0] for n, leaf in jax.device_get(one.start(one.draw(0))).slots.items()}
    weights = StageWeights.of(spec.gpt, spec.cut, of_rank, 0)
    carry = jax.eval_shape(
        lambda: empty_carry(spec, table, parts, weights, jnp.zeros(message.shape, message.dtype), table_K)
    )
    buffers = *carry.stashes, carry.activations, carry.gradients
    assert sum(stash_bytes(tuple(jax.tree.leaves(buffer))) for buffer in buffers) == allocated_bytes(table, slots)


@pytest.mark.parametrize(
    "case",
    [
        {"topology": (2, 2, 1), "failed": [(0, 1)], "weighs": True},
        pytest.param({"topology": (1, 3, 2), "planner": "one_f_one_b"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_evaluation_is_that_of_the_plain_model(rig, case):
    one = rig(**case)
    table = one.configuration.plans[1].table
    forward, step = table.forward_only(), evaluation_step(one.spec, table.forward_only())
    for seed in range(3):
        drawn = one.draw(seed, num_batches=1)
        sums = jax.device_get(step(one.start(drawn), *one.put_table(forward), one.put_batches(drawn.batches, forward)))
        ((expected,), *_) = one.plain(drawn)
        np.testing.assert_array_equal(sums.tokens, drawn.batches[0].valid.sum())
        weight = sums.tokens if sums.weight is None else sums.weight
        np.testing.assert_allclose(sums.loss / weight, np.full(len(sums.loss), expected.loss), rtol=1e-10)
        aux = sums.aux / one.spec.num_microbatches
        np.testing.assert_allclose(aux, np.full(len(aux), expected.aux), rtol=1e-10)


def test_a_state_goes_through_the_form_of_a_checkpoint_to_other_workers(rig):
    one, other = rig(failed=[(0, 1)]), rig(failed=[(1, 0)])
    live, stages, new = one.spec.live, one.spec.stages_mesh(), other.spec.live
    assert [row.stage for row in stages.rows] == [0, 1]
    state = one.start(one.draw(0))
    before = jax.device_get(state)
    saved = transfer_rows(state, live, stages, one.spec.specs, source_rows(live, stages))
    after = jax.device_get(transfer_rows(saved, stages, new, one.spec.specs, source_rows(stages, new)))
    for index, row in enumerate(new.rows):
        old_index = live.first_rows[row.stage]
        for ours, theirs in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
            assert ours[index].tobytes() == theirs[old_index].tobytes()
    assert (after.master["attention"][new.first_rows[0]] != after.master["attention"][new.first_rows[1]]).any()
