"""Checkpoints of a run of processes are those of `swift train`, bit for bit."""

import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest

from swift.checkpoint.manifest import VALIDATION, checkpoint_path, read_manifest
from swift.checkpoint.reader import load_plan, plan_restore
from swift.checkpoint.writer import save_checkpoint
from swift.config.stored import config_text
from swift.elastic.membership.messages import Process, ShardLayout, StateId, processes_of
from swift.elastic.services.checkpoint_service import CheckpointService
from swift.elastic.state.store import SharedMemoryStore
from swift.elastic.transport.messages import (
    CHECKPOINT_ANSWERS,
    CHECKPOINT_COMMANDS,
    CommandFailed,
    LoadCheckpoint,
    Reshard,
    SaveCheckpoint,
    Saved,
    StateRestored,
)
from swift.mesh.state_rows import fetch_shards
from swift.runlog.expert_counts import CLASS_COUNTS, KINDS
from swift.runlog.files import METRICS
from swift.runlog.reading import read_run
from swift.runlog.run_directory import RunDirectory
from swift.topology import Topology
from swift.train.build import make_loader, make_step_spec
from swift.train.initial_weights import WeightSource
from swift.train.saved_state import extra_of, first_ledger
from swift.train.start import TrainOptions, begin, read_start
from swift.train.trainer import train

SOME = Process((0, 0), 1), Process((1, 1))


def bits(tree):
    return [(leaf.dtype, leaf.shape, leaf.tobytes()) for leaf in map(np.asarray, jax.tree.leaves(tree))]


def load(checkpoint_service, directory, step):
    return load_plan(
        directory, plan_restore(directory, checkpoint_service.experiment.identity(), step), checkpoint_service.split
    )


def first_state(experiment, options, start, weights=None):
    spec = make_step_spec(experiment)
    return begin(experiment, spec, read_start(spec, options, start, weights))


def is_parts(tree):
    return isinstance(tree, list)


def test_a_checkpoint_goes_through_shared_memory_bit_for_bit(checkpoint_service, elsewhere, trained, ranks):
    elsewhere.save(StateId(3, 4), ranks[::-1])
    directories = elsewhere.checkpoints, trained / "checkpoints"
    ours, theirs = (read_manifest(checkpoint_path(directory, 4), "") for directory in directories)
    plain = {name: value for name, value in theirs.extra.items() if name != VALIDATION}  # only `train` stops early
    assert (ours.identity, ours.extra, ours.dense) == (theirs.identity, plain, theirs.dense)
    assert ours.ledger.tally.to_json() == theirs.ledger.tally.to_json()
    newest = [{unit: copies[0].content for unit, copies in one.ledger.copies.items()} for one in (ours, theirs)]
    assert newest[0] == newest[1] != {}
    states = [load(checkpoint_service, directory, 4) for directory in directories]
    assert len(bits(states[0])) > 10
    assert bits(states[0]) == bits(states[1])


def test_parts_are_what_a_member_has_on_its_devices(checkpoint_service, trained, ranks, kept):
    experiment = checkpoint_service.experiment
    start = plan_restore(trained / "checkpoints", step=4)
    state = first_state(experiment, TrainOptions(trained, "", resume=True), start)
    for rank, process in enumerate(ranks):
        mine = jax.tree.map(lambda leaf, i=rank: leaf[i], fetch_shards(replace(state, slots={})), is_leaf=is_parts)
        assert bits(kept(checkpoint_service, process, StateId(3, 4))) == bits(mine)


