"""What is known of a run from its files, while they are written, cut, replaced, and after their process has ended."""

import json
import os
import shutil
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from swift.runlog.lease import acquire_lease
from swift.watch.state import RunFollower
from tests.watch.conftest import CONFIG, record


class Clock:
    """A clock that a test sets."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def follower(path, clock):
    """Follows the run; the clock of the wall begins with the test."""
    begun = datetime.now(UTC).timestamp()
    return RunFollower(path, clock, lambda: begun + clock.seconds)


@pytest.fixture
def owned(path):
    """The run directory, owned by this process as by one that trains."""
    path.mkdir()
    with acquire_lease(path):
        yield


def seen(follower):
    while follower.read():
        pass
    return follower.snapshot()


def files(directory):
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(directory.rglob("*"))}


def test_a_run_from_before_its_directory_is_there_to_its_end(follower, path, write):
    assert seen(follower).state == "absent"
    path.mkdir()
    assert seen(follower).state == "absent"
    with acquire_lease(path):
        assert seen(follower).state == "starting"
        directory = write()
        directory.log_event("start", 0, pipelines=2, stages=1, ranks=1, failed=[])
        assert seen(follower).state == "starting"
        for step in range(1, 4):
            directory.log_step(record(step))
        run = seen(follower)
        assert (run.state, run.step, run.num_steps) == ("running", 3, 40)
        assert (run.members, run.absent_members) == (("0:0", "1:0"), ())
        assert run.seconds_left >= 0
        np.testing.assert_allclose(run.series["loss"], [3.99, 3.98, 3.97])
        assert run.loads.num_steps == 3
        np.testing.assert_array_equal(run.loads.popularity_LE, [[1, 1, 1, 1], [3, 1, 1, 1]])
        directory.log_event("checkpoint", 3, path="x")
        directory.log_event("finish", 40)
        run = seen(follower)
        assert (run.state, run.saved_step, run.seconds_left) == ("ended", 3, None)
    assert seen(follower).state == "ended"


def test_following_writes_nothing_and_takes_nothing(follower, path, write):
    directory = write()
    directory.log_event("start", 0)
    directory.log_step(record(1))
    before = files(path)
    seen(follower)
    assert files(path) == before
    with acquire_lease(path):  # nobody is in the way
        seen(follower)


def test_a_process_that_died_without_a_word_leaves_a_run_that_stopped(follower, write):
    directory = write()
    directory.log_event("start", 0)
    directory.log_step(record(1))
    run = seen(follower)
    assert (run.state, run.reason) == ("stopped", "no process writes it")


def test_a_copy_of_a_run_is_running_while_lines_arrive(follower, clock, write):
    directory = write()
    directory.log_event("start", 0)
    directory.log_step(record(1))
    assert seen(follower).state == "stopped"
    directory.log_step(record(2))
    assert seen(follower).state == "running"
    clock.seconds += 1000
    assert seen(follower).state == "stopped"


@pytest.mark.parametrize(("event", "reason"), [("interrupt", "interrupted"), ("stop", "")])
@pytest.mark.usefixtures("owned")
def test_a_run_that_says_that_it_stops_has_stopped(follower, write, event, reason):
    directory = write()
    directory.log_event("start", 0)
    directory.log_step(record(1))
    directory.log_event(event, 1)
    run = seen(follower)
    assert (run.state, run.reason) == ("stopped", reason)


def test_the_cause_of_a_stop_is_not_forgotten_at_its_end(follower, write):
    directory = write()
    directory.log_event("start", 0)
    directory.log_event("checkpoint_failed", 2, error="disk full")
    directory.log_event("checkpoint", 4)
    directory.log_event("run_aborted", 5, process="0:0", reason="failed 11 times")
    directory.log_event("stop", 5)
    run = seen(follower)
    assert (run.state, run.reason) == ("stopped", "a process has failed too often")


@pytest.mark.usefixtures("owned")
def test_a_silent_run_stalls_and_runs_again(follower, clock, write):
    directory = write()
    directory.log_event("start", 0)
    for step in range(1, 5):
        directory.log_step(record(step))
    assert seen(follower).state == "running"
    clock.seconds += 29
    assert seen(follower).state == "running"
    clock.seconds += 12
    run = seen(follower)
    assert (run.state, run.seconds_left) == ("stalled", None)
    assert 41 <= run.silent_s < 42
    directory.log_step(record(5))
    assert seen(follower).state == "running"


@pytest.mark.usefixtures("owned")
def test_a_slow_run_may_be_silent_for_longer(follower, path, clock, write):
    directory = write()
    directory.log_event("start", 0)
    now = datetime.now(UTC)
    times = [(now + timedelta(minutes=step)).isoformat() for step in range(1, 5)]
    write_lines(path / "metrics.jsonl", [{"step": step, "time": time} for step, time in enumerate(times, 1)])
    seen(follower)
    clock.seconds += 500
    assert seen(follower).state == "running"
    clock.seconds += 150
    assert seen(follower).state == "stalled"


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.usefixtures("owned")
def test_a_resumed_run_loses_the_steps_that_it_runs_again(follower, write):
    directory = write()
    directory.log_event("start", 0)
    for step in range(1, 11):
        directory.log_step(record(step))
    directory.log_event("interrupt", 10)
    directory.close()
    assert len(seen(follower).series["loss"]) == 10
    directory = write(4)
    directory.log_event("resume", 4)
    assert seen(follower).state == "starting"
    assert len(seen(follower).series["loss"]) == 4
    for step in range(5, 21):  # more than before: the file is longer than what was read of it
        directory.log_step(record(step, loss=1.0))
    run = seen(follower)
    assert run.state == "running"
    np.testing.assert_allclose(run.series["loss"], [3.99, 3.98, 3.97, 3.96, *[1.0] * 16])


def test_a_run_that_was_cut_and_has_grown_between_two_looks(follower, write):
    directory = write()
    for step in range(1, 11):
        directory.log_step(record(step))
    directory.close()
    seen(follower)
    directory = write(4)
    for step in range(5, 31):
        directory.log_step(record(step, loss=1.0))
    np.testing.assert_allclose(seen(follower).series["loss"], [3.99, 3.98, 3.97, 3.96, *[1.0] * 26])


def test_another_run_in_the_same_directory_begins_anew(follower, path, write):
    directory = write()
    directory.log_event("start", 0, pipelines=2, stages=1, ranks=1, failed=[])
    directory.log_step(record(1))
    directory.close()
    seen(follower)
    shutil.rmtree(path)
    run = seen(follower)
    assert (run.state, run.step, run.members, run.loads) == ("absent", 0, (), None)
    write().log_step(record(1, loss=9.0))
    np.testing.assert_allclose(seen(follower).series["loss"], [9.0])


def test_processes_that_die_and_return(follower, write):
    names = ["0:0", "0:1", "1:0", "1:1"]
    directory = write()
    directory.log_event("start", 0, processes=names)
    assert seen(follower).absent_members == tuple(names)
    directory.log_event("generation_live", 0, generation=1, members=names)
    assert seen(follower).absent_members == ()
    directory.log_event("process_died", 5, process="1:1", reason="exit code 9", detection_s=0.01)
    run = seen(follower)
    assert (run.absent_members, run.num_failures) == (("1:1",), 1)
    assert [(one.kind, one.who, one.step) for one in run.incidents] == [("failure", ("1:1",), 5)]
    directory.log_event("generation_live", 9, generation=2, members=names)
    directory.log_event("rejoin", 10, rejoined=["1:1"], rejoin_s=2.0)
    run = seen(follower)
    assert (run.absent_members, run.incidents[-1].kind) == ((), "return")


def test_damage_is_counted_and_the_rest_is_shown(follower, path, write):
    directory = write()
    directory.log_step(record(1))
    damaged = [b"no json", b"[]", b'{"step": 1}', b'{"step": "2"}', b'{"step": true}', b"\xff\x00", b'{"step": -4}']
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(b"\n".join(damaged) + b"\n" + b'{"step": 2, "loss": 1' + b"0" * 400 + b"}\n")
    with (path / "events.jsonl").open("ab") as file:
        file.write(b'{"time": 3}\n{"time": "2026-01-01", "event": ["x"]}\n')
        file.write(b'{"time": "2026-01-01", "event": "process_died", "step": 3, "detection_s": "soon"}\n')
    run = seen(follower)
    assert (run.num_damaged, run.step) == (len(damaged) + 3, 2)


def test_counts_that_are_damaged_are_named(follower, path, write):
    write().log_step(record(1))
    (path / "class_counts.bin").write_bytes(b"x" * 600)
    run = seen(follower)
    assert run.loads is None
    assert "class_counts.bin" in run.trouble


def test_a_file_that_may_not_be_read_is_named(follower, path, write):
    write().log_step(record(1))
    (path / "metrics.jsonl").unlink()
    os.mkfifo(path / "metrics.jsonl")
    assert seen(follower).trouble == f"{path / 'metrics.jsonl'} cannot be read: is not a regular file"


def test_plans_are_skipped_and_other_events_are_not(follower, write, monkeypatch):
    directory = write()
    for number in range(5):
        directory.log_event("plan", number, plan={"number": number, "tables": [0] * 1000})
    directory.log_event("process_killed", 5, process="plan")
    parsed = []
    monkeypatch.setattr("swift.watch.state.parse_object", lambda line: parsed.append(line))
    seen(follower)
    assert len(parsed) == 1


def test_an_extended_run_has_its_new_length(follower, path, write):
    write().log_step(record(1))
    assert seen(follower).num_steps == 40
    (path / "config.gin").write_text(CONFIG.replace("40", "8000"))
    assert seen(follower).num_steps == 8000
    (path / "config.gin").write_text("Experiment.num_steps = %many\n")
    assert seen(follower).num_steps is None


def test_a_long_record_is_read_in_parts(path, write):
    write()
    lines = b"".join(b'{"step": %d, "loss": 1.0, "more": "%s"}\n' % (step, b"x" * 1000) for step in range(1, 10_001))
    (path / "metrics.jsonl").write_bytes(lines)
    follower = RunFollower(path)
    assert follower.read()
    assert 0 < follower.snapshot().read_share < 1
    assert seen(follower).step == 10_000


def test_settings_that_are_a_pipe_are_named_and_not_waited_for(follower, path):
    path.mkdir()
    os.mkfifo(path / "config.gin")
    assert "config.gin cannot be read: is not a regular file" in seen(follower).trouble
