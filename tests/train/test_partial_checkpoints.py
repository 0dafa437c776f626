"""A run that saves some experts at a time: what is lost, what is not, and what its record says of it."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from swift.checkpoint import writer
from swift.checkpoint.config import CheckpointConfig
from swift.checkpoint.inspection import coverage
from swift.checkpoint.manifest import checkpoint_steps, read_manifest
from swift.checkpoint.reader import plan_restore
from swift.checkpoint.units import by_name
from swift.errors import RunError, SettingError
from swift.report.sections import coverage_of
from swift.runlog.expert_counts import CLASS_COUNTS
from swift.runlog.files import METRICS
from swift.runlog.reading import read_run
from swift.runlog.run_directory import RunDirectory
from swift.train.build import make_step_spec
from swift.train.saved_state import split_of
from swift.train.start import TrainOptions
from swift.train.trainer import train
from tests.train.partial_runs import events, lost_updates, saving_one_expert, state_of
from tests.train.runs import run


@pytest.fixture(scope="module")
def experiment(corpus):
    return saving_one_expert(corpus)


@pytest.fixture(scope="module")
def lost(experiment, tmp_path_factory):
    """The run directory of a run that has ended in iteration 9: saved after 2, 4, 6 and 8."""
    run_dir = tmp_path_factory.mktemp("runs") / "lost"
    run(experiment, run_dir, stop_at=9)
    shutil.rmtree(run_dir / "checkpoints/step-00000009")  # which is full, and would lose nothing
    return run_dir


@pytest.fixture
def again(lost, tmp_path):
    """A copy of it."""
    return shutil.copytree(lost, tmp_path / "run")


def test_a_lost_run_goes_on_and_counts_what_it_has_lost(experiment, again):
    assert checkpoint_steps(again / "checkpoints") == [6, 8]
    before = read_run(again).metrics
    run(experiment, again, resume=True, stop_at=11)
    # Saved one by one after the full save: layer 0 goes round from class 0, layer 1 from class 1.
    sources = {(0, 0): 4, (0, 1): 6, (0, 2): 8, (0, 3): 2, (1, 1): 4, (1, 2): 6, (1, 3): 8, (1, 0): 2}
    (restore,) = events(again, "restore")
    found = {(layer, class_): int(step) for step, units in restore["experts"].items() for layer, class_ in units}
    assert (restore["step"], restore["dense"], found) == (8, 8, sources)
    lost = lost_updates(before, sources, 8)
    assert restore["updates_lost"] == lost
    tokens = [sum(sum(record["popularity"][layer]) for record in before[:8]) for layer in range(2)]
    assert restore["plt"] == pytest.approx(sum(n / of for n, of in zip(lost, tokens, strict=True)) / 2, rel=1e-12)
    assert restore["plt"] > 0.01
    assert restore["passed_over"] == []
    tally = read_manifest(again / "checkpoints/step-00000008", "").ledger.tally
    assert (tally.num_faults, tally.lost_L.tolist()) == (1, lost)  # so that the next fault does not count them again
    assert [record["step"] for record in read_run(again).metrics] == list(range(1, 12))
    # Now the same tokens are out of more.
    *_, last = events(again, "checkpoint")
    records = read_run(again).metrics
    tokens = [sum(sum(record["popularity"][layer]) for record in records) for layer in range(2)]
    assert last["plt"] == pytest.approx(sum(n / of for n, of in zip(lost, tokens, strict=True)) / 2, rel=1e-12)
    # The report shows what the manifests say.
    shown = coverage_of(read_run(again))
    assert shown.steps_C.tolist() == [2, 4, 6, 8, 9, 8, 10, 11]
    for column, step in ((5, 8), (6, 10)):
        rows = coverage(read_manifest(again / f"checkpoints/step-{step:08}", ""))
        assert [row["step"] for row in rows] == shown.newest_CLE[column].ravel().tolist()


def test_events_say_how_much_of_which_experts_was_saved(experiment, lost):
    saved = events(lost, "checkpoint")
    assert [event["step"] for event in saved] == [2, 4, 6, 8, 9]
    assert [event["experts"] for event in saved] == ["all", [[0], [1]], [[1], [2]], [[2], [3]], "all"]
    assert [event["experts_per_layer"] for event in saved] == [4, 1, 1, 1, 4]
    full, partial = saved[0]["bytes"], saved[1]["bytes"]
    split = split_of(make_step_spec(experiment))
    expert_bytes = sum(split.shapes[name].size * 4 for name in split.expert_names)
    assert full - partial == expert_bytes * 3 // 4
    assert all(event["save_ms"] > 0 and event["stall_ms"] > 0 for event in saved)


def test_experts_are_those_of_the_saves_they_come_from(experiment, lost, tmp_path):
    """Against the same run with full checkpoints, bit for bit."""
    full = replace(experiment, checkpoint=CheckpointConfig(every=2, num_kept=4))
    run(full, tmp_path / "full", stop_at=8)
    names, split, mixed = state_of(experiment, lost, 8)
    plan = plan_restore(lost / "checkpoints", step=8)
    arrays = by_name(mixed)
    whole = {step: by_name(state_of(full, tmp_path / "full", step)[2]) for step in (2, 4, 6, 8)}
    for name in names:
        if name not in split.expert_names:
            np.testing.assert_array_equal(arrays[name], whole[8][name])
            continue
        for (layer, class_), copy in plan.sources.items():
            mine, theirs = (array[0, layer, :, class_] for array in (arrays[name], whole[copy.step][name]))
            np.testing.assert_array_equal(mine, theirs)
            assert copy.step == 8 or np.any(mine != whole[8][name][0, layer, :, class_])


def test_dynamic_k_doubles_after_a_fault_that_was_too_dear(experiment, again):
    setup = replace(experiment, checkpoint=replace(experiment.checkpoint, plt_budget=1e-3))
    run(setup, again, resume=True, stop_at=11)
    (restore,) = events(again, "restore")
    assert (restore["experts_per_layer_before"], restore["experts_per_layer"]) == (1, 2)
    assert restore["plt"] > 1e-3
    saved = [event["experts"] for event in events(again, "checkpoint")]
    assert [len(classes) for classes in saved[-2]] == [2, 2]


class Lost(Exception):
    """The process is gone."""


class Losses:
    """Losses of everything, once before each of some iterations; a ``FailureSource``."""

    def __init__(self, steps):
        self.left = list(steps)

    def failed(self, first_step, last_step):
        if self.left and first_step <= self.left[0] <= last_step:
            raise Lost(self.left.pop(0))
        return frozenset()

    def lost_ranks(self, *_):
        return frozenset()


@pytest.mark.slow
def test_with_a_loss_every_50_iterations_dynamic_k_keeps_lost_tokens_under_their_budget(experiment, tmp_path):
    """K = 1 loses 3 of 50 iterations on average, which is above the budget, and K = 2 loses 1; dropped tokens apart."""
    config, run_dir = replace(experiment.checkpoint, plt_budget=0.045), tmp_path / "run"
    setup, losses = replace(experiment, num_steps=204, checkpoint=config), Losses([52, 102, 152, 202])
    options = TrainOptions(run_dir, "", prepare="none")
    for _ in tuple(losses.left):
        with pytest.raises(Lost):
            train(setup, options, losses)
        options = replace(options, resume=True)
    train(setup, options, losses)
    restores, metrics = events(run_dir, "restore"), read_run(run_dir).metrics
    assert [event["step"] for event in restores] == [50, 100, 150, 200]
    assert [event["experts_per_layer"] for event in restores] == [2, 2, 2, 2]
    assert [event["experts_per_layer_before"] for event in restores] == [1, 2, 2, 2]
    saved = {event["step"]: event["experts"] for event in events(run_dir, "checkpoint")}
    assert {step: len(saved[step][0]) for step in range(4, 204, 2)} == {s: 1 + (s > 50) for s in range(4, 204, 2)}
    lost = np.zeros(2)
    for event in restores:
        sources = {(layer, class_): int(s) for s, units in event["experts"].items() for layer, class_ in units}
        lost += lost_updates(metrics, sources, event["step"])  # between two losses, every expert was saved
        routed = np.sum([record["popularity"] for record in metrics[: event["step"]]], axis=(0, 2))
        assert event["plt"] == pytest.approx(np.mean(lost / routed), rel=1e-12)
    assert restores[0]["plt"] > 0.045
    assert all(event["plt"] < 0.045 for event in restores[1:])


def test_a_damaged_checkpoint_is_passed_over_and_set_aside(experiment, again):
    file = again / "checkpoints/step-00000008/arrays/state/master.head/0.0.0.0.0"
    file.write_bytes(file.read_bytes()[:-1])
    run(experiment, again, resume=True, stop_at=7)
    (restore,) = events(again, "restore")
    assert (restore["step"], restore["archived"]) == (6, ["step-00000008.aside"])
    assert restore["passed_over"] == [
        "step-00000008 is damaged: its file arrays/state/master.head/0.0.0.0.0 is not as it was saved"
    ]
    assert checkpoint_steps(again / "checkpoints") == [6, 7]
    assert [record["step"] for record in read_run(again).metrics] == list(range(1, 8))


@pytest.fixture
def full_disk(monkeypatch, tmp_path):
    """Has writing into run directories fail where it is asked to; pauses are short, and other places this test's."""
    monkeypatch.setattr("swift.checkpoint.saver.RETRY_PAUSES_S", (0.01, 0.01))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))
    monkeypatch.setattr("swift.train.saved_state._MEMORY", tmp_path / "elsewhere")
    write, is_full = writer.write_arrays, []

    def write_or_fail(path, arrays):
        if is_full and is_full[0](path.parent.name) and "elsewhere" not in path.parts:
            raise OSError(28, "No space left on device")
        write(path, arrays)

    monkeypatch.setattr(writer, "write_arrays", write_or_fail)
    return is_full


