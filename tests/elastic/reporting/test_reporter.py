"""The record of a run of processes, as what they tell comes in."""

import threading
from unittest.mock import Mock

import pytest

from swift.elastic.reporting.journal import Journal
from swift.elastic.reporting.reporter import BackgroundCalls, Reporter
from swift.errors import RunError
from swift.runlog.reading import read_run
from swift.runlog.run_directory import RunDirectory


def test_a_record_is_in_the_file_once_it_is_written(tmp_path):
    """A file system that stalls keeps the thread that writes, and nobody else."""
    thawed = threading.Event()
    with RunDirectory.create(tmp_path / "run", "") as directory, BackgroundCalls() as behind:
        reporter = Reporter(Journal(0.0), Mock(), directory, behind, 2)
        behind.call(thawed.wait)
        reporter.record({"step": 3, "loss": 1.0})
        assert (reporter.written, reporter.on_file) == (3, 2)
        thawed.set()
        behind.settle()
        assert reporter.on_file == 3


def test_a_record_that_cannot_be_written_is_not_in_the_file(tmp_path):
    with RunDirectory.create(tmp_path / "run", "") as directory:
        behind = BackgroundCalls()
        reporter = Reporter(Journal(0.0), Mock(), directory, behind, 2)
        is_told = threading.Event()  # else the thread may be so quick that the call after it reports the error

        def no_room(_record):
            is_told.wait()
            raise RunError("no room")

        directory.log_step = no_room
        reporter.record({"step": 3, "loss": 1.0})
        is_told.set()
        with pytest.raises(RunError, match="no room"):
            behind.settle()
        with pytest.raises(RunError, match="no room"):
            reporter.raise_failed()
        assert reporter.on_file == 2


def test_iterations_that_nobody_has_told_are_named_once(tmp_path):
    display = Mock()
    with RunDirectory.create(tmp_path / "run", "") as directory, BackgroundCalls() as behind:
        reporter = Reporter(Journal(0.0), display, directory, behind, 2)
        for step in (3, 3, 7, 4, 7, 8):
            reporter.record({"step": step, "loss": 1.0})
    run = read_run(tmp_path / "run")
    assert run.metrics.steps_T.tolist() == [3, 7, 8]
    (event,) = run.events
    assert (event["event"], event["step"], event["first"], event["last"]) == ("records_missing", 3, 4, 6)
    assert [call.args[0] for call in display.note.call_args_list] == [
        "iterations without a record: 4-6; the members died before reporting them"
    ]
