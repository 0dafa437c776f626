"""A record that cannot be written ends a run with a sentence; TensorBoard's files never do."""

import resource
import threading
from contextlib import contextmanager

import pytest

from swift.errors import RunError, SettingError
from swift.runlog import EVENTS, METRICS, RunDirectory, check_new_run
from swift.runlog.tensorboard import open_board


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
    done = threading.Event()

    def log():
        board = open_board(tmp_path / "tensorboard", 0)
        for step in range(5_000):
            board.add_scalar("loss", 1.0, step)
        board.close()
        done.set()

    with files_limited_to(10_000):
        threading.Thread(target=log, daemon=True).start()
        assert done.wait(30), "it waits for a thread that has died"


def test_tensorboard_reads_what_was_written(tmp_path):
    board = open_board(tmp_path / "tensorboard", 3)
    board.add_scalar("loss", 1.5, 4)
    board.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    assert path.name.startswith("events.out.tfevents")
    assert b"loss" in path.read_bytes()