def test_a_last_checkpoint_that_cannot_be_written_is_kept_elsewhere_and_ends_the_run(experiment, again, full_disk):
    full_disk.append(lambda _: True)
    line = (
        r"the last checkpoint was not saved: stopped; the state after iteration 12 is kept in .*elsewhere.* 8 is there"
    )
    with pytest.raises(RunError, match=line):
        run(experiment, again, resume=True, stop_at=12)
    assert checkpoint_steps(again / "checkpoints") == [6, 8]
    assert events(again, "finish") == []
    failed = events(again, "checkpoint_failed")
    assert {event["step"] for event in failed} == {10, 12}
    assert failed[-2]["error"] == "[Errno 28] No space left on device; trying again in 0.01 s"
    full_disk.clear()
    run(experiment, again, resume=True, stop_at=13)
    assert [event["step"] for event in events(again, "restore")] == [8, 12]
    assert [record["step"] for record in read_run(again).metrics] == list(range(1, 14))


def test_a_record_that_cannot_be_written_either_ends_the_run_in_one_line(experiment, again, full_disk, monkeypatch):
    """A disk that takes nothing at all from iteration 11 on, not even a line on that."""
    full_disk.append(lambda _: True)
    log_step, log_event = RunDirectory.log_step, RunDirectory.log_event

    def fail_late(log):
        def write(self, record_or_event, *arguments, **fields):
            if len(read_run(again).metrics) >= 10:
                raise OSError(28, "No space left on device")
            log(self, record_or_event, *arguments, **fields)

        return write

    monkeypatch.setattr(RunDirectory, "log_step", fail_late(log_step))
    monkeypatch.setattr(RunDirectory, "log_event", fail_late(log_event))
    with pytest.raises(RunError, match="No space left on device: stopped; the state after iteration 10 is kept in"):
        run(experiment, again, resume=True, stop_at=12)


