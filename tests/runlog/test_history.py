"""History and time breakdown of records that were written by hand."""

from pathlib import Path

import pytest

from swift.errors import SettingError
from swift.report.history import configuration_periods, history_of, incidents_of, presences_of, time_by_cause
from swift.runlog.reading import Run
from tests.runlog.records import metrics_of

TOPOLOGY = {"pipelines": 2, "stages": 1, "ranks": 1}


def at(seconds):
    return f"2026-01-01T{seconds // 3600:02.0f}:{seconds // 60 % 60:02.0f}:{seconds % 60:06.3f}+00:00"


def event(name, seconds, step, **fields):
    return {"time": at(seconds), "event": name, "step": step, **fields}


def steps(*seconds, first=1, **fields):
    """A record for each time; every iteration took a second."""
    return [{"step": first + n, "time": at(s), "step_ms": 1000.0, **fields} for n, s in enumerate(seconds)]


def run_of(metrics, events, summary=None):
    return Run(Path("runs/some"), "some", "", metrics_of(metrics), events, summary)


def trained():
    """Worker 1:0 fails after iteration 3 and is back after 5; iteration 1 and the one after the loss compile."""
    metrics = steps(5, 6, 7, 10.5, 11.5, 12.6, 13.6)
    metrics[0]["step_ms"] = 5000.0
    metrics[3]["step_ms"] = 3500.0
    metrics[5]["step_ms"] = 1100.0
    change = {"plan_ms": 0.0, "compile_ms": 1000.0, "move_ms": 1000.0, "prepared": False}
    back = {"plan_ms": 0.0, "compile_ms": 0.0, "move_ms": 100.0, "prepared": True}
    events = [
        event("start", 0, 0, failed=[], **TOPOLOGY),
        event("plan", 0, 0, failed=[], plan={"a": 1}),
        event("reconfigure", 9, 4, failed=["1:0"], rejoined=[], **change),
        event("plan", 9, 4, failed=["1:0"], plan={"b": 1}),
        event("reconfigure", 11.6, 6, failed=[], rejoined=["1:0"], **back),
        event("checkpoint", 14, 7, stall_ms=250.0),
        event("finish", 14, 7),
    ]
    return run_of(metrics, events)


def launched():
    """0:0 dies at 20 s and is back at 30 s; the supervisor has counted the time."""
    goodput = {"total_s": 40.0, "startup_s": 10.0, "useful_s": 20.0, "reconfiguration_s": 10.0, "goodput": 0.5}
    events = [
        event("start", 0, 0, processes=["0:0", "1:0"], **TOPOLOGY),
        event("generation_live", 10, 0, generation=1, members=["0:0", "1:0"]),
        event("plan", 10, 0, generation=1, failed=[], plan={"a": 1}),
        event("process_died", 20, 2, process="0:0", reason="signal 9", detection_s=0.25),
        event("generation_live", 22, 2, generation=2, members=["1:0"]),
        event("plan", 22, 2, generation=1, failed=[], plan={"late": 1}),
        event("recovery", 23, 3, failed=["0:0"], resumed_from=2, rerun_steps=1, recovery_s=3.0),
        event("recut", 26, 3, rejoined=[], cuts=[[2, 0], [1, 1]], recut_s=1.25),
        event("generation_live", 30, 3, generation=3, members=["0:0", "1:0"]),
        event("rejoin", 31, 4, rejoined=["0:0"], rejoin_s=1.5),
        event("finish", 40, 5, goodput=goodput),
    ]
    return run_of(steps(15, 18, 24, 32, 40), events)


