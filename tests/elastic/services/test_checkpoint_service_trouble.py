"""A failed checkpoint is reported in a line, costs no other checkpoint, and does not end the checkpoint service."""

import errno
import io
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from swift.checkpoint.inspection import restore_lines
from swift.checkpoint.manifest import checkpoint_path, checkpoint_steps, read_manifest
from swift.config.stored import config_text
from swift.elastic.membership.messages import Process, StateId
from swift.elastic.state.store import SharedMemoryStore
from swift.elastic.transport.messages import (
    CHECKPOINT_ANSWERS,
    CHECKPOINT_COMMANDS,
    CommandFailed,
    KeptElsewhere,
    LoadCheckpoint,
    SaveCheckpoint,
    Saved,
    StateRestored,
)
from swift.errors import RunError
from swift.runlog.expert_counts import CLASS_COUNTS
from swift.runlog.files import METRICS
from swift.train.build import make_loader
from swift.train.saved_state import check_savable, import_fallback

RANKS = (Process((0, 0), 0), Process((0, 0), 1))


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def part_of(checkpoint_service, process, stamp):
    (pipeline, stage), rank = process
    return checkpoint_service.snapshots / f"{pipeline}-{stage}-{rank}" / f"state-{stamp.generation}-{stamp.step}"


def served(checkpoint_service, *commands):
    answers = io.StringIO()
    checkpoint_service.serve(io.StringIO("".join(map(CHECKPOINT_COMMANDS.line, commands))), answers.write)
    return [CHECKPOINT_ANSWERS.read(line) for line in answers.getvalue().splitlines()]


def damage_part(checkpoint_service, _):
    flip(part_of(checkpoint_service, RANKS[1], StateId(3, 4)))


def cut_part(checkpoint_service, _):
    part = part_of(checkpoint_service, RANKS[1], StateId(3, 4))
    part.write_bytes(part.read_bytes()[:-9])


def empty_part(checkpoint_service, _):
    part_of(checkpoint_service, RANKS[1], StateId(3, 4)).write_bytes(b"")


def lose_part(checkpoint_service, _):
    part_of(checkpoint_service, RANKS[1], StateId(3, 4)).unlink()


def mislabel_parts(checkpoint_service, kept):
    for process in RANKS:
        SharedMemoryStore(checkpoint_service.snapshots, process).save(
            StateId(3, 4), kept(checkpoint_service, process, StateId(3, 2))
        )


def spoil_weights(checkpoint_service, kept):
    state = kept(checkpoint_service, RANKS[1], StateId(3, 4))
    spoilt = jax.tree.map(np.copy, state.master)
    jax.tree.leaves(spoilt)[-1].flat[-1] = np.nan
    SharedMemoryStore(checkpoint_service.snapshots, RANKS[1]).save(StateId(3, 4), replace(state, master=spoilt))


def block_directory(checkpoint_service, _):
    checkpoint_service.checkpoints.write_text("a file")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (damage_part, "is damaged"),
        (cut_part, "is damaged"),
        (empty_part, "JSONDecodeError|is damaged"),
        (lose_part, "No such file"),
        (mislabel_parts, r"the parts are of the state after iteration \[2\], not 4"),
        (spoil_weights, "the weights are not finite after iteration 4"),
        (block_directory, "File exists"),
    ],
)
def test_what_cannot_be_saved_is_told_and_the_next_one_is(checkpoint_service, elsewhere, kept, spoil, reason):
    checkpoint_service.load(generation=3, processes=RANKS, step=2)
    spoil(elsewhere, kept)
    (answer,) = served(elsewhere, SaveCheckpoint(StateId(3, 4), RANKS))
    assert answer[:2] == ("save", 4)
    assert re.search(reason, answer.reason)
    assert "\n" not in answer.reason
    assert checkpoint_steps(elsewhere.checkpoints) == []
    if elsewhere.checkpoints.is_file():
        elsewhere.checkpoints.unlink()
    bad, good = served(elsewhere, SaveCheckpoint(StateId(3, 4), RANKS[:1]), SaveCheckpoint(StateId(3, 2), RANKS))
    assert (type(bad), type(good)) == (CommandFailed, Saved)
    assert checkpoint_steps(elsewhere.checkpoints) == [2]


