"""A run of one pipeline that loses expert ranks and goes on with the others, in the same process.

What it then has is held against a run that loses none, and saves all of every iteration.
"""

import shutil
import threading
from dataclasses import replace

import jax
import numpy as np
import pytest

from swift.checkpoint import CheckpointConfig, buddies, plan_restore, read_manifest
from swift.checkpoint.split import by_name
from swift.data import DataConfig, TextFiles
from swift.errors import RunError
from swift.experts import ExpertConfig
from swift.experts.optimizer import OptimizerConfig
from swift.experts.placement import Static
from swift.mesh import storage_mesh
from swift.models import ModelConfig
from swift.record import read_run
from swift.topology import Topology
from swift.train import Experiment, TrainOptions, cluster, train
from swift.train.saved_state import load_state, split_of

pytestmark = pytest.mark.usefixtures("quickly_compiled")
RANKS, CLASSES, LAST = 8, 6, 10
ONE = ("step 6: fail 0:0 rank 3",)


@pytest.fixture(scope="module", autouse=True)
def double_precision():
    """As the command line sets it: in all threads, those that load a checkpoint included."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    """Eight ranks, two layers of six experts that drop nothing; experts' numbers do not divide evenly by any rank."""
    directory, random = tmp_path_factory.mktemp("corpus"), np.random.default_rng(0)
    words = ["swift", "expert", "slot", "rank", "token", "router", "stage", "bubble"]
    for index in range(20):
        (directory / f"{index}.txt").write_text(" ".join(random.choice(words, 300)))
    return Experiment(
        model=ModelConfig(num_layers=2, model_dim=12, num_heads=2, ffn_dim=9, sequence_length=8, moe_pattern=(True,)),
        experts=ExpertConfig(CLASSES, slots_per_rank=2, capacity_factor=None, aux_loss_coefficient=1e-2),
        topology=Topology(1, 1, RANKS),
        data=DataConfig(TextFiles(str(directory / "*.txt")), validation_share=0.3),
        optimizer=OptimizerConfig(warmup_steps=4, peak_learning_rate=1e-2),
        compute_dtype="float64",
        num_steps=LAST,
        num_microbatches=2,
        sequences_per_microbatch=8,
        eval_every=0,
        checkpoint=CheckpointConfig(every=0),
    )


def run(experiment, run_dir, **options):
    train(experiment, TrainOptions(run_dir, "the same", **{"prepare": "none"} | options))
    return read_run(run_dir)


def losing(experiment, failures, every=0, **checkpoint):
    config = CheckpointConfig(**{"every": 0, "snapshot_every": every} | checkpoint)
    return replace(experiment, failures=failures, checkpoint=config)


@pytest.fixture(scope="module")
def whole(experiment, tmp_path_factory, few_optimizations):
    """The run that loses nobody, with a checkpoint of every iteration."""
    setup = replace(experiment, checkpoint=CheckpointConfig(every=1, num_kept=LAST))
    with few_optimizations():
        return run(setup, tmp_path_factory.mktemp("whole") / "run")


def saved(experiment, run_dir, step):
    """The state of a checkpoint, by name, as the experiment has it."""
    program = experiment.program(storage_mesh(experiment.topology))
    plan = plan_restore(run_dir / "checkpoints", experiment.identity(), step)
    return by_name(load_state(run_dir / "checkpoints", plan, program)[0])


@pytest.fixture
def recovered(monkeypatch):
    """What every loss came to, before it was cut for the ranks that are left."""
    found, recover = [], cluster.recover_ranks

    def spy(state, *others):
        for name, leaf in by_name(state).items():
            gone = [rank for rank in range(leaf.shape[2]) if np.isnan(leaf[:, :, rank]).all()] if leaf.ndim > 4 else []
            assert leaf.ndim < 5 or gone == [rank for _, rank in sorted(others[2])], f"{name} of lost ranks was read"
        found.append(recover(state, *others))
        return found[-1]

    monkeypatch.setattr(cluster, "recover_ranks", spy)
    return found