def test_as_many_processes_as_there_are_now_get_their_slices(checkpoint_service, ranks, kept):
    """A checkpoint of two ranks; the next one is full, though K is 1: the copies are of another shape."""
    partial = replace(checkpoint_service.experiment.checkpoint, experts_per_layer=1)
    setup = replace(checkpoint_service.experiment, topology=Topology(1, 1, 3), checkpoint=partial)
    three, processes = replace(checkpoint_service, experiment=setup), processes_of(setup.topology, by_rank=True)
    assert three.load(generation=5, processes=processes).step == 4

    def classes(of, parts, name):
        slices = np.concatenate([part.master[name][0][0] for part in parts], axis=1)
        return of.spec.layouts[name].classes(slices, None)

    before = [kept(checkpoint_service, process, StateId(3, 4)) for process in ranks]
    after = [kept(three, process, StateId(5, 4)) for process in processes]
    for name in checkpoint_service.spec.gpt.groups:
        np.testing.assert_array_equal(classes(checkpoint_service, before, name), classes(three, after, name))
    for process, parts in zip(processes, after, strict=True):
        SharedMemoryStore(three.snapshots, process).save(
            StateId(5, 6), replace(parts, step=[np.full_like(parts.step[0], 6)])
        )
    write_metrics(three, 6)
    assert three.save(StateId(5, 6), processes).is_full


def test_train_goes_on_from_it_as_if_nothing_had_been(elsewhere, trained, tmp_path, ranks):
    elsewhere.save(StateId(3, 4), ranks)
    run_dir, unlike = tmp_path / "elsewhere", shutil.ignore_patterns("checkpoints", "summary.json")
    shutil.copytree(trained, run_dir, ignore=unlike, dirs_exist_ok=True)
    options = TrainOptions(run_dir, config_text(elsewhere.experiment), resume=True, prepare="none")
    train(elsewhere.experiment, options)
    again, whole = ([record["loss"] for record in read_run(path).metrics] for path in (run_dir, trained))
    assert [event["step"] for event in read_run(run_dir).events if event["event"] == "resume"] == [4]
    assert len(set(whole)) == 6
    assert again == whole
    states = [load(elsewhere, path / "checkpoints", 6) for path in (run_dir, trained)]
    assert bits(states[0]) == bits(states[1])


