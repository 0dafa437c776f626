"""A run directory of which another process is the owner: who writes comes second, who reads does not care."""

import json

import pytest

from swift.runlog.lease import Lease, acquire_lease
from swift.runlog.reading import read_run

WRITERS = {
    "a run that goes on": "train tiny.gin --run-dir half --resume",
    "another run": "train tiny.gin --run-dir new",
    "processes that go on": "launch tiny.gin --processes 1 --run-dir half --resume",
    "other processes": "launch tiny.gin --processes 1 --run-dir new",
}


def contents(path):
    return {file: file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


@pytest.mark.parametrize("command", WRITERS.values(), ids=WRITERS)
def test_who_comes_second_is_told_in_a_line_and_changes_nothing(refusal, half, command, here):
    (half / "checkpoints/.step-00000006.tmp").mkdir()  # what the first is saving
    (here / "new").mkdir()
    directory = command.split("--run-dir ")[1].split()[0]
    with acquire_lease(here / directory) as lease:
        before = contents(here)
        line = refusal(*command.split())
        assert line.startswith(f"--run-dir = {directory!r}: belongs to {lease.owner} since {lease.owner.since} (")
        assert line.endswith(" s old): wait for it or end it")
        assert contents(here) == before
        assert (half / "checkpoints/.step-00000006.tmp").is_dir()


def test_readers_do_not_ask(tell, half):
    with acquire_lease(half):
        for command in ("report half", "checkpoint verify half", "checkpoint list half"):
            told = tell(*command.split())
            assert told.code == 0, told.err


def test_a_run_whose_directory_was_taken_stops_and_writes_no_more(tell, half, monkeypatch):
    """A run that was suspended for long, on a file system that others see."""
    check, left = Lease.check, []

    def look(lease, **how):
        if not left and '"step": 5' in (half / "metrics.jsonl").read_text():
            (half / ".lease-1.json").rename(half / ".lease-2.json")  # with another owner
            said = json.loads((half / ".lease-2.json").read_text())
            (half / ".lease-2.json").write_text(json.dumps(said | {"token": "other", "pid": 77}))
            lease.renew()
            left.append(contents(half))
        check(lease, **how)

    monkeypatch.setattr(Lease, "check", look)
    told = tell("train", "tiny.gin", "--run-dir", "half", "--resume")
    assert told.code == 3, told.err
    assert "Traceback" not in told.err
    line = told.err.splitlines()[-1]
    assert line.startswith("swift: half no longer belongs to this process: process 77 on ")
    assert "continue with --resume when no other process does" in line
    after = contents(half)
    assert {path.name: content for path, content in after.items() if "tensorboard" not in str(path)} == {
        path.name: content for path, content in left[0].items() if "tensorboard" not in str(path)
    }
    assert [record["step"] for record in read_run(half).metrics] == [1, 2, 3, 4, 5]


def test_nothing_is_left_of_a_directory_that_was_made_for_nothing(refusal):
    line = refusal("train", "tiny.gin", "--run-dir", "a/b/new", "--set", "TextFiles.pattern=/nowhere/*")
    assert line.startswith("TextFiles.pattern = ")