def distance(record, other, first=1):
    pairs = zip(record.metrics[first - 1 :], other.metrics[first - 1 :], strict=True)
    return max(abs(mine["loss"] / theirs["loss"] - 1) for mine, theirs in pairs)


def of_kind(record, event):
    return [told for told in record.events if told["event"] == event]


def assert_columns(experiment, whole, found, lost):
    """Survivors' slices are those of iteration 5; a lost rank's are of the step that is told by array and expert.

    Args:
        lost: for every rank, what gives the step of a part: (is it a weight, expert or None) -> step.
    """
    split = split_of(experiment.program(storage_mesh(experiment.topology)))
    arrays, states = by_name(found.state), {}
    for name in split.ranked_names:
        for rank in range(RANKS):
            of_experts = name in split.expert_names
            for unit in np.ndindex(2, CLASSES) if of_experts else (None,):
                step = lost[rank](name.startswith("master."), unit) if rank in lost else 5
                then = states.setdefault(step, saved(experiment, whole.path, step))[name]
                at = (0, unit[0], rank, unit[1]) if of_experts else (0, slice(None), rank)
                np.testing.assert_array_equal(arrays[name][at], then[at], err_msg=f"{name} of rank {rank}, {unit}")
                assert name != "master.expert" or np.any(then[at] != saved_zero(states, name, at, step))


def saved_zero(states, name, at, step):
    """The same part one step away, if that was read: different, or the comparison would say nothing."""
    other = next((state for taken, state in states.items() if taken != step), None)
    return np.nan if other is None else other[name][at]


def test_with_a_snapshot_of_every_iteration_nothing_is_lost(experiment, whole, recovered, tmp_path):
    """Against a run that goes on with seven ranks from a checkpoint of the same iteration."""
    record = run(losing(experiment, ONE, 1), tmp_path / "lost")
    assert recovered[0].lines == ["rank 3 is lost: dense and experts 0-5: snapshot of rank 4, 0 steps old"]
    assert_columns(experiment, whole, recovered[0], {3: lambda *_: 5})
    half = shutil.copytree(whole.path, tmp_path / "half")
    for step in range(6, LAST + 1):
        shutil.rmtree(half / f"checkpoints/step-{step:08d}")
    (half / "summary.json").unlink()
    seven = run(replace(experiment, topology=Topology(1, 1, 7)), half, resume=True)
    assert distance(record, seven) < 1e-8
    assert [step["live_ranks"] for step in record.metrics] == [8] * 5 + [7] * 5
    (told,) = of_kind(record, "reconfigure")
    assert (told["step"], told["failed"], told["rejoined"], told["live_ranks"]) == (6, ["0:0 rank 3"], [], 7)
    assert (told["plt"], told["updates_lost"], told["faults"]) == (0, [0, 0], 1)
    assert min(told["plan_ms"], told["compile_ms"], told["move_ms"]) > 0


def test_replicas_and_an_older_snapshot(experiment, whole, recovered, tmp_path):
    record = run(losing(experiment, ONE, 3), tmp_path / "run", stop_at=7)
    (found,) = recovered
    in_slots = replicas_left(experiment, whole, 5, {3})
    assert found.lines[0].startswith("rank 3 is lost: weights of dense")
    assert found.lines[0].endswith("; their moments: snapshot of rank 4, 2 steps old")
    assert_columns(experiment, whole, found, {3: lambda is_weight, unit: 5 if is_weight and unit in in_slots else 3})
    assert np.isfinite([step["loss"] for step in record.metrics]).all()
    (told,) = of_kind(record, "reconfigure")
    assert [source["moments"] for source in told["sources"]] == [
        {"source": "snapshot", "step": 3, "ranks": [4]} for _ in told["sources"]
    ]


def replicas_left(experiment, whole, step, lost):
    """Experts (and the dense part, None) with a slot on a rank that lives."""
    placement = saved(experiment, whole.path, step)["placement"][0]
    living = [rank for rank in range(RANKS) if rank not in lost]
    return {(layer, class_) for layer in range(2) for class_ in placement[layer, living].ravel().tolist()} | {None}


