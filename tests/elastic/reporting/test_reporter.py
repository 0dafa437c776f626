"""The record of a run of processes, as what they tell comes in."""

from unittest.mock import Mock

from swift.elastic.reporting.background_calls import BackgroundCalls
from swift.elastic.reporting.journal import Journal
from swift.elastic.reporting.reporter import Reporter
from swift.runlog import RunDirectory, read_run


def test_iterations_that_nobody_has_told_are_named_once(tmp_path):
    display = Mock()
    with RunDirectory.create(tmp_path / "run", "") as directory, BackgroundCalls() as behind:
        reporter = Reporter(Journal(0.0), display, directory, behind, 2)
        for step in (3, 3, 7, 4, 7, 8):
            reporter.record({"step": step, "loss": 1.0})
    run = read_run(tmp_path / "run")
    assert run.metrics.steps_T.tolist() == [3, 7, 8]
    (event,) = run.events
    assert (event["event"], event["step"], event["first"], event["last"]) == ("not_recorded", 3, 4, 6)
    assert [call.args[0] for call in display.note.call_args_list] == [
        "iterations without a record: 4-6; the members died before reporting them"
    ]