def test_iterations_belong_to_the_configuration_that_ran_them():
    run = trained()
    stretches = configuration_periods(run, history_of(run))
    assert [(one.after, one.down, one.num_steps) for one in stretches] == [(0, (), 3), (3, ("1:0",), 2), (5, (), 2)]
    assert [one.plan and one.plan["plan"] for one in stretches] == [{"a": 1}, {"b": 1}, None]
    assert [one.start_s for one in stretches] == pytest.approx([0, 9, 11.6])
    assert [one.end_s for one in stretches] == pytest.approx([9, 11.6, 14])
    run = launched()
    stretches = configuration_periods(run, history_of(run))
    assert [(one.down, one.num_steps) for one in stretches] == [((), 2), (("0:0",), 1), ((), 2)]
    assert [one.plan and one.plan["plan"] for one in stretches] == [{"a": 1}, None, None]


def test_who_was_at_work_when():
    run = trained()
    assert [(one.name, one.spans) for one in presences_of(run, history_of(run))] == [
        ("0:0", ((0, 14),)),
        ("1:0", ((0, 7), (pytest.approx(11.6), 14))),  # down since the change began, not since it was told
    ]
    run = launched()
    assert [(one.name, one.spans) for one in presences_of(run, history_of(run))] == [
        ("0:0", ((10, 20), (30, 40))),
        ("1:0", ((10, 40),)),
    ]


def test_moments_are_told_for_both_kinds_of_run():
    run = trained()
    found = [(one.kind, one.seconds, one.step, one.who, one.took_s) for one in incidents_of(run, history_of(run))]
    assert found == [("failure", 7, 4, ("1:0",), 2), ("return", pytest.approx(11.5), 6, ("1:0",), 0.1)]
    run = launched()
    found = [(one.kind, one.seconds, one.who, one.took_s) for one in incidents_of(run, history_of(run))]
    assert found == [
        ("failure", 20, ("0:0",), None),
        ("recovery", 23, ("0:0",), 3),
        ("recovery", 26, (), 1.25),
        ("return", 31, ("0:0",), 1.5),
    ]


def test_every_moment_of_a_run_is_spent_once():
    run = trained()
    spent = time_by_cause(run, history_of(run))
    expected = {
        "startup": 4.0,  # 5 s, of which one is usual
        "useful": 1 + 1 + 1 + 1 + 1 + 1 + 1,
        "saving": 0.25,
        "reconfiguration": 2 + 0.5 + 0.1,  # the changes, and what the iteration after the first took longer
        "detection": 0.0,
        "rerun": 0.0,
        "waiting": 0.0,
    }
    assert {cause: spent[cause] for cause in expected} == pytest.approx(expected)
    assert sum(spent.values()) == pytest.approx(14)


def test_what_a_supervisor_has_counted_is_taken_as_it_is():
    run = launched()
    spent = time_by_cause(run, history_of(run))
    assert (spent["startup"], spent["useful"], spent["reconfiguration"]) == (10, 20, 10)
    assert sum(spent.values()) == 40


def test_the_iterations_of_a_window_share_its_time():
    """A window of two took 6 s, 5 of them more than usual: three records of a second say what that is."""
    metrics = steps(6, 6, 7, 8, 9)
    for record in metrics[:2]:
        record["step_ms"] = 3000.0
    run = run_of(metrics, [event("start", 0, 0, failed=[], **TOPOLOGY), event("finish", 9, 5)])
    spent = time_by_cause(run, history_of(run))
    assert (spent["startup"], spent["useful"], spent["other"]) == (4, 5, 0)


def test_the_clock_stands_still_between_two_invocations():
    """An hour after it was interrupted at iteration 3 the run continues from 2: the lost iteration is not useful."""
    metrics = steps(1, 2) + steps(3601, 3602, first=3)
    events = [
        event("start", 0, 0, failed=[], **TOPOLOGY),
        event("interrupt", 3, 3),
        event("restore", 3599.5, 2),
        event("resume", 3600, 2, failed=["0:0"], **TOPOLOGY),
        event("finish", 3602, 4),
    ]
    run = run_of(metrics, events)
    history = history_of(run)
    assert [(span.start_s, span.end_s) for span in history.spans] == [(0, 3), (3, 5.5)]
    assert history.step_s_T.tolist() == [1, 2, 4.5, 5.5]
    assert [(one.name, one.spans) for one in presences_of(run, history)] == [
        ("0:0", ((0, 3),)),
        ("1:0", ((0, 3), (3.5, 5.5))),
    ]
    assert [one.down for one in configuration_periods(run, history)] == [(), ("0:0",)]
    spent = time_by_cause(run, history)
    assert (spent["useful"], spent["other"]) == (4, 1.5)
    assert [one.kind for one in incidents_of(run, history)] == ["stop", "restore", "resume"]


