"""Answers of the services: what the run records of them."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from swift.checkpoint.saver import FailureReport, WriterAction, WriteRequest
from swift.elastic.coordinator.service_clients import CHECKPOINT_SERVICE
from swift.elastic.coordinator.supervisor import ServiceMonitor
from swift.elastic.membership.messages import StateId
from swift.elastic.transport.messages import StateRestored
from swift.errors import RunError
from swift.report.history import history_of, incidents_of
from swift.runlog.files import Metrics
from swift.runlog.reading import Run


class Recorder:
    """A reporter that keeps events as a record does."""

    written = 4

    def __init__(self):
        self.events = [{"event": "start", "step": 0, "pipelines": 1, "stages": 1, "ranks": 3}]

    def note(self, event, step, _, **fields):
        self.events.append({"event": event, "step": step, **fields})

    def saved(self, step):
        pass


@pytest.mark.parametrize(
    ("is_resharded", "event", "said"),
    [
        (True, "reshard", "the state is resharded for the live ranks"),
        (False, "restore", "from the checkpoint of iteration 4"),
    ],
    ids=["resharded", "restored"],
)
def test_a_state_that_is_there_again_is_an_event_that_the_report_knows(is_resharded, event, said):
    reporter, facts = Recorder(), {"ranks": 2, "ranks_before": 3}
    answer = StateRestored(StateId(5, 4), [], facts, is_resharded=is_resharded)
    checkpoints = SimpleNamespace(take_answer=lambda _: answer)
    monitor = ServiceMonitor(SimpleNamespace(reporter=reporter, checkpoints=checkpoints))
    membership = SimpleNamespace(awaits_state=lambda generation: generation == 5)
    assert monitor.take_checkpoint_answer("", membership).stamp == StateId(5, 4)
    assert reporter.events[1:] == [{"event": event, "step": 4, "generation": 5, **facts}]
    timed = [one | {"time": "2026-01-01T00:00:00+00:00"} for one in reporter.events]
    run = Run(Path("run"), "run", "", Metrics.of([]), timed, None)
    assert [one.what for one in incidents_of(run, history_of(run))] == [said]


def test_a_save_that_has_failed_is_an_event_and_the_last_word_on_it():
    reporter, report = Recorder(), FailureReport(WriteRequest("save", 4), "full; trying again in 2 s")
    monitor = ServiceMonitor(
        SimpleNamespace(reporter=reporter, checkpoints=SimpleNamespace(take_answer=lambda _: report))
    )
    assert monitor.take_checkpoint_answer("", None) is None
    assert monitor.failure == report.line
    assert reporter.events[1:] == [{"event": "checkpoint_failed", "step": 4, "error": report.reason}]


@pytest.mark.parametrize("action", [WriterAction.START, WriterAction.GIVE_UP])
def test_a_run_ends_when_its_checkpoint_service_is_given_up_and_not_before(action):
    checkpoints = SimpleNamespace(on=lambda _: (action,))
    spec = SimpleNamespace(log=lambda name: f"logs/{name}.log")
    context = SimpleNamespace(reporter=Recorder(), checkpoints=checkpoints, spec=spec, remedy="resume")
    monitor = ServiceMonitor(context)
    if action is WriterAction.START:
        monitor.died(CHECKPOINT_SERVICE)
        return
    with pytest.raises(RunError, match=r"died too often, see logs/checkpoint-service.log: stopped; resume"):
        monitor.died(CHECKPOINT_SERVICE)
