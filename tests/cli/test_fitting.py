"""A run that does not fit into memory is refused in a line by every command that runs one, and nothing is written."""

from importlib import import_module

import pytest

from swift.machine import Room
from swift.train import fitting


@pytest.fixture
def leave(monkeypatch):
    """Sets the memory that the machine seems to have; each look at it gets the next number, the last for ever."""

    def set_size(*num_bytes, free=None):
        sizes = list(num_bytes)

        def rooms():
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            return (Room(size if free is None else free, size, 0, "this machine"),)

        monkeypatch.setattr(fitting, "memory_rooms", rooms)

    return set_size


@pytest.mark.parametrize(
    "words",
    [
        ("train", "tiny.gin", "--run-dir", "new/run"),
        ("train", "tiny.gin", "--run-dir", "half", "--resume"),
        ("compare", "tiny.gin", "other.gin", "--run-dir", "new"),
        ("launch", "tiny.gin", "--processes", "1", "--run-dir", "new/run"),
        ("launch", "tiny.gin", "--processes", "2", "--run-dir", "half", "--resume"),
    ],
    ids=" ".join,
)
def test_what_shapes_alone_rule_out_is_refused_by_each_command(half, here, leave, refusal, monkeypatch, words):
    monkeypatch.setattr(import_module("swift.cli.launch"), "configure_jax", lambda *_, **__: None)  # it has started
    (here / "other.gin").write_text("include 'tiny.gin'\nExperiment.seed = 3\n")
    record = sorted((path, path.stat().st_mtime_ns) for path in half.rglob("*"))
    leave(1000)
    line = refusal(*words)
    assert line.startswith("Experiment.ranks = 'emulated': 2 devices take ")
    assert "of memory or more (" in line
    assert "and this machine has 0 MB, of which 0 MB are free; less with " in line
    assert sorted((path, path.stat().st_mtime_ns) for path in half.rglob("*")) == record


def test_what_only_the_program_shows_is_refused_before_there_is_a_state(leave, refusal):
    leave(10**12, 1000)
    line = refusal("train", "tiny.gin", "--run-dir", "new")
    assert " of memory (" in line
    assert "other buffers" in line


def test_a_run_that_may_fit_is_warned_and_runs(leave, tell):
    leave(10**12, free=1000)
    told = tell("train", "tiny.gin", "--run-dir", "new", "--stop-at", "1")
    assert told.code == 0, told.err
    assert "memory may not be enough: 2 devices take" in told.err