def test_an_older_record_says_less():
    metrics = [{"step": n, "step_ms": 1000.0} for n in (1, 2, 3)]
    change = {"plan_ms": 1.0, "compile_ms": 1.0, "move_ms": 1.0}
    events = [event("start", 0, 0, **TOPOLOGY), event("reconfigure", 2, 3, failed=["1:0"], rejoined=[], **change)]
    run = run_of(metrics, events)
    history = history_of(run)
    assert time_by_cause(run, history) is None
    assert [(one.down, one.num_steps, one.plan) for one in configuration_periods(run, history)] == [
        (None, 2, None),
        (("1:0",), 1, None),
    ]
    nothing = run_of([], [])
    assert presences_of(nothing, history_of(nothing)) == []
    assert configuration_periods(nothing, history_of(nothing)) == []
    assert time_by_cause(nothing, history_of(nothing)) is None


def test_the_time_of_a_supervisor_that_was_killed_is_not_left_out():
    events = [
        event("start", 0, 0, processes=["0:0", "1:0"], **TOPOLOGY),
        event("resume", 100, 2, processes=["0:0", "1:0"], **TOPOLOGY),
        event("finish", 110, 4, goodput={"total_s": 10.0, "useful_s": 8.0}),
    ]
    run = run_of([*steps(15, 18), *steps(105, 110, first=3)], events)
    history = history_of(run)
    assert history.end_s > 10
    assert sum(time_by_cause(run, history).values()) == pytest.approx(history.end_s)


@pytest.mark.parametrize(
    ("events", "metrics", "told"),
    [
        ([{"event": "start", "step": 0}], [], r"event 1.*must have a time"),
        ([{"time": "noon", "event": "start", "step": 0}], [], r"event 1.*must have a time, and has 'noon'"),
        ([event("start", 0, "none")], [], r"event 1.*a name and a step"),
        ([{"time": at(0)}], [], r"event 1.*a name and a step"),
        ([], [{"step": 3, "time": 7}], r"step 3.*must have a time"),
        ([event("start", 0, 0, **TOPOLOGY | {"ranks": "many"})], [], r"ranks of 'start'.*must be a number"),
        ([event("start", 0, 0, **TOPOLOGY | {"ranks": 10**9})], [], r"is not a topology"),
        ([event("start", 0, 0, **TOPOLOGY | {"pipelines": -1, "stages": -2})], [], r"is not a topology"),
        ([event("start", 0, 0, **TOPOLOGY | {"ranks": 1.5})], [], r"is not a topology"),
        ([event("reconfigure", 0, 1, failed=["0:0"], move_ms=[])], [], r"move_ms of 'reconfigure'.*must be a number"),
        ([event("finish", 0, 1, goodput={"total_s": "x"})], [], r"goodput.*must be seconds by cause"),
        ([event("finish", 0, 1, goodput={"useful_s": 1.0})], [], r"goodput.*must be seconds by cause"),
        ([event("finish", 0, 1, goodput={"total_s": True})], [], r"goodput.*must be seconds by cause"),
        ([event("finish", 0, 1, goodput=3)], [], r"goodput.*must be seconds by cause"),
    ],
)
def test_damage_is_told_in_a_line(events, metrics, told):
    def read(run):
        history = history_of(run)
        return [what(run, history) for what in (incidents_of, presences_of, configuration_periods, time_by_cause)]

    with pytest.raises(SettingError, match=told):
        read(run_of(metrics, events))
