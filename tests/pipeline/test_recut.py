"""Other cuts and numbers of micro-batches while a worker is down: the state moves live, and no loss changes."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from swift.errors import SettingError
from swift.pipeline.reconfigure.executables import ExecutableCache
from swift.pipeline.reconfigure.recut import (
    Cuts,
    Recut,
    UnknownAssignment,
    check_recut,
    find_recut,
    recut_settings,
    recut_spec,
)
from swift.pipeline.reconfigure.transfer import move_state
from swift.schedules.plans.normalize import ChunkAssignment, Move
from swift.train.build import make_engine, make_plan_settings
from tests.pipeline.held_rows import rows_of

pytestmark = pytest.mark.usefixtures("x64")

FOUR = {"topology": (2, 2, 1), "pattern": (False, True, True, False), "cut": (2, 2)}
"""Two pipelines with two layers on each stage, two micro-batches each."""
WITHOUT_LAST = Recut(((4, 0), (2, 2)), (1, 3))
WITHOUT_FIRST = Recut(((1, 3), (0, 4)), (3, 1))
"""A worker that holds all layers, and runs one micro-batch of four."""


def settings_of(one, adapt="auto"):
    """Settings of the plans of a run whose survivors adapt."""
    return make_plan_settings(replace(one.experiment, adapt=adapt), one.spec)


def test_blocks_go_to_the_worker_that_is_left_and_back(rig):
    one = rig(**FOUR)
    state, failed = one.start(one.draw(0)), rig(**FOUR, failed=[(0, 1)])
    home, rerouted = one.spec, failed.spec
    alone = recut_spec(home, WITHOUT_LAST)
    alone = alone.at(rerouted.live)
    without, num_bytes = move_state(state, home, rerouted)
    assert num_bytes == 0, "re-routing moves nothing"
    moved, num_bytes = move_state(without, rerouted, alone)
    assert num_bytes > 0
    whole = {key: value for mine in rows_of(home, state) for key, value in mine.items()}
    found = rows_of(alone, moved)
    assert found[0] == whole, "the worker that is left holds all of the model"
    assert (
        alone.checkpoint_spec.model_index["attention"].tolist()
        == home.checkpoint_spec.model_index["attention"].tolist()
    )
    back, _ = move_state(moved, alone, home)
    assert rows_of(home, back) == rows_of(home, state)


def test_a_worker_has_as_much_memory_as_before(rig):
    """Eight stashes of two layers are four of four layers."""
    one = rig(**FOUR)
    settings = make_plan_settings(replace(one.experiment, memory_limit=8.0), one.spec)
    divided = recut_settings(settings, recut_spec(one.spec, WITHOUT_LAST), WITHOUT_LAST, 2)

    def in_bytes(settings):
        problem, sizes = settings.problem, settings.sizes
        return problem.memory_limit / problem.costs.f_stash * (sizes.stash_for_b + sizes.stash_for_b_and_w)

    assert in_bytes(divided) == pytest.approx(in_bytes(settings))
    assert divided.problem.stage_of_chunk == ((0, 0), (0, 1))
    assert divided.problem.microbatches == (1, 3)


@pytest.mark.parametrize(
    ("cuts", "microbatches", "wrong"),
    [
        (((4, 0),), (2, 2), r"Recut.cuts = \(\(4, 0\),\): must be a number for each of 2 stages, for each of 2"),
        (((4, 0), (2, 1)), (2, 2), r"Recut.cuts\[1\] = \(2, 1\): must sum to 4 layers, not 3"),
        (((4, 0), (0, 4)), (2, 2), r"Recut.cuts\[1\]\[0\] = 0: must be a whole number of at least 1"),
        (((4, 0), (2, 2)), (2, 3), r"Recut.microbatches = \(2, 3\): must be a number for each of 2 pipelines"),
        (((4, 0), (2, 2)), (0, 4), "Recut.microbatches = 0: must be a whole number of at least 1"),
    ],
)
def test_what_cannot_be_is_one_line(rig, cuts, microbatches, wrong):
    with pytest.raises(SettingError, match=wrong):
        check_recut(Recut(cuts, microbatches), rig(**FOUR).spec, frozenset({(0, 1)}))


@pytest.mark.parametrize(
    ("moves", "wrong"),
    [
        ([((0, 1), (0, 1))], "must name live workers, each once"),
        ([((0, 0), (0, 1)), ((0, 0), (0, 1))], "must name live workers, each once"),
        ([((0, 0), (1, 1))], "must leave every live worker a place of its own"),
        ([((0, 0), (0, 2))], "must leave every live worker a place of its own"),
        ([((1, 1), (0, 0)), ((0, 0), (0, 1)), ((1, 0), (1, 1))], None),
        ([((1, 1), (0, 0)), ((0, 0), (1, 0)), ((1, 0), (1, 1))], None),
    ],
)
def test_only_the_living_have_places_and_each_its_own(rig, moves, wrong):
    recut, spec = Recut(moves=tuple(Move(*pair) for pair in moves)), rig(**FOUR).spec
    if wrong is None:
        check_recut(recut, spec, frozenset({(0, 1)}))
        return
    with pytest.raises(SettingError, match=wrong):
        check_recut(recut, spec, frozenset({(0, 1)}))


def test_a_stage_that_all_have_left_is_told(rig):
    with pytest.raises(SettingError, match="must leave every stage a live worker"):
        check_recut(Recut(moves=(Move((1, 1), (0, 0)),)), rig(**FOUR).spec, frozenset({(0, 0), (0, 1)}))


def test_a_cut_that_others_found_stays_one_object_and_has_to_be_theirs(rig, tmp_path):
    """Programs are remembered by the cut that they are for; a plan that is read from a file twice is two objects."""
    one, failed = rig(**FOUR), frozenset({(0, 1)})

    def cuts():
        return Cuts(one.spec, settings_of(one), 2, ExecutableCache(tmp_path))

    found = cuts().find(failed)
    assert found is not None
    mine, held = cuts(), found.holders(one.spec.chunks)
    assert mine.agreed(failed, held) is mine.agreed(failed, held) is mine.find(failed)
    other = held._replace(moves=(Move((1, 1), (0, 1)),))
    with pytest.raises(
        UnknownAssignment, match=r"there would be .*, 1:1 replacing 0:1, and its own plan has stages of"
    ):
        mine.agreed(failed, other)
    spec = mine.spec(mine.find(failed))
    assert mine.spec(mine.find(failed)) is spec
    assert mine.agreed(failed, ChunkAssignment()) is None, "the run's own cuts"
    assert mine.spec(mine.find(failed)) is not spec, "what is not in use is forgotten"


def test_nobody_plans_a_cut_while_training_waits_for_it(rig, tmp_path, monkeypatch):
    one, failed = rig(**FOUR), frozenset({(0, 1)})
    held = WITHOUT_LAST.holders(one.spec.chunks)
    mine = Cuts(one.spec, settings_of(one), 2, ExecutableCache(tmp_path))
    monkeypatch.setattr("swift.pipeline.reconfigure.recut.find_recut", lambda *_: pytest.fail("it plans"))
    with pytest.raises(UnknownAssignment, match="the plan for it is missing among the programs of the run"):
        mine.agreed(failed, held)
    assert mine.agreed(failed, ChunkAssignment()) is None


def test_a_worker_has_the_same_devices_whatever_the_cut(rig, tmp_path):
    """Re-routed plans are alike wherever a stage lost a worker, so that workers have another order than where cut."""
    one = rig(**FOUR)
    cuts = Cuts(one.spec, settings_of(one), 2, ExecutableCache(tmp_path))
    orders = []
    for lost in one.spec.live.workers:
        failed = frozenset({lost})
        found = [cuts.configure(recut, failed) for recut in (None, cuts.find(failed))]
        devices = np.array(jax.devices()[:3])[:, None]
        meshes = [configuration.live_mesh(one.spec.live.topology, devices) for configuration in found]
        rerouted, anew = (dict(zip(live.workers, live.mesh.devices.flat, strict=True)) for live in meshes)
        assert rerouted == anew
        orders.append([live.workers for live in meshes])
    assert any(rerouted != anew for rerouted, anew in orders)


def run_through(one, num_steps, changes):
    """Runs pairs of iterations with changes before some, and holds all against the model that loses nobody.

    Args:
        one: the rig.
        num_steps: number of iterations.
        changes: failed workers and cut by the iterations done.

    Returns:
        The state, and by the iterations done the period after each change and the bytes that it moved.
    """
    drawn = one.draw(1, num_batches=num_steps)
    expected, params, _ = one.plain(drawn)
    found, told = [], {}
    with make_engine(one.experiment, frozenset(), "none") as engine:
        state = one.start(drawn)
        for start in range(0, num_steps, 2):
            if start in changes:
                failed, recut = changes[start]
                state, change = engine.reconfigure(state, frozenset(failed), recut)
                told[start] = engine.period_ratio, change.moved_bytes
            batches = drawn.batches[start : start + 2]
            result = engine.start(state, batches, engine.put(batches))()
            state = result.state
            found += result.metrics
    for metrics, iteration in zip(found, expected, strict=True):
        np.testing.assert_allclose(metrics["loss"], iteration.loss, rtol=1e-8)
        np.testing.assert_array_equal(metrics["popularity"], iteration.popularity)
    one.check_params(state, params, 1e-8)
    return state, told


@pytest.mark.slow
def test_sixty_steps_with_two_failures_two_moves_and_two_returns(rig):
    """After a failure its micro-batches are re-routed for some iterations; then the blocks move, and later back."""
    changes = {
        10: ({(0, 1)}, None),
        16: ({(0, 1)}, WITHOUT_LAST),
        26: (set(), None),
        34: ({(1, 0)}, None),
        40: ({(1, 0)}, WITHOUT_FIRST),
        50: (set(), None),
    }
    state, told = run_through(rig(**FOUR), 60, changes)
    ratios, moved = zip(*told.values(), strict=True)
    assert ratios[2] == ratios[5] == 1
    assert all(ratio > 1 for ratio in (*ratios[:2], *ratios[3:5]))
    assert [num_bytes > 0 for num_bytes in moved] == [False, True, True, False, True, True]
    assert jax.device_get(state.step).tolist() == [60] * 4


SIX = {"topology": (2, 3, 1), "pattern": (False, True) * 3, "cut": (2, 2, 2), "microbatches": 4}


def test_places_are_those_that_are_planned(rig):
    """A worker of the second pipeline takes a place in the first one, where two have failed; and roles move."""
    one = rig(**SIX)
    settings = settings_of(one)
    roles, anew = (find_recut(settings, one.spec, failed, 2) for failed in map(frozenset, ({(0, 0)}, LOST)))
    assert roles.moves == (Move((0, 1), (0, 0)),)
    assert roles == Recut(moves=roles.moves), "the cuts and the planner of the run"
    assert {place[0] for worker, place in anew.moves if worker[0] == 1} == {0, 1}
    assert sum(map(sum, anew.cuts)) == 12
    only = {way: find_recut(settings_of(one, way), one.spec, frozenset({(0, 0)}), 2) for way in ("reassign", "recut")}
    assert only["reassign"] == roles
    assert only["recut"].schedule is not None


LOST = frozenset({(0, 0), (0, 1)})


@pytest.mark.slow
def test_sixty_steps_in_which_workers_take_the_places_of_others(rig):
    """Roles move within a pipeline; then a worker goes to the other pipeline, which holds what two did; and back."""
    one = rig(**SIX)
    settings = settings_of(one)
    downs = [({(0, 0)}, 8), (LOST, 20), (set(), 32), ({(1, 0), (1, 2)}, 40), (set(), 52)]
    changes = {step: (failed, None) for failed, step in downs}
    recuts = {step + 6: find_recut(settings, one.spec, frozenset(failed), 2) for failed, step in downs if failed}
    changes |= {step: (changes[step - 6][0], recut) for step, recut in recuts.items()}
    _, told = run_through(one, 60, changes)
    assert all(told[step][1] for step in recuts)
    assert all(told[step][0] < told[step - 6][0] for step in recuts)
    places = [move for recut in recuts.values() for move in recut.moves]
    assert {worker[0] != place[0] for worker, place in places} == {False, True}


LEFT = SIX | {"topology": (3, 2, 1), "pattern": (False, True) * 2, "cut": (2, 2)}
IN_V = {"topology": (2, 3, 1), "pattern": (True, True), "planner": "v", "window": 1}


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "failed"), [(LEFT, {(0, 0), (1, 1)}), (IN_V, {(0, 0)})], ids=["left", "in a V"])
def test_in_a_pipeline_that_all_have_left_nothing_runs_and_roles_move_in_a_v(rig, fields, failed):
    one, failed = rig(**fields), frozenset(failed)
    recut = find_recut(settings_of(one, "reassign" if "planner" in fields else "auto"), one.spec, failed, 2)
    run_through(one, 6, {0: (failed, None), 2: (failed, recut), 4: (frozenset(), None)})
    assert recut.moves
    if "planner" not in fields:
        assert recut.cuts == ((2, 2), (0, 0), (2, 2))
        assert recut.microbatches[1] == 0
