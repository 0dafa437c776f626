"""A record that cannot be written ends a run with a sentence; TensorBoard's files never do."""

import resource
import struct
import time
from contextlib import contextmanager

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from swift.errors import RunError, SettingError
from swift.runlog.files import EVENTS, METRICS
from swift.runlog.observers import Board
from swift.runlog.reading import check_new_run
from swift.runlog.run_directory import RunDirectory


@contextmanager
def files_limited_to(num_bytes):
    """Every write beyond so many bytes of a file fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("name", [METRICS, EVENTS])
def test_a_record_that_cannot_be_written_is_told_in_a_sentence(tmp_path, name):
    directory = RunDirectory.create(tmp_path / "run", "")

    def log():
        for step in range(1, 10_000):
            if name == METRICS:
                directory.log_step({"step": step, "loss": 1.0})
            else:
                directory.log_event("checkpoint", step)

    with files_limited_to(10_000):
        with pytest.raises(RunError, match=r"the record of the run cannot be written: .*--resume continues"):
            log()
        directory.close()  # nothing more to tell


def test_a_run_that_cannot_be_begun_leaves_no_run(tmp_path):
    (tmp_path / "tensorboard").write_text("in the way")
    with pytest.raises(SettingError, match=r"--run-dir = .*: cannot be made a directory: File exists"):
        RunDirectory.create(tmp_path, "Experiment.num_steps = 1")
    check_new_run(tmp_path)


def test_logging_goes_on_where_tensorboard_cannot_be_written(tmp_path):
    board = Board(tmp_path / "tensorboard", 0)
    with files_limited_to(10_000):
        for step in range(5_000):
            board.add({"loss": 1.0}, step)
        board.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    assert path.stat().st_size <= 10_000


def events_in(directory):
    """The events of the file in a directory, without their checksums."""
    (path,) = directory.iterdir()
    assert path.name.startswith("events.out.tfevents")
    content = path.read_bytes()
    while content:
        (size,) = struct.unpack("<Q", content[:8])
        yield Event.FromString(content[12 : 12 + size])
        content = content[16 + size :]


def test_tensorboard_reads_what_was_written(tmp_path, monkeypatch):
    """Also where the clock is set, by more than a system call can wait."""
    board = Board(tmp_path / "tensorboard", 3)
    began = time.time()
    for step, days in enumerate((0, -400, 400), 4):
        monkeypatch.setattr("time.time", lambda days=days: began + days * 86_400)
        board.add({"train/loss": step / 2, "train/lr": 0.5}, step)
    board.close()
    version, _, start, *scalars = events_in(tmp_path / "tensorboard")
    assert version.file_version == "brain.Event:2"
    assert (start.step, start.session_log.status) == (4, SessionLog.START)
    found = [(event.step, value.tag, value.simple_value) for event in scalars for value in event.summary.value]
    assert found == [(step, tag, x) for step in (4, 5, 6) for tag, x in (("train/loss", step / 2), ("train/lr", 0.5))]


def test_a_long_iteration_is_in_the_file_at_once(tmp_path, monkeypatch):
    board = Board(tmp_path / "tensorboard", 0)
    later = time.monotonic() + 11
    monkeypatch.setattr("time.monotonic", lambda: later)
    board.add({"loss": 1.5}, 1)
    assert [event.step for event in events_in(tmp_path / "tensorboard")][3:] == [1]
    board.close()