def test_a_rank_and_its_buddy_at_once_go_back_to_storage(experiment, whole, recovered, tmp_path):
    both = ("step 6: fail 0:0 rank 3", "step 6: fail 0:0 rank 4")
    run(losing(experiment, both, 1, every=4), tmp_path / "run", stop_at=7)
    in_slots = replicas_left(experiment, whole, 5, {3, 4})
    lost = {3: lambda is_weight, unit: 5 if is_weight and unit in in_slots else 4, 4: lambda *_: 5}
    assert_columns(experiment, whole, recovered[0], lost)
    assert "; their moments: storage, step 4" in recovered[0].lines[0]
    assert recovered[0].lines[-1] == "rank 4 is lost: dense and experts 0-5: snapshot of rank 5, 0 steps old"


def test_two_ranks_that_are_not_each_others_buddies_lose_nothing(experiment, whole, recovered, tmp_path):
    both = ("step 6: fail 0:0 rank 7", "step 6: fail 0:0 rank 1")
    record = run(losing(experiment, both, 1), tmp_path / "run")
    assert recovered[0].lines == [
        "rank 1 is lost: dense and experts 0-5: snapshot of rank 2, 0 steps old",
        "rank 7 is lost: dense and experts 0-5: snapshot of rank 0, 0 steps old",
    ]
    assert_columns(experiment, whole, recovered[0], {1: lambda *_: 5, 7: lambda *_: 5})
    assert distance(record, whole) < 1e-8


def test_a_rank_that_is_lost_while_it_is_copied_comes_from_the_copy_before(
    experiment, whole, recovered, tmp_path, monkeypatch
):
    """The thread that copies iteration 5 stands still in its midst."""
    begin, begun, go_on = buddies.begin_snapshot, [], threading.Event()

    def slow(*arguments):
        take = begin(*arguments)
        begun.append(None)
        nth = len(begun)
        return lambda: (nth != 6 or go_on.wait(60)) and take()

    monkeypatch.setattr(buddies, "begin_snapshot", slow)
    monkeypatch.setattr(buddies, "PATIENCE_S", 0.2)
    try:
        run(losing(experiment, ONE, 1), tmp_path / "run", stop_at=7)
    finally:
        go_on.set()
    assert "; their moments: snapshot of rank 4, 1 step old" in recovered[0].lines[0]
    in_slots = replicas_left(experiment, whole, 5, {3})
    lost = {3: lambda is_weight, unit: 5 if is_weight and unit in in_slots else 4}
    assert_columns(experiment, whole, recovered[0], lost)


def test_what_nobody_has_stops_the_run(experiment, tmp_path):
    with pytest.raises(RunError) as raised:
        run(losing(experiment, ONE), tmp_path / "run")
    assert str(raised.value) == (
        "rank 3 is lost, and its slice of the dense part is in no other memory and in no checkpoint, at iteration 6: "
        "stopped; there is no checkpoint yet; start again in another --run-dir with a CheckpointConfig.snapshot_every "
        "above 0"
    )
    record = read_run(tmp_path / "run")
    (told,) = of_kind(record, "rank_lost")
    assert (told["step"], told["failed"]) == (6, ["0:0 rank 3"])
    assert len(record.metrics) == 5


def test_a_rank_that_comes_back_is_one_of_eight_again(experiment, whole, recovered, tmp_path):
    """And may be lost again; names are those of the eight all the time."""
    failures = (
        "step 3: fail 0:0 rank 3",
        "step 5: fail 0:0 rank 5",
        "step 7: rejoin 0:0 rank 3",
        "step 8: rejoin 0:0 rank 5",
    )
    record = run(losing(experiment, failures, 1), tmp_path / "run")
    assert distance(record, whole) < 1e-8
    assert [step["live_ranks"] for step in record.metrics] == [8, 8, 7, 7, 6, 6, 7, 8, 8, 8]
    assert [found.lines for found in recovered] == [
        [f"rank {rank} is lost: dense and experts 0-5: snapshot of rank {rank + 1}, 0 steps old"] for rank in (3, 5)
    ]
    told = of_kind(record, "reconfigure")
    assert [one["prepared"] for one in told] == [False, False, False, True]
    assert [one["rejoined"] for one in told] == [[], [], ["0:0 rank 3"], ["0:0 rank 5"]]


