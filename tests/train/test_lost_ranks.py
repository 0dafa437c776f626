"""A run of one pipeline that loses expert ranks and continues with the others, in the same process.

What it then has is held against the states of a run that loses none.
"""

import itertools
import shutil
import threading
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from swift.checkpoint import peer_snapshots
from swift.checkpoint.config import CheckpointConfig
from swift.checkpoint.manifest import read_manifest
from swift.checkpoint.units import by_name
from swift.config.experiment import Experiment
from swift.errors import RunError
from swift.experts.config import ExpertConfig, SlotCapacity
from swift.experts.optimizer import OptimizerConfig
from swift.experts.placement.policy import Static
from swift.mesh.live import storage_mesh
from swift.mesh.state_rows import host_stages
from swift.models.config import ModelConfig
from swift.runlog.reading import read_run
from swift.topology import Topology
from swift.train import emulated
from swift.train.build import make_step_spec
from swift.train.checkpointer import Checkpointer
from swift.train.saved_state import split_of
from tests.train.runs import run

pytestmark = pytest.mark.usefixtures("double_precision")
RANKS, CLASSES, LAST = 8, 6, 10
ONE = ("step 6: fail 0:0 rank 3",)


@pytest.fixture(scope="module")
def experiment(corpus):
    """Eight ranks, a layer of six experts that drops nothing; experts' numbers do not divide evenly by any rank."""
    return Experiment(
        model=ModelConfig(num_layers=1, model_dim=12, num_heads=2, ffn_dim=9, sequence_length=8, moe_pattern=(True,)),
        experts=ExpertConfig(CLASSES, slots_per_rank=2, capacity=SlotCapacity(None), aux_loss_coefficient=1e-2),
        topology=Topology(1, 1, RANKS),
        data=corpus,
        optimizer=OptimizerConfig(warmup_steps=4, peak_learning_rate=1e-2),
        compute_dtype="float64",
        num_steps=LAST,
        num_microbatches=2,
        sequences_per_microbatch=8,
        eval_every=0,
        checkpoint=CheckpointConfig(every=0),
    )


def losing(experiment, failures, snapshot_every=0, **checkpoint):
    config = CheckpointConfig(**{"every": 0, "snapshot_every": snapshot_every} | checkpoint)
    return replace(experiment, failures=failures, checkpoint=config)


def run_and_keep_states(experiment, run_dir):
    """The run's record, and its states by iteration, arrays by name."""
    states, snapshot = {}, Checkpointer.snapshot

    def keep(saver, spec, state, done):
        specs = replace(spec.specs, slots={})
        # The first one: after a loss there is another, of the ranks that are left.
        states.setdefault(done, by_name(host_stages(replace(state, slots={}), spec.live, specs)))
        snapshot(saver, spec, state, done)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpointer, "snapshot", keep)
        return run(experiment, run_dir), states