def test_after_the_last_iteration_only_the_end_is_left_to_be_written(experiment, again, full_disk):
    full_disk.append(lambda _: True)
    with pytest.raises(RunError, match="the state after iteration 20 is kept in"):
        run(experiment, again, resume=True)
    assert read_run(again).summary is None
    full_disk.clear()
    assert train(experiment, TrainOptions(again, "the same", prepare="none", resume=True)) == read_run(again).summary
    assert checkpoint_steps(again / "checkpoints")[-1] == 20
    with pytest.raises(SettingError, match="has nothing left to do"):
        run(experiment, again, resume=True)


def test_a_checkpoint_that_cannot_be_written_at_first_is_tried_again(experiment, again, full_disk):
    tries = []
    full_disk.append(lambda name: tries.append(name) or tries.count(".step-00000012.tmp") == 1)
    run(experiment, again, resume=True, stop_at=12)
    assert tries == [".step-00000010.tmp", ".step-00000012.tmp", ".step-00000012.tmp"]
    assert checkpoint_steps(again / "checkpoints")[-2:] == [10, 12]
    assert [event["step"] for event in events(again, "checkpoint_failed")] == [12]


def test_a_checkpoint_that_cannot_be_written_does_not_cost_the_next(experiment, again, full_disk):
    full_disk.append(lambda name: name == ".step-00000010.tmp")
    run(experiment, again, resume=True, stop_at=12)
    assert checkpoint_steps(again / "checkpoints") == [6, 8, 12]
    assert events(again, "checkpoint_failed")


def test_the_record_is_on_the_disk_before_a_checkpoint_counts_on_it(experiment, tmp_path, monkeypatch):
    synced, before = [], []
    monkeypatch.setattr("os.fsync", lambda file: synced.append(Path(os.readlink(f"/proc/self/fd/{file}"))))

    def save(*_, **__):
        before.extend(synced)
        raise OSError("is not written")

    monkeypatch.setattr("swift.train.checkpointer.save_checkpoint", save)
    monkeypatch.setattr("swift.checkpoint.saver.RETRY_PAUSES_S", ())
    run_dir = tmp_path / "run"
    with pytest.raises(RunError, match="is not written"):
        train(experiment, TrainOptions(run_dir, "", prepare="none", stop_at=1))
    assert {run_dir, run_dir / METRICS, run_dir / CLASS_COUNTS} <= {*before}