def test_lost_updates_are_counted_as_the_metrics_tell_them(experiment, tmp_path):
    """An expert whose only replica was on the lost rank goes back; a slice is an eighth of it."""
    setup = replace(experiment, placement=Static(), experts=replace(experiment.experts, slots_per_rank=1))
    record = run(losing(setup, ONE, 3), tmp_path / "run", stop_at=8)
    (told,) = of_kind(record, "reconfigure")
    back = {tuple(unit) for source in told["sources"] for unit in source["experts"] if source["weights"]["step"] == 3}
    assert back == {(0, 3), (1, 3)}  # round-robin: class 3 is on rank 3 alone
    lost, routed = [0, 0], [0, 0]
    for step in record.metrics:
        for layer in range(2):
            if step["step"] <= 5:
                routed[layer] += sum(step["popularity"][layer])
            if 3 < step["step"] <= 5:
                lost[layer] += step["popularity"][layer][3] - step["dropped"][layer][3]
    lost = [-(-updates // RANKS) for updates in lost]
    assert told["updates_lost"] == lost
    assert min(lost) > 0
    assert told["plt"] == pytest.approx(np.mean(np.divide(lost, routed)), rel=1e-12)


def test_snapshots_of_one_expert_at_a_time(experiment, whole, recovered, tmp_path):
    setup = losing(experiment, ONE, 1, snapshot_experts_per_layer=1)
    run(setup, tmp_path / "run", stop_at=7)
    in_slots = replicas_left(experiment, whole, 5, {3})
    # All after iteration 0; then class by class, the upper layer one ahead.
    taken = {(layer, (nth + layer) % CLASSES): nth + 1 for layer in range(2) for nth in range(5)}
    steps = {unit: taken.get(unit, 0) for unit in np.ndindex(2, CLASSES)} | {None: 5}
    assert sorted(steps.values())[:2] == [0, 0]

    def step_of(is_weight, unit):
        return 5 if is_weight and unit in in_slots else steps[unit]

    told = {tuple(unit): one for one in recovered[0].facts["sources"] for unit in one["experts"]}
    assert {unit: one["moments"]["step"] for unit, one in told.items()} == {u: s for u, s in steps.items() if u}
    arrays = by_name(recovered[0].state)
    for name in ("master.expert", "moments.0.mu.expert"):
        for unit, step in steps.items():
            step = step_of(name.startswith("master"), unit)
            if unit and step:  # there is no checkpoint of iteration 0
                at = (0, unit[0], 3, unit[1])
                np.testing.assert_array_equal(arrays[name][at], saved(experiment, whole.path, step)[name][at])


def test_the_first_checkpoint_after_a_loss_is_full_and_a_resumed_run_goes_on_with_who_is_left(experiment, tmp_path):
    setup = losing(experiment, ONE, 1, every=2, experts_per_layer=1, num_kept=5)
    whole = run(setup, tmp_path / "whole")
    run(setup, tmp_path / "parts", stop_at=8)
    checkpoints = [read_manifest(tmp_path / f"whole/checkpoints/step-{s:08d}", "").is_full for s in (2, 4, 6, 8, 10)]
    assert checkpoints == [True, False, True, False, True]
    parts = run(setup, tmp_path / "parts", resume=True)
    assert distance(parts, whole) == 0
    assert [step["live_ranks"] for step in parts.metrics] == [8] * 5 + [7] * 5


def test_ranks_have_more_slots_where_classes_would_have_none(experiment, tmp_path):
    setup = replace(experiment, topology=Topology(1, 1, 3))
    whole = run(setup, tmp_path / "whole")
    record = run(losing(setup, ("step 4: fail 0:0 rank 0", "step 8: rejoin 0:0 rank 0"), 1), tmp_path / "run")
    assert [told["slots_per_rank"] for told in of_kind(record, "reconfigure")] == [3, 2]
    assert distance(record, whole) < 1e-8