def test_a_placement_with_a_class_without_a_slot_is_not_saved():
    state = SimpleNamespace(step=np.array([4]), master={}, placement=np.ones((1, 1, 2, 1), np.int32))
    with pytest.raises(
        RunError, match="expert 0 of 0 to 1 has no slot in layer 0 after iteration 4: correct the policy"
    ):
        check_savable(state, 4, num_classes=2)


def test_what_cannot_be_saved_where_it_belongs_is_kept_elsewhere(checkpoint_service, elsewhere, tmp_path, monkeypatch):
    checkpoint_service.load(generation=3, processes=RANKS, step=4)
    block_directory(elsewhere, None)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    failed, kept = served(
        elsewhere, SaveCheckpoint(StateId(3, 4), RANKS), SaveCheckpoint(StateId(3, 4), RANKS, is_elsewhere=True)
    )
    assert (type(failed), type(kept), kept.step) == (CommandFailed, KeptElsewhere, 4)
    (place,) = (tmp_path / "tmp").glob("kept-by-swift-*")
    assert kept.text.startswith(f"the state after iteration 4 is kept in {place} on ")
    elsewhere.checkpoints.unlink()
    assert len(import_fallback(elsewhere.checkpoints)) == 1
    assert isinstance(served(elsewhere, LoadCheckpoint(None, 7, RANKS))[0], StateRestored)


def test_holders_that_are_no_whole_worker_are_refused(checkpoint_service):
    (answer,) = served(checkpoint_service, SaveCheckpoint(StateId(3, 4), (RANKS[0], RANKS[0])))
    assert answer.reason.startswith("AssertionError: holders are")


def test_an_error_of_any_kind_is_one_line_and_not_the_end(checkpoint_service, monkeypatch):
    def fail(*_, **__):
        raise ValueError("Error opening driver:\n  no luck")

    with monkeypatch.context() as patch:
        patch.setattr("swift.elastic.services.checkpoint_service.save_checkpoint", fail)
        (answer,) = served(checkpoint_service, SaveCheckpoint(StateId(3, 4), RANKS))
    assert answer == CommandFailed("save", 4, "ValueError: Error opening driver: no luck")
    assert isinstance(served(checkpoint_service, SaveCheckpoint(StateId(3, 4), RANKS))[0], Saved)


