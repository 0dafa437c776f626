"""Damage to checkpoints, and full disks: no restore gives a state that was not saved."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from swift.checkpoint import array_files, manifest, writer
from swift.checkpoint.arrays import Verifier
from swift.checkpoint.inspection import find_damage
from swift.checkpoint.manifest import archive_newer, checkpoint_steps
from swift.checkpoint.reader import plan_restore
from swift.errors import SettingError

UNITS = [(layer, class_) for layer in range(4) for class_ in range(4)]


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def expert_files(run, step, layer, class_):
    return [run.directory / f"step-{step:08d}/arrays/state/expert.{layer}.{class_}.{t}" for t in ("float32", "float64")]


@pytest.mark.parametrize(
    ("damage", "first"), [(flip, 0), pytest.param(truncate, 2, marks=pytest.mark.slow), (Path.unlink, 4)]
)
def test_every_file_of_every_step_is_held_against_what_was_saved(small_run, expert_of, damage, first, capfd):
    """Damage to any file is found, costs what it must, is named, and never gives a wrong number.

    Each kind of damage is done to every seventh file, from another first one.
    """
    run = small_run(experts_per_layer=2, every=2).run(6)
    whole = {path: path.read_bytes() for path in run.directory.rglob("*") if path.is_file()}
    files, told = [path for path, content in whole.items() if content], list[str]()
    assert len(files) > 60
    for file in sorted(files)[first::7]:
        damage(file)
        found = list(find_damage(run.directory, None, Verifier(run.directory)))
        assert all(file.relative_to(run.directory).parts[0] in reason for reason in found)
        assert found or (damage is Path.unlink and file.name == "manifest.json")  # then it is as if never saved
        plan = run.lose_all()
        told += plan.passed_over
        saved = run.saved[plan.step]
        np.testing.assert_array_equal(run.state["master"]["head"], saved["master"]["head"])
        for unit, copy in plan.sources.items():
            np.testing.assert_equal(expert_of(run.state, *unit), expert_of(run.saved[copy.step], *unit))
        for path, content in whole.items():
            if not path.is_file() or path.read_bytes() != content:
                path.write_bytes(content)
    assert len(told) > 5
    assert all("is damaged: its file" in reason for reason in told)
    assert capfd.readouterr() == ("", "")


def test_a_checkpoint_that_has_lost_its_manifest_is_named(small_run):
    """One that a removal has left without a manifest, for experts that a later checkpoint needs, is none."""
    run = small_run(experts_per_layer=2, every=2, num_kept=2).run(8)
    assert (run.directory / "step-00000004/arrays").is_dir()
    assert checkpoint_steps(run.directory) == [6, 8]
    assert list(find_damage(run.directory, None, Verifier(run.directory))) == []
    (run.directory / "step-00000008" / "manifest.json").unlink()
    reason = "step-00000008 holds no checkpoint: there is no manifest.json in it"
    assert list(find_damage(run.directory, None, Verifier(run.directory))) == [reason]
    plan = plan_restore(run.directory)
    assert (plan.step, plan.passed_over) == (6, (reason,))
    (run.directory / "step-00000006" / "manifest.json").unlink()
    with pytest.raises(SettingError, match=r"cannot be restored: step-00000008 holds no .*step-00000006 holds no"):
        plan_restore(run.directory)
    assert len(list(find_damage(run.directory, None, Verifier(run.directory)))) >= 2


def test_a_manifest_that_is_signed_and_incomplete_costs_a_line(small_run):
    """Whatever field is missing or of another kind: another program, or another version, has written it."""
    run = small_run(experts_per_layer=2, every=2).run(4)
    path = run.directory / "step-00000004"
    fields = json.loads((path / "manifest.json").read_bytes().partition(b"\n")[2])
    for name in fields:
        rest = {key: value for key, value in fields.items() if key != name}
        for wrong in (rest, rest | {name: None}, rest | {name: 7.5}):
            manifest.write_signed(path, wrong)
            with pytest.raises(SettingError):
                manifest.read_manifest(path, "DIR")
            assert plan_restore(run.directory).step == 2
            assert len(list(find_damage(run.directory, None, Verifier(run.directory)))) == 1
    for text in (b"[]", b"7", b"{"):
        (path / "manifest.json").write_bytes(manifest.digest(text).encode() + b"\n" + text)
        assert plan_restore(run.directory).step == 2


def test_a_removal_during_a_verification_is_no_damage(small_run, monkeypatch):
    run = small_run(experts_per_layer=2, every=2, num_kept=4).run(8)
    check, files = Verifier.file, []

    def check_and_remove(checker, step, name, expected):
        files.append(name)
        if len(files) == 3:
            manifest.delete_old_checkpoints(run.directory, 1)
        return check(checker, step, name, expected)

    monkeypatch.setattr(Verifier, "file", check_and_remove)
    assert list(find_damage(run.directory, None, Verifier(run.directory))) == []
    assert checkpoint_steps(run.directory) == [8]


def test_a_damaged_expert_falls_back_to_the_copy_before_and_its_updates_are_lost(small_run, expert_of):
    run = small_run(experts_per_layer=2, every=2).run(4)
    unit = (1, 2)
    flip(next(expert_files(run, 4, *unit)[0].glob("[0-9]*")))
    sound = {u: 2 if u == unit else copies[0].step for u, copies in run.ledger.copies.items()}
    before = run.ledger
    plan = run.lose_all()
    name = "arrays/state/expert.1.2.float32/0.0.0"
    assert plan.passed_over == (
        f"expert 2 of layer 1: step-00000004 is damaged: its file {name} is not as it was saved",
    )
    assert {u: copy.step for u, copy in plan.sources.items()} == sound
    np.testing.assert_equal(expert_of(run.state, *unit), expert_of(run.saved[2], *unit))
    newest, older = before.copies[unit]
    lost = plan.tally.lost_L[1] - sum(
        before.tally.contained_LE[1, c] - before.copies[1, c][0].contained for c in range(4)
    )
    assert lost == newest.contained - older.contained > 0
    assert all(copy.step == 2 for copy in run.ledger.copies[unit])


def test_a_file_that_the_disk_does_not_give_back_is_one_that_is_damaged(small_run, expert_of, monkeypatch):
    run = small_run(experts_per_layer=2, every=2).run(4)
    bad, read = next(expert_files(run, 4, 1, 2)[0].glob("[0-9]*")), manifest.file_digest

    def fail(path):
        if path == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(path)

    monkeypatch.setattr(manifest, "file_digest", fail)
    (reason,) = run.lose_all().passed_over
    assert reason.endswith("its file arrays/state/expert.1.2.float32/0.0.0 cannot be read: Input/output error")
    np.testing.assert_equal(expert_of(run.state, 1, 2), expert_of(run.saved[2], 1, 2))


def test_without_a_sound_copy_of_an_expert_an_older_iteration_is_restored(small_run):
    run = small_run(experts_per_layer=2, every=2, num_kept=2).run(6)
    unit = (0, 0)
    newest, older = run.ledger.copies[unit]
    assert (newest.step, older.step) == (4, 2)
    for step in (4, 2):
        truncate(next(expert_files(run, step, *unit)[0].glob("[0-9]*")))
    with pytest.raises(
        SettingError, match=r"cannot be restored: step-00000006 has no sound copy of expert 0 of layer 0"
    ):
        plan_restore(run.directory)


def test_a_damaged_dense_part_gives_the_iteration_before_as_a_whole(small_run, expert_of):
    run = small_run(experts_per_layer=2, every=2).run(6)
    flip(run.directory / "step-00000006/arrays/state/master.head/0.0.0.0.0")
    with pytest.raises(SettingError, match=r"cannot be restored: step-00000006 is damaged: its file .*master\.head"):
        plan_restore(run.directory, step=6)
    plan = run.lose_all()
    assert plan.step == 4
    assert plan.passed_over[0].startswith("step-00000006 is damaged")
    for unit, copy in plan.sources.items():
        assert copy.step <= 4
        np.testing.assert_equal(expert_of(run.state, *unit), expert_of(run.saved[copy.step], *unit))


def spoil(monkeypatch, name, change=lambda array: array + 1):
    """Has one array written with other numbers than those in memory."""
    write = writer.write_arrays

    def write_spoilt(path, arrays):
        write(path, arrays | ({name: change(arrays[name])} if name in arrays else {}))

    monkeypatch.setattr(writer, "write_arrays", write_spoilt)


@pytest.mark.parametrize("name", ["master.head", "step", "expert.1.2.float32", "expert.1.2.float64"])
def test_what_was_not_written_as_it_is_in_memory_is_not_a_checkpoint_and_costs_none(small_run, monkeypatch, name):
    """Only one checkpoint is kept, and it goes when the next one has been read back."""
    run = small_run(experts_per_layer="all", every=2, num_kept=1).run(2)
    before = {path: path.read_bytes() for path in run.directory.rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:
        spoil(patch, name)
        with pytest.raises(OSError, match=f"the values of {name} are not those that were saved"):
            run.run(4)
    assert {path: path.read_bytes() for path in run.directory.rglob("*") if path.is_file()} == before
    run.save()
    assert checkpoint_steps(run.directory) == [4]


@pytest.mark.parametrize("change", [lambda array: array.astype("float32"), lambda array: array.reshape(-1)])
def test_an_array_that_was_written_with_another_type_or_shape_is_told(small_run, monkeypatch, change):
    run = small_run(every=2)
    spoil(monkeypatch, "moments.head", change)
    with pytest.raises(OSError, match=r"moments\.head was float64\[2, 1, 2, 1, 3\] and is stored as float"):
        run.run(2)


@pytest.fixture
def unchecked(monkeypatch):
    """Has checkpoints written as by those who did not read them back."""

    def write(run, last, name, change=lambda array: array + 1):
        with monkeypatch.context() as patch:
            patch.setattr(writer, "check_written", lambda *_: None)
            spoil(patch, name, change)
            run.run(last)

    return write


def test_a_dense_part_with_wrong_numbers_gives_the_iteration_before_and_is_found(small_run, unchecked):
    """The digests of files are of what was written; those of values are of what was to be."""
    run = small_run(experts_per_layer=2, every=2).run(4)
    unchecked(run, 6, "master.head")
    reason = "step-00000006 is damaged: the values of master.head are not those that were saved"
    assert list(find_damage(run.directory, None, Verifier(run.directory))) == [reason]
    with pytest.raises(SettingError, match=reason):
        plan_restore(run.directory, step=6)
    plan = run.lose_all()
    assert (plan.step, plan.passed_over) == (4, (reason,))
    np.testing.assert_array_equal(run.state["master"]["head"], run.saved[4]["master"]["head"])


def test_an_expert_with_wrong_numbers_comes_from_the_copy_before_and_is_found(small_run, expert_of, unchecked):
    run = small_run(experts_per_layer=2, every=2).run(2)
    unchecked(run, 4, "expert.1.2.float32")
    names = "expert.1.2.float32 and expert.1.2.float64"
    reason = f"step-00000004 is damaged: the values of {names} are not those that were saved"
    assert list(find_damage(run.directory, None, Verifier(run.directory))) == [reason]
    plan = run.lose_all()
    assert plan.passed_over == (f"expert 2 of layer 1: {reason}",)
    assert plan.sources[1, 2].step == 2
    np.testing.assert_equal(expert_of(run.state, 1, 2), expert_of(run.saved[2], 1, 2))


def test_numbers_that_are_not_finite_are_found(small_run):
    """Numbers that were not finite in memory already: all digests are right."""
    run = small_run(every=2)
    run.state["master"]["head"][0, 0, 1, 0, 2] = np.nan
    run.run(2)
    assert list(find_damage(run.directory, None, Verifier(run.directory))) == [
        "step-00000002 is damaged: master.head has values that are not finite"
    ]


def test_what_was_set_aside_goes_with_the_checkpoint_that_is_further_and_no_sooner(small_run):
    run = small_run(every=2, num_kept=3).run(6)
    archive_newer(run.directory, 2)
    run.lose_all()
    run.run(4)
    assert aside(run) == ["step-00000006.aside"]
    run.run(6)
    assert aside(run) == []


def test_what_was_set_aside_stays_while_no_checkpoint_can_be_written(small_run, monkeypatch):
    run = small_run(every=2, num_kept=3).run(6)
    archive_newer(run.directory, 2)
    run.lose_all()
    spoil(monkeypatch, "step")
    run.config = replace(run.config, every=6)
    with pytest.raises(OSError, match="not those that were saved"):
        run.run(6)
    assert aside(run) == ["step-00000004.aside", "step-00000006.aside"]


def aside(run):
    return sorted(path.name for path in run.directory.glob("*.aside"))


def test_a_manifest_that_lags_is_not_taken_for_the_newest(small_run):
    """A manifest of an older iteration in the place of a newer one, or a newest one that did not reach the disk."""
    run = small_run(experts_per_layer=1, every=2).run(6)
    old, new = (run.directory / f"step-0000000{step}/manifest.json" for step in (4, 6))
    content = new.read_bytes()
    new.write_bytes(old.read_bytes())
    plan = plan_restore(run.directory)
    assert plan.step == 4
    assert plan.passed_over == ("step-00000006 has the manifest of another checkpoint, of iteration 4",)
    new.unlink()
    assert plan_restore(run.directory).step == 4
    new.write_bytes(content[: len(content) // 2])
    assert plan_restore(run.directory).step == 4


def test_a_directory_from_another_life_is_not_taken_for_the_copy_that_was_meant(small_run):
    """The manifest of iteration 6 needs experts of iteration 2; what lies there is of another run."""
    run = small_run(experts_per_layer=1, every=2).run(6)
    other = small_run(experts_per_layer=1, every=2)
    other.directory, other.random = run.directory.with_name("other"), np.random.default_rng(1)
    other.run(2)
    for file in other.directory.glob("step-00000002/arrays/state/expert.*/0.0.0"):
        mine = run.directory / file.relative_to(other.directory)
        if mine.exists():
            mine.write_bytes(file.read_bytes())
    with pytest.raises(SettingError, match="has no sound copy of expert"):
        plan_restore(run.directory)


@pytest.mark.parametrize("where", ["arrays", "manifest"])
def test_a_full_disk_costs_nothing_that_was_there(small_run, monkeypatch, where):
    run = small_run(experts_per_layer=1, every=2).run(4)
    before = {path: path.read_bytes() for path in run.directory.rglob("*") if path.is_file()}
    write = writer.write_arrays

    def fill_up(path, arrays):
        write(path, arrays)
        truncate(max(path.rglob("*"), key=lambda file: file.is_file() and file.stat().st_size))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def cannot_write(path, content):
        path.write_bytes(content[:-9])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if where == "arrays":
            patch.setattr(writer, "write_arrays", fill_up)
        else:
            patch.setattr(manifest, "replace_file", cannot_write)
        with pytest.raises(OSError, match="No space left on device"):
            run.run(6)
    assert {path: path.read_bytes() for path in run.directory.rglob("*") if path.is_file()} == before
    assert checkpoint_steps(run.directory) == [2, 4]
    run.run(8)
    assert run.lose_all().step == 8


def test_a_disk_without_room_is_not_filled(small_run, monkeypatch):
    run = small_run(experts_per_layer=1, every=2).run(2)
    room = [*os.statvfs(run.directory)]
    room[4] = 0  # f_bavail
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda _: os.statvfs_result(room))
        patch.setattr(array_files.ocp, "save_async", None)
        with pytest.raises(OSError, match=r"No space left on device: \d+ bytes are needed, \d+ are free"):
            run.run(4)
    run.run(6)
    assert checkpoint_steps(run.directory) == [2, 6]


def test_a_checkpoint_has_its_name_on_the_disk_before_older_ones_go(small_run, monkeypatch):
    run, there = small_run(experts_per_layer="all", every=2, num_kept=1).run(2), []
    monkeypatch.setattr(manifest, "sync_directory", lambda path: there.append((path, checkpoint_steps(path))))
    run.run(4)
    assert there == [(run.directory, [2, 4])]
    assert checkpoint_steps(run.directory) == [4]


def test_a_checkpoint_that_goes_and_is_half_removed_does_not_count(small_run, monkeypatch):
    run = small_run(experts_per_layer="all", every=2, num_kept=1).run(2)

    def break_off(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(manifest, "_keep_only", break_off)
    run.run(4)
    assert checkpoint_steps(run.directory) == [4]