@pytest.fixture(scope="module")
def whole(experiment, tmp_path_factory):
    """The run without failures, with a checkpoint of its middle; and its states."""
    setup = replace(experiment, checkpoint=CheckpointConfig(every=5))
    return run_and_keep_states(setup, tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture
def recovered(monkeypatch):
    """The recovered state of every loss, before it was resharded for the ranks that are left."""
    found, recover = [], emulated.recover_ranks

    def spy(state, slots, split, lost, **others):
        for name in split.ranked_names:
            for place in np.ndindex(split.num_stages, split.num_ranks):
                slices = by_name(state)[name][place[0], :, place[1]]
                assert np.isnan(slices).all() if place in lost else np.isfinite(slices).all(), "lost ranks were read"
        found.append(recover(state, slots, split, lost, **others))
        return found[-1]

    monkeypatch.setattr(emulated, "recover_ranks", spy)
    return found


def distance(record, other):
    pairs = zip(record.metrics, other.metrics, strict=True)
    return max(abs(mine["loss"] / theirs["loss"] - 1) for mine, theirs in pairs)


def of_kind(record, event):
    return [told for told in record.events if told["event"] == event]


def assert_slices(experiment, states, found, lost):
    """Survivors' slices are those of iteration 5; a lost rank's are of the step that is told by array and expert.

    Args:
        lost: for every rank, what gives the step of a part: (is it a weight, expert or None) -> step.
    """
    split = split_of(make_step_spec(experiment, storage_mesh(experiment.topology)))
    arrays = by_name(found.state)
    for name in split.ranked_names:
        of_experts = name in split.expert_names
        assert np.any(states[5][name] != states[4][name])
        for rank, unit in itertools.product(range(RANKS), np.ndindex(1, CLASSES) if of_experts else (None,)):
            step = lost[rank](name.startswith("master."), unit) if rank in lost else 5
            at = (0, unit[0], rank, unit[1]) if of_experts else (0, slice(None), rank)
            np.testing.assert_array_equal(arrays[name][at], states[step][name][at], err_msg=f"{name}, {rank}, {unit}")


def replicas_left(states, lost):
    """Experts, and the dense part (None), with a slot on a rank that lives after iteration 5."""
    living = [rank for rank in range(RANKS) if rank not in lost]
    return {(0, class_) for class_ in states[5]["placement"][0, 0, living].ravel().tolist()} | {None}


@pytest.mark.long
def test_with_a_snapshot_of_every_iteration_nothing_is_lost(experiment, whole, recovered, tmp_path):
    """Against a run that continues with seven ranks from a checkpoint of the same iteration."""
    unharmed, states = whole
    record = run(losing(experiment, ONE, 1), tmp_path / "lost")
    assert recovered[0].lines == ["rank 3 is lost: dense and experts 0-5: snapshot of rank 4, 0 steps old"]
    assert_slices(experiment, states, recovered[0], {3: lambda *_: 5})
    half = shutil.copytree(unharmed.path, tmp_path / "half")
    shutil.rmtree(half / f"checkpoints/step-{LAST:08d}")
    (half / "summary.json").unlink()
    seven = run(replace(experiment, topology=Topology(1, 1, 7)), half, resume=True)
    assert len(seven.metrics) == LAST
    assert distance(record, seven) < 1e-8
    assert [step["live_ranks"] for step in record.metrics] == [8] * 5 + [7] * 5
    (told,) = of_kind(record, "reconfigure")
    assert (told["step"], told["failed"], told["rejoined"], told["live_ranks"]) == (6, ["0:0 rank 3"], [], 7)
    assert (told["plt"], told["updates_lost"], told["faults"]) == (0, [0], 1)
    assert min(told["plan_ms"], told["compile_ms"], told["move_ms"]) > 0


def test_replicas_and_an_older_snapshot(experiment, whole, recovered, tmp_path):
    _, states = whole
    record = run(losing(experiment, ONE, 3), tmp_path / "run")
    in_slots = replicas_left(states, {3})
    assert recovered[0].lines[0].startswith("rank 3 is lost: weights of dense and experts ")
    assert recovered[0].lines[0].endswith("; their moments: snapshot of rank 4, 2 steps old")
    lost = {3: lambda is_weight, unit: 5 if is_weight and unit in in_slots else 3}
    assert_slices(experiment, states, recovered[0], lost)
    (told,) = of_kind(record, "reconfigure")
    moments = {"source": "snapshot", "step": 3, "ranks": [4]}
    assert [source["moments"] for source in told["sources"]] == [moments] * len(told["sources"])


@pytest.mark.slow
def test_a_rank_and_its_buddy_at_once_go_back_to_storage(experiment, whole, recovered, tmp_path):
    _, states = whole
    both = ("step 6: fail 0:0 rank 3", "step 6: fail 0:0 rank 4")
    run(losing(experiment, both, 1, every=4), tmp_path / "run", stop_at=6)
    in_slots = replicas_left(states, {3, 4})
    lost = {3: lambda is_weight, unit: 5 if is_weight and unit in in_slots else 4, 4: lambda *_: 5}
    assert_slices(experiment, states, recovered[0], lost)
    assert "; their moments: storage, step 4" in recovered[0].lines[0]
    assert recovered[0].lines[-1] == "rank 4 is lost: dense and experts 0-5: snapshot of rank 5, 0 steps old"


@pytest.mark.slow
def test_two_ranks_that_are_not_each_others_buddies_lose_nothing(experiment, whole, recovered, tmp_path):
    unharmed, states = whole
    both = ("step 6: fail 0:0 rank 7", "step 6: fail 0:0 rank 1")
    record = run(losing(experiment, both, 1), tmp_path / "run")
    assert recovered[0].lines == [
        "rank 1 is lost: dense and experts 0-5: snapshot of rank 2, 0 steps old",
        "rank 7 is lost: dense and experts 0-5: snapshot of rank 0, 0 steps old",
    ]
    assert_slices(experiment, states, recovered[0], {1: lambda *_: 5, 7: lambda *_: 5})
    assert distance(record, unharmed) < 1e-8


def test_a_rank_that_is_lost_while_it_is_copied_comes_from_the_copy_before(
    experiment, whole, recovered, tmp_path, monkeypatch
):
    """The thread that copies iteration 5 stands still in its midst."""
    _, states = whole
    begin, begun, go_on = peer_snapshots.begin_snapshot, itertools.count(), threading.Event()

    def slow(*arguments):
        take, step = begin(*arguments), next(begun)
        return lambda: (step != 5 or go_on.wait(600)) and take()

    monkeypatch.setattr(peer_snapshots, "begin_snapshot", slow)
    monkeypatch.setattr(peer_snapshots, "PATIENCE_S", 0.2)
    try:
        run(losing(experiment, ONE, 1), tmp_path / "run")
    finally:
        go_on.set()
    assert "; their moments: snapshot of rank 4, 1 step old" in recovered[0].lines[0]
    in_slots = replicas_left(states, {3})
    lost = {3: lambda is_weight, unit: 5 if is_weight and unit in in_slots else 4}
    assert_slices(experiment, states, recovered[0], lost)


def test_what_nobody_has_stops_the_run(experiment, tmp_path):
    with pytest.raises(RunError) as raised:
        run(losing(experiment, ONE), tmp_path / "run")
    assert str(raised.value) == (
        "rank 3 is lost, and no memory and no checkpoint has a copy of its slice of the dense part, at iteration 6: "
        "stopped; there is no checkpoint yet; start again in another --run-dir with a CheckpointConfig.snapshot_every "
        "above 0"
    )
    record = read_run(tmp_path / "run")
    (told,) = of_kind(record, "rank_lost")
    assert (told["step"], told["failed"]) == (6, ["0:0 rank 3"])
    assert len(record.metrics) == 5


@pytest.mark.slow
def test_a_rank_that_comes_back_is_one_of_all_again(experiment, whole, recovered, tmp_path):
    """Another is lost meanwhile; names are those of all eight all the time."""
    fails = ("step 3: fail 0:0 rank 3", "step 5: fail 0:0 rank 5")
    setup = losing(experiment, (*fails, "step 7: rejoin 0:0 rank 3", "step 7: rejoin 0:0 rank 5"), 1)
    record = run(setup, tmp_path / "run")
    assert distance(record, whole[0]) < 1e-8
    assert [step["live_ranks"] for step in record.metrics] == [8, 8, 7, 7, 6, 6, 8, 8, 8, 8]
    assert [found.lines for found in recovered] == [
        [f"rank {rank} is lost: dense and experts 0-5: snapshot of rank {rank + 1}, 0 steps old"] for rank in (3, 5)
    ]
    told = of_kind(record, "reconfigure")
    assert [one["prepared"] for one in told] == [False, False, True]
    assert [one["rejoined"] for one in told] == [[], [], ["0:0 rank 3", "0:0 rank 5"]]


@pytest.mark.slow
def test_lost_updates_are_counted_as_the_metrics_tell_them(experiment, tmp_path):
    """An expert whose only replica was on the lost rank goes back; a slice is an eighth of it."""
    setup = replace(experiment, placement=Static(), experts=replace(experiment.experts, slots_per_rank=1))
    record = run(losing(setup, ONE, 3), tmp_path / "run")
    (told,) = of_kind(record, "reconfigure")
    back = {tuple(unit) for source in told["sources"] for unit in source["experts"] if source["weights"]["step"] == 3}
    assert back == {(0, 3)}  # round-robin: class 3 is on rank 3 alone
    routed = sum(sum(step["popularity"][0]) for step in record.metrics[:5])
    lost = sum(step["popularity"][0][3] - step["dropped"][0][3] for step in record.metrics[3:5])
    assert lost > 0
    assert told["updates_lost"] == [-(-lost // RANKS)]
    assert told["plt"] == pytest.approx(-(-lost // RANKS) / routed, rel=1e-12)


@pytest.mark.slow
def test_snapshots_of_one_expert_at_a_time(experiment, whole, recovered, tmp_path):
    _, states = whole
    run(losing(experiment, ONE, 1, snapshot_experts_per_layer=1), tmp_path / "run")
    in_slots = replicas_left(states, {3})
    # All before the first iteration, then one class after the other.
    taken = {None: 5, (0, 5): 0} | {(0, class_): class_ + 1 for class_ in range(5)}
    lost = {3: lambda is_weight, unit: 5 if is_weight and unit in in_slots else taken[unit]}
    assert_slices(experiment, states, recovered[0], lost)
    told = {tuple(unit): one["moments"]["step"] for one in recovered[0].facts["sources"] for unit in one["experts"]}
    assert told == {unit: step for unit, step in taken.items() if unit}


@pytest.mark.slow
def test_the_first_checkpoint_after_a_loss_is_full_and_a_resumed_run_goes_on_with_who_is_left(experiment, tmp_path):
    setup = losing(experiment, ONE, 1, every=2, experts_per_layer=1, num_kept=5)
    unbroken = run(setup, tmp_path / "run")
    manifests = [read_manifest(tmp_path / f"run/checkpoints/step-{step:08d}", "") for step in (2, 4, 6, 8, 10)]
    assert [manifest.is_full for manifest in manifests] == [True, False, True, False, True]
    for step in (8, 10):
        shutil.rmtree(tmp_path / f"run/checkpoints/step-{step:08d}")
    (tmp_path / "run/summary.json").unlink()
    resumed = run(setup, tmp_path / "run", resume=True)
    assert [step["live_ranks"] for step in resumed.metrics] == [8] * 5 + [7] * 5
    assert distance(resumed, unbroken) < 1e-12
    assert [(told["step"], told["ranks"]) for told in of_kind(resumed, "resume")] == [(6, 7)]


@pytest.mark.slow
def test_ranks_have_more_slots_where_classes_would_have_none(experiment, tmp_path):
    setup = replace(experiment, topology=Topology(1, 1, 3))
    unharmed = run(setup, tmp_path / "whole")
    record = run(losing(setup, ("step 4: fail 0:0 rank 0", "step 8: rejoin 0:0 rank 0"), 1), tmp_path / "run")
    assert [told["slots_per_rank"] for told in of_kind(record, "reconfigure")] == [3, 2]
    assert distance(record, unharmed) < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 2])
def test_a_rank_of_one_stage_leaves_all_stages_and_its_slices_of_the_others_are_kept(
    experiment, recovered, tmp_path, window
):
    model = replace(experiment.model, num_layers=2)
    setup = replace(experiment, model=model, topology=Topology(1, 2, 4), window=window, num_microbatches=2)
    unharmed, states = run_and_keep_states(setup, tmp_path / "whole")
    failures = ("step 6: fail 0:1 rank 2", "step 9: rejoin 0:1 rank 2")
    record = run(losing(setup, failures, 2), tmp_path / "run")
    at = 5 if window == 1 else 4  # a window does without who fails in it
    (found,) = recovered
    split = split_of(make_step_spec(setup, storage_mesh(setup.topology)))
    for name in split.ranked_names:
        mine, then = by_name(found.state)[name], states[at][name]
        np.testing.assert_array_equal(mine[0], then[0], err_msg=name)
        np.testing.assert_array_equal(mine[1][:, [0, 1, 3]], then[1][:, [0, 1, 3]], err_msg=name)
    np.testing.assert_array_equal(
        by_name(found.state)["moments.0.mu.expert"][1, :, 2], states[4]["moments.0.mu.expert"][1, :, 2]
    )
    assert found.lines[-1] == "rank 2: slices of stage 0: still on their devices"
    assert [step["live_ranks"] for step in record.metrics] == [4] * at + [3] * (8 - at) + [4] * 2
    if window == 2:
        assert distance(record, unharmed) < 1e-8


@pytest.mark.slow
def test_weights_from_slots_are_as_exact_as_slots_are(experiment, recovered, tmp_path):
    """Slots in bfloat16, and master weights in float32."""
    setup = replace(experiment, compute_dtype="bfloat16")
    record, states = run_and_keep_states(losing(setup, ONE, 3), tmp_path / "run")
    in_slots = replicas_left(states, {3})
    weights = by_name(recovered[0].state)["master.expert"]
    assert len(in_slots) > 2
    for class_ in range(CLASSES):
        now, then = (states[step]["master.expert"][0, 0, 3, class_] for step in (5, 3))
        rounded = np.asarray(jnp.asarray(now, jnp.bfloat16), np.float32)
        assert np.any(rounded != now)
        np.testing.assert_array_equal(weights[0, 0, 3, class_], rounded if (0, class_) in in_slots else then)
    assert np.isfinite([step["loss"] for step in record.metrics]).all()


@pytest.mark.slow
def test_virtual_ranks_are_lost_in_the_same_way(experiment, whole, recovered, tmp_path):
    record = run(replace(losing(experiment, ONE, 1), ranks="virtual"), tmp_path / "run")
    assert recovered[0].lines == ["rank 3 is lost: dense and experts 0-5: snapshot of rank 4, 0 steps old"]
    assert [step["live_ranks"] for step in record.metrics] == [8] * 5 + [7] * 5
    assert distance(record, whole[0]) < 1e-8