def test_a_failed_save_is_told_although_the_directory_cannot_be_listed(checkpoint_service, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for name in ("save_checkpoint", "checkpoint_steps"):
        monkeypatch.setattr(f"swift.elastic.services.checkpoint_service.{name}", fail)
    (answer,) = served(checkpoint_service, SaveCheckpoint(StateId(3, 4), RANKS))
    assert answer == CommandFailed("save", 4, "[Errno 5] Input/output error")


def test_a_damaged_checkpoint_is_told_and_does_not_outlive_the_one_that_is_loaded_instead(checkpoint_service):
    newest = checkpoint_path(checkpoint_service.checkpoints, 4)
    flip(newest / "arrays/state/step/0")
    bad, good = served(checkpoint_service, LoadCheckpoint(4, 7, RANKS), LoadCheckpoint(None, 7, RANKS))
    reason = "step-00000004 is damaged: its file arrays/state/step/0 is not as it was saved"
    assert bad == CommandFailed(
        "load", 4, f"checkpoint = '{checkpoint_service.checkpoints}': cannot be restored: {reason}", 7
    )
    assert good.stamp == StateId(7, 2)
    assert good.lines[:3] == ["dense: storage, step 2", "all experts: storage, step 2", f"passed over: {reason}"]
    assert all(
        SharedMemoryStore(checkpoint_service.snapshots, process).stamps() == {StateId(3, 4), StateId(7, 2)}
        for process in RANKS
    )
    assert checkpoint_steps(checkpoint_service.checkpoints) == [2]
    assert (newest.parent / "step-00000004.aside").is_dir()


def test_what_does_not_fit_the_run_is_not_loaded(checkpoint_service, elsewhere):
    other = replace(checkpoint_service.experiment, seed=1)
    other_data = replace(checkpoint_service, experiment=other, data=make_loader(other, "train").state())
    (answer,) = served(other_data, LoadCheckpoint(4, 7, RANKS))
    assert "the saved data state" in answer.reason
    moved = checkpoint_service.data | {"next_step": 5, "next_sequence": 1}  # as after a change of the batch
    (answer,) = served(replace(checkpoint_service, data=moved), LoadCheckpoint(4, 7, RANKS))
    assert "the sequence of the saved data state = " in answer.reason
    (answer,) = served(elsewhere, LoadCheckpoint(None, 7, RANKS))
    assert answer == CommandFailed("load", None, f"checkpoint = '{elsewhere.checkpoints}': holds no checkpoint", 7)
    assert all(
        SharedMemoryStore(checkpoint_service.snapshots, process).stamps() == {StateId(3, 4)} for process in RANKS
    )


def test_what_was_broken_off_does_not_stay(checkpoint_service):
    half = checkpoint_service.checkpoints / ".step-00000003.tmp"
    half.mkdir()
    (half / "half").write_text("much")
    assert isinstance(served(checkpoint_service, SaveCheckpoint(StateId(3, 4), RANKS))[0], Saved)
    assert sorted(path.name for path in checkpoint_service.checkpoints.iterdir()) == ["step-00000002", "step-00000004"]


PROCESS = """
import resource, sys
from pathlib import Path
from types import SimpleNamespace
from swift.config.gin_reader import load_experiment
from swift.elastic.services import checkpoint_service as checkpoint_process, checkpoint_service
from swift.train.build import make_loader
config, run_dir, snapshots, handed_over, most_bytes = sys.argv[1:]
load = checkpoint_service.load_state
checkpoint_service.load_state = lambda *arguments: (print("noise"), load(*arguments))[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (int(most_bytes), resource.RLIM_INFINITY))
experiment = load_experiment(Path(config))
data = make_loader(experiment, "train").state()
scratch = SimpleNamespace(snapshots=Path(snapshots), handed_over=Path(handed_over), data=lambda: data)
checkpoint_process.run_checkpoint_service(experiment, Path(run_dir), scratch, sys.stdin, by_rank=True)
"""


def as_process(checkpoint_service, tmp_path, *commands, most_bytes=2**30):
    (tmp_path / "config.gin").write_text(config_text(checkpoint_service.experiment))
    (tmp_path / "handed").mkdir(exist_ok=True)
    own = [
        tmp_path / "config.gin",
        checkpoint_service.checkpoints.parent,
        checkpoint_service.snapshots,
        tmp_path / "handed",
        most_bytes,
    ]
    lines = "".join(map(CHECKPOINT_COMMANDS.line, commands))
    command = [sys.executable, "-c", PROCESS, *map(str, own)]
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}  # the process ends without the interpreter, which would flush
    return subprocess.run(command, input=lines, capture_output=True, text=True, timeout=100, env=buffered)


def test_the_process_finishes_what_it_was_told_and_says_nothing_else(checkpoint_service, tmp_path):
    """Its input ends at once, long before the last checkpoint is saved."""
    shutil.rmtree(checkpoint_path(checkpoint_service.checkpoints, 4))
    commands = (
        LoadCheckpoint(None, 5, RANKS),
        SaveCheckpoint(StateId(5, 2), RANKS),
        SaveCheckpoint(StateId(3, 4), RANKS),
    )
    done = as_process(checkpoint_service, tmp_path, *commands)
    assert done.returncode == 0, done.stderr
    loaded, *saved = map(CHECKPOINT_ANSWERS.read, done.stdout.splitlines())
    assert (type(loaded), loaded.stamp) == (StateRestored, StateId(5, 2))
    assert [(type(one), one.step, one.path) for one in saved] == [(Saved, n, f"step-{n:08}") for n in (2, 4)]
    assert checkpoint_steps(checkpoint_service.checkpoints) == [2, 4]
    assert "noise" in done.stderr


@pytest.mark.slow
def test_the_process_has_the_precision_of_the_run(checkpoint_service, tmp_path):
    double = replace(checkpoint_service, experiment=replace(checkpoint_service.experiment, compute_dtype="float64"))
    done = as_process(double, tmp_path, LoadCheckpoint(None, 5, RANKS))
    assert done.returncode == 0, done.stderr
    assert "its Experiment.compute_dtype is 'float32', here 'float64'" in CHECKPOINT_ANSWERS.read(done.stdout).reason