@pytest.fixture
def x64():
    """Sets double precision as the command line does: in all threads, those that load a checkpoint included."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def drawn(checkpoint_service, step):
    """A state after so many iterations, on the host; in each array no two numbers are alike, but in the placement."""
    random = np.random.default_rng(0)

    def draw(leaf):
        return np.asarray(random.permutation(leaf.size).reshape(leaf.shape), leaf.dtype)

    state = jax.tree.map(draw, checkpoint_service.spec.abstract())
    slots = np.arange(state.placement.size).reshape(state.placement.shape)
    placement = np.asarray(slots % checkpoint_service.spec.experts.num_classes, state.placement.dtype)
    return replace(state, step=np.full_like(state.step, step), placement=placement)


def write_metrics(checkpoint_service, steps):
    """Writes the metrics of a run in which no token was routed."""
    nothing = np.zeros((checkpoint_service.split.num_layers, checkpoint_service.split.num_classes), int)
    checkpoint_service.checkpoints.parent.mkdir(exist_ok=True)
    for name in (METRICS, CLASS_COUNTS):
        (checkpoint_service.checkpoints.parent / name).unlink(missing_ok=True)
    with RunDirectory(checkpoint_service.checkpoints.parent, 0, "") as directory:
        for step in range(1, steps + 1):
            directory.log_step({"step": step} | dict.fromkeys(KINDS, nothing))


@pytest.mark.usefixtures("x64")
def test_all_processes_of_a_stage_get_its_row_and_any_may_give_it(two_ranks, kept, tmp_path):
    setup = replace(two_ranks, topology=Topology(2, 2, 2), compute_dtype="float64")
    (tmp_path / "keeps").mkdir()
    data = make_loader(setup, "train").state()
    checkpoint_service = CheckpointService(
        experiment=setup,
        checkpoints=tmp_path / "run" / "checkpoints",
        snapshots=tmp_path / "keeps",
        by_rank=False,
        data=data,
    )
    extra, identity = extra_of(checkpoint_service.spec, data), setup.identity()
    ledger = first_ledger(setup, checkpoint_service.split)
    snapshot = checkpoint_service.split.host_snapshot(
        drawn(checkpoint_service, 2), ledger.choose("sequential", full=True)
    )
    save_checkpoint(
        checkpoint_service.checkpoints,
        2,
        snapshot,
        checkpoint_service.split,
        ledger,
        identity=identity,
        extra=extra,
        num_kept=1,
    )
    start, stamp = checkpoint_service.load(generation=1, processes=processes_of(setup.topology)), StateId(1, 2)

    spec = make_step_spec(setup)
    state = first_state(setup, TrainOptions(tmp_path / "run", "", resume=True), start)
    whole = fetch_shards(replace(state, slots={}))
    assert spec.live.workers == tuple(process.worker for process in processes_of(setup.topology))
    for row, process in enumerate(processes_of(setup.topology)):
        mine = jax.tree.map(lambda parts, row=row: parts[2 * row : 2 * row + 2], whole, is_leaf=is_parts)
        assert bits(kept(checkpoint_service, process, stamp)) == bits(mine)

    again = replace(checkpoint_service, checkpoints=tmp_path / "again" / "checkpoints")
    write_metrics(again, 2)
    again.save(stamp, [Process((1, 1)), Process((0, 0))])
    state = load(again, again.checkpoints, 2)
    assert bits(state) == bits(drawn(checkpoint_service, 2))
    assert "float64" in {leaf.dtype.name for leaf in jax.tree.leaves(state)}


@pytest.mark.parametrize(
    "answer",
    [
        Saved(4, 0.5, "step-00000004", {"bytes": 7}),
        StateRestored(StateId(2, 4), ["dense: storage, step 4"], {"plt": 0.5}),
        CommandFailed("save", 4, "no space"),
        CommandFailed("load", None, "no", 3),
        StateRestored(StateId(2, 4), ["rank 3 is lost: dense: storage, step 2"], {"plt": 0.5}, is_resharded=True),
    ],
)
def test_answers_come_as_they_were_said(answer):
    assert CHECKPOINT_ANSWERS.read(CHECKPOINT_ANSWERS.line(answer)) == answer
    assert type(CHECKPOINT_ANSWERS.read(CHECKPOINT_ANSWERS.line(answer))) is type(answer)


@pytest.mark.parametrize(
    "command",
    [
        SaveCheckpoint(StateId(2, 4), SOME),
        SaveCheckpoint(StateId(2, 4), SOME, is_full=True),
        LoadCheckpoint(4, 2, SOME),
        LoadCheckpoint(None, 2, SOME[:1]),
        Reshard(StateId(2, 4), ShardLayout(SOME, (2, 3)), 4, SOME[:1]),
    ],
)
def test_commands_come_as_they_were_said(command):
    assert CHECKPOINT_COMMANDS.read(CHECKPOINT_COMMANDS.line(command)) == command
    assert type(CHECKPOINT_COMMANDS.read(CHECKPOINT_COMMANDS.line(command))) is type(command)


def test_a_run_begins_with_the_weights_of_another_as_in_one_process(checkpoint_service, trained, ranks, tmp_path, kept):
    source = WeightSource(trained, checkpoint_service.experiment)
    checkpoints = tmp_path / "fork" / "checkpoints"
    fork = replace(checkpoint_service, init_from=source, checkpoints=checkpoints)
    answer = fork.carry_out(LoadCheckpoint(None, 7, ranks))
    assert answer == StateRestored(
        StateId(7, 0), [], source.facts(plan_restore(trained / "checkpoints")), is_origin=True
    )

    experiment = checkpoint_service.experiment
    options = TrainOptions(tmp_path, "", init_from=source)
    state = first_state(experiment, options, None, source.plan(experiment))
    for rank, process in enumerate(ranks):
        mine = jax.tree.map(lambda leaf, i=rank: leaf[i], fetch_shards(replace(state, slots={})), is_leaf=is_parts)
        assert bits(kept(fork, process, StateId(7, 0))) == bits(mine)

    own = replace(checkpoint_service, init_from=source)  # which has checkpoints by now
    assert own.carry_out(LoadCheckpoint(None, 8, ranks)).stamp == StateId(8, 4)
