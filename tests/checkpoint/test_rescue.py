"""A checkpoint that cannot be written where it belongs is kept elsewhere, and comes back whole or not at all."""

import errno
import json
import os
import shutil
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

from swift.checkpoint.manifest import checkpoint_steps
from swift.checkpoint.reader import load_plan, plan_restore
from swift.errors import RunError
from swift.train import saved_state
from swift.train.saved_state import fallback_directories, import_fallback, save_fallback


@pytest.fixture
def run(small_run, tmp_path, monkeypatch):
    """A run that has saved iterations 2 and 4 and is at 6; its fallback directories are of this test."""
    tops = tmp_path / "disk", tmp_path / "memory"
    for top in tops:
        top.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tops[0]))
    monkeypatch.setattr(saved_state, "_MEMORY", tops[1])
    run = small_run(every=2, num_kept=3).run(4)
    begins(run, "2026-01-01")
    run.config = type(run.config)(every=100, num_kept=3)
    return run.run(6)


def begins(run, time):
    (run.directory.parent / "events.jsonl").write_text(json.dumps({"time": time, "event": "start", "step": 0}) + "\n")


def write(run, place):
    home, run.directory = run.directory, place
    try:
        run.save(full=True)
    finally:
        run.directory = home


def keep(run):
    return save_fallback(run.directory, run.step, lambda place: write(run, place))


def test_it_is_kept_and_taken_back(run):
    said = keep(run)
    place = fallback_directories(run.directory)[0]
    assert said.startswith(f"the state after iteration 6 is kept in {place} on ")
    assert said.endswith(
        f"resume there with --run-dir {run.directory.parent} --resume, which takes it from that directory"
    )
    assert checkpoint_steps(place) == [6]
    assert checkpoint_steps(run.directory) == [2, 4]
    (line,) = import_fallback(run.directory)
    assert line == f"the checkpoint of iteration 6 was kept in {place} and is now in {run.directory}"
    assert not place.exists()
    plan = plan_restore(run.directory)
    assert (plan.step, plan.passed_over) == (6, ())
    jax.tree.map(np.testing.assert_array_equal, load_plan(run.directory, plan, run.split), run.state)
    assert import_fallback(run.directory) == []


def test_where_one_place_has_no_room_the_next_one_may(run):
    first, second = fallback_directories(run.directory)

    def fail_in_the_first(place):
        if place == first:
            (place / "half").mkdir()
            shutil.rmtree(place / "half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(run, place)

    said = save_fallback(run.directory, 6, fail_in_the_first)
    assert f"is kept in {second} on " in said
    assert "which is memory and does not outlast a restart" in said
    assert not first.exists()
    assert len(import_fallback(run.directory)) == 1


def test_where_no_place_has_room_all_of_them_are_told(run):
    def fail(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(RunError) as caught:
        save_fallback(run.directory, 6, fail)
    assert str(caught.value) == "; ".join(
        f"{place}: [Errno 28] No space left on device" for place in fallback_directories(run.directory)
    )
    assert not any(place.exists() for place in fallback_directories(run.directory))


def test_what_somebody_else_may_have_put_there_is_not_taken(run):
    keep(run)
    place = fallback_directories(run.directory)[0]
    place.chmod(0o770)
    assert import_fallback(run.directory) == []
    place.chmod(0o700)
    place.rename(place.with_name("elsewhere"))
    place.symlink_to(place.with_name("elsewhere"))
    assert import_fallback(run.directory) == []
    assert checkpoint_steps(run.directory) == [2, 4]
    fallback_directories(run.directory)[1].write_text("a file")
    with pytest.raises(RunError, match=r"belongs to somebody else.*File exists"):
        keep(run)


def test_another_run_in_the_same_directory_does_not_take_it(run):
    keep(run)
    begins(run, "2026-01-02")
    assert import_fallback(run.directory) == []
    begins(run, "2026-01-01")
    assert len(import_fallback(run.directory)) == 1


@pytest.mark.parametrize("is_linked", [False, True])
def test_a_run_that_was_moved_to_where_there_is_room_takes_it_and_a_copy_of_it_does_not(run, is_linked):
    home, copy, moved = (run.directory.parent / name for name in ("home", "copy", "moved"))
    home.mkdir()
    run.directory = run.directory.rename(home / "checkpoints")
    begins(run, "2026-01-01")
    keep(run)
    shutil.copytree(home, copy)
    assert import_fallback(copy / "checkpoints") == []
    home.rename(moved)
    if is_linked:
        home.symlink_to(moved)
    assert len(import_fallback(moved / "checkpoints")) == 1
    assert checkpoint_steps(moved / "checkpoints") == [2, 4, 6]
    assert list(Path(tempfile.gettempdir()).iterdir()) == []


def test_what_is_older_than_a_checkpoint_in_its_place_goes(run):
    keep(run)
    run.run(8)
    run.save()
    assert import_fallback(run.directory) == []
    assert not fallback_directories(run.directory)[0].exists()
    assert checkpoint_steps(run.directory) == [2, 4, 8]


def test_what_is_damaged_is_passed_over_and_stays(run):
    keep(run)
    place = fallback_directories(run.directory)[0]
    file = place / "step-00000006/arrays/state/master.head/0.0.0.0.0"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    (line,) = import_fallback(run.directory)
    assert line.startswith(f"passed over: {place}/step-00000006 is damaged: its file arrays/state/master.head/")
    assert place.exists()
    assert checkpoint_steps(run.directory) == [2, 4]
    assert sorted(path.name for path in run.directory.iterdir()) == ["step-00000002", "step-00000004"]


def test_what_cannot_be_brought_back_yet_stays(run, monkeypatch):
    keep(run)
    place = fallback_directories(run.directory)[0]

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copytree", fail)
        with pytest.raises(
            RunError, match=f"is kept in {place}, cannot be brought to .*: No space left on device: make"
        ):
            import_fallback(run.directory)
    assert sorted(path.name for path in run.directory.iterdir()) == ["step-00000002", "step-00000004"]
    assert len(import_fallback(run.directory)) == 1


def test_places_do_not_depend_on_how_the_run_is_named(run, monkeypatch):
    monkeypatch.chdir(run.directory.parent)
    assert fallback_directories(Path("checkpoints")) == fallback_directories(run.directory)