@pytest.mark.slow
def test_a_disk_that_is_full_costs_nothing_that_was_there(checkpoint_service, tmp_path):
    """Neither another checkpoint nor one of the same iteration."""
    shutil.rmtree(checkpoint_path(checkpoint_service.checkpoints, 4))
    again = StateId(4, 2)
    for process in RANKS:
        shutil.copy(
            part_of(checkpoint_service, process, StateId(9, checkpoint_service.load(9, RANKS).step)),
            part_of(checkpoint_service, process, again),
        )
    before = files(checkpoint_service)
    done = as_process(
        checkpoint_service,
        tmp_path,
        SaveCheckpoint(StateId(3, 4), RANKS),
        SaveCheckpoint(again, RANKS),
        most_bytes=10_000,
    )
    assert done.returncode == 0, done.stderr
    answers = list(map(CHECKPOINT_ANSWERS.read, done.stdout.splitlines()))
    assert [answer[:2] for answer in answers] == [("save", 4), ("save", 2)]
    assert all("too large" in answer.reason for answer in answers)
    # Threads of Orbax may write on after it has failed; what they leave is no checkpoint, and gone with the next life.
    assert before.items() <= files(checkpoint_service).items()
    assert checkpoint_steps(checkpoint_service.checkpoints) == [2]
    assert as_process(checkpoint_service, tmp_path).returncode == 0
    assert files(checkpoint_service) == before
    done = as_process(checkpoint_service, tmp_path, LoadCheckpoint(None, 5, RANKS))
    assert CHECKPOINT_ANSWERS.read(done.stdout).stamp == StateId(5, 2)


def test_a_save_again_takes_the_place_of_the_first(checkpoint_service):
    before = files(checkpoint_service)
    assert isinstance(served(checkpoint_service, SaveCheckpoint(StateId(3, 4), RANKS))[0], Saved)
    assert files(checkpoint_service).keys() == before.keys()
    assert sorted(path.name for path in checkpoint_service.checkpoints.iterdir()) == ["step-00000002", "step-00000004"]


@pytest.mark.slow
def test_a_life_that_ended_in_a_save_costs_nothing_that_was_there(checkpoint_service, tmp_path):
    """Files as a process leaves them that is killed while it saves an iteration for the second time."""
    path, before = checkpoint_path(checkpoint_service.checkpoints, 4), files(checkpoint_service)
    path.rename(path.with_suffix(".earlier"))
    (path.parent / ".step-00000004.tmp").mkdir()
    done = as_process(checkpoint_service, tmp_path, LoadCheckpoint(None, 5, RANKS))
    assert CHECKPOINT_ANSWERS.read(done.stdout).stamp == StateId(5, 4), done.stderr
    assert files(checkpoint_service).keys() == before.keys()


def files(checkpoint_service):
    directory = checkpoint_service.checkpoints
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_an_iteration_without_a_record_is_no_reason_not_to_save(elsewhere):
    """The iteration is counted such that losses are never understated."""
    whole = served(elsewhere, SaveCheckpoint(StateId(3, 4), RANKS))[0]
    metrics = elsewhere.checkpoints.parent / METRICS
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:1] + lines[2:]))
    shutil.rmtree(elsewhere.checkpoints)
    (answer,) = served(elsewhere, SaveCheckpoint(StateId(3, 4), RANKS))
    assert answer.facts == whole.facts | {"iterations_uncounted": 1}
    tally = read_manifest(checkpoint_path(elsewhere.checkpoints, 4), "checkpoint").ledger.tally
    assert tally.num_uncounted == 1
    plan = elsewhere.load(generation=7, processes=RANKS)
    assert restore_lines(plan, plan.manifest.ledger)[2].endswith(
        "so far: at most 0.0000 (iterations without a record: 1)"
    )


def test_the_record_is_on_the_disk_before_a_checkpoint_counts_on_it(elsewhere, monkeypatch):
    synced, before = [], []
    monkeypatch.setattr("os.fsync", lambda file: synced.append(Path(os.readlink(f"/proc/self/fd/{file}"))))

    def save(*_, **__):
        before.extend(synced)
        raise OSError("is not written")

    monkeypatch.setattr("swift.elastic.services.checkpoint_service.save_checkpoint", save)
    served(elsewhere, SaveCheckpoint(StateId(3, 4), RANKS))
    run_dir = elsewhere.checkpoints.parent
    assert {run_dir, run_dir / METRICS, run_dir / CLASS_COUNTS} <= {*before}
