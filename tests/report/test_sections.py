"""Sections of a report on one run: failures, configurations, coverage."""

import dataclasses
import re

import numpy as np
import pytest

from swift.errors import SettingError
from swift.report.history import history_of
from swift.report.sections import coverage_of, coverage_section, plans_section, schedule_of, timeline_section
from swift.schedules.planners.lockstep import lockstep
from swift.schedules.plans.normalize import after_moves, denormalize, moves_to_spread, normalize, plan_document
from swift.schedules.plans.store import CorruptPlanError, read_plan
from swift.schedules.problem import Problem
from swift.schedules.rules import verify
from swift.topology import Topology

PROBLEM = Problem(Topology(3, 2), 4, num_iterations=2)


def test_a_plan_is_read_back_as_it_was_planned(planned):
    for failed in ([], [(2, 1)], [(0, 0), (1, 1)]):
        problem = dataclasses.replace(PROBLEM, failed=frozenset(failed))
        schedule, players = schedule_of(planned(failed))
        assert players == {}
        assert [*schedule.ops()] == [*denormalize(lockstep(normalize(problem).problem), normalize(problem)).ops()]
        assert schedule.problem == problem
        verify(schedule)


def test_roles_that_have_moved_are_told(planned):
    """0:0 and 1:0 are down, which leaves stage 0 with one worker: another takes the place of one of them."""
    failed = [(0, 0), (1, 0)]
    problem = dataclasses.replace(PROBLEM, failed=frozenset(failed))
    (move,) = moves_to_spread(problem)
    schedule, players = schedule_of(planned(failed, (move,)))
    assert players == {move.role: move.worker} == {(0, 0): (0, 1)}
    assert schedule.problem == after_moves(problem, (move,))
    verify(schedule)


def test_roles_of_another_cut_are_told():
    """1:0 and 2:0 are down; the last worker of the pipeline that is cut differently takes a first stage."""
    apart = (0, 0, 1), (0, 1, 1), (0, 1, 1)
    problem = Problem(Topology(3, 2), 2, frozenset({(1, 0), (2, 0)}), stage_of_chunk=apart)
    moved = moves_to_spread(problem)
    plan = plan_document(lockstep(after_moves(problem, moved)))
    schedule, players = schedule_of({"plan": plan, "failed": ["1:0", "2:0"], "positions": {"0:1": "2:0"}})
    assert players == {(2, 0): (0, 1)} == {move.role: move.worker for move in moved}
    assert schedule.problem.failed == {(1, 0), (0, 1)}
    verify(schedule)


@pytest.mark.parametrize(
    "change",
    [
        lambda event: event["plan"].pop("round"),
        lambda event: event.update(positions={"0:1": "first"}),
        lambda event: event.update(positions=["0:1"]),
        lambda event: event["plan"].pop("problem"),
        lambda event: event["plan"].update(version=0),
        lambda event: event["plan"]["problem"].update(failures=[1]),
        lambda event: event["plan"]["problem"]["costs"].update(t_f=-1.0),
        lambda event: event["plan"]["round"]["executor_DMP"].pop(),
        lambda event: event["plan"]["round"].update(start_3DMP=[0.0] * 72),
        lambda event: event.update(failed=["0:0", "0:1"]),
        lambda event: event.update(failed=["first"]),
    ],
)
def test_a_damaged_plan_is_told(failing, change):
    event = next(event for event in failing.events if event["event"] == "plan" and event["failed"])
    change(event)
    with pytest.raises(SettingError, match=r"runs/symi/events.jsonl = 'the plan with .* down': is damaged"):
        plans_section(failing, history_of(failing), "run1")


def test_a_document_that_is_no_plan_is_refused():
    with pytest.raises(CorruptPlanError):
        read_plan({})


def test_each_configuration_is_drawn_once_and_listed_each_time(failing):
    section = plans_section(failing, history_of(failing), "run1")
    assert [re.findall(r"with (.*) down", picture.caption) for picture in section.pictures] == [["no worker"], ["2:1"]]
    drawn = [{one.get_gid() for one in picture.figure.axes[0].collections} for picture in section.pictures]
    assert ["failed-2:1" in names for names in drawn] == [False, True]
    assert ["ops-F-rerouted" in names for names in drawn] == [True, True]
    (table,) = section.tables
    assert [row[:3] for row in table.rows] == [
        ["from 1", "none", "10"],
        ["from 11", "2:1", "20"],
        ["from 31", "none", "10"],
    ]
    assert [row[4] for row in table.rows] == ["1.00", "1.50", "1.00"]


def test_the_timeline_shows_who_was_at_work(failing):
    section = timeline_section(failing, history_of(failing), "run1")
    (picture,) = section.pictures
    above, below = picture.figure.axes
    assert [label.get_text() for label in below.get_yticklabels()] == ["0:0", "0:1", "1:0", "1:1", "2:0", "2:1"]
    spans = [[path.get_extents().intervalx.tolist() for path in bars.get_paths()] for bars in below.collections]
    assert len(spans[0]) == 1
    assert np.allclose(spans[5], [[0, 120 - 2.004], [240, 360]])
    assert above.lines[0].get_ydata().max() == 40
    assert {line.get_label() for line in above.lines[1:]} == {"failure", "return"}
    (table,) = section.tables
    assert [row[1:4] for row in table.rows] == [["11", "failure", "2:1"], ["31", "return", "2:1"]]
    assert [row[5] for row in table.rows] == ["2.00 s", "2.00 s"]


def test_of_a_large_cluster_those_are_shown_who_were_away(failing):
    start = failing.events[0]
    start |= {"pipelines": 100, "stages": 4}
    failing.events[2]["failed"] = failing.events[4]["rejoined"] = ["77:2"]
    section = timeline_section(failing, history_of(failing), "run1")
    names = [label.get_text() for label in section.pictures[0].figure.axes[1].get_yticklabels()]
    assert "77:2" in names
    assert len(names) == 24
    assert "376 of 400 that were live longest are left out" in section.pictures[0].caption


def saved(step, experts, **more):
    return {"event": "checkpoint", "step": step, "experts": experts, "experts_per_layer": 1, "bytes": 2e6, **more}


@pytest.fixture
def with_checkpoints(make_run, events_of):
    """Makes a run of two layers of three classes that has saved what some events say."""
    run = make_run(num_steps=4, num_layers=2, num_classes=3, num_slots=6)
    return lambda *events: dataclasses.replace(run, events=events_of({"event": "start", "step": 0}, *events))


def test_coverage_says_where_the_newest_copy_of_each_expert_lies(with_checkpoints):
    restored = {
        "event": "restore",
        "step": 20,
        "experts": {"20": [[0, 1], [1, 2]], "10": [[0, 0], [0, 2], [1, 0], [1, 1]]},
    }
    run = with_checkpoints(
        saved(10, "all"), saved(20, [[1], [2]]), saved(30, [[2], [0]]), restored, saved(30, [[0], [0]])
    )
    coverage = coverage_of(run)
    assert coverage.steps_C.tolist() == [10, 20, 30, 20, 30]
    assert coverage.newest_CLE.tolist() == [
        [[10, 10, 10], [10, 10, 10]],
        [[10, 20, 10], [10, 10, 20]],
        [[10, 20, 30], [30, 10, 20]],
        [[10, 20, 10], [10, 10, 20]],
        [[30, 20, 10], [30, 10, 20]],
    ]
    section = coverage_section(run, history_of(run), "run1")
    drawn = section.pictures[0].figure.axes[0].images[0].get_array()
    np.testing.assert_array_equal(drawn, coverage.age_CLE.reshape(5, 6).T)
    assert [row[0] for row in section.tables[0].rows] == ["10", "20", "30", "30"]
    assert [row[3] for row in section.tables[0].rows] == ["10", "10", "10", "10"]
    assert section.tables[0].rows[0][4] == "2.0"


@pytest.mark.parametrize(
    ("events", "note"),
    [
        ([], "No checkpoint was saved."),
        ([saved(2, "all"), saved(4, "all")], "Every checkpoint has all experts."),
        ([{"event": "checkpoint", "step": 2}], "Which experts were saved is not recorded."),
    ],
)
def test_coverage_that_there_is_nothing_to_see_of_is_told_in_a_line(with_checkpoints, events, note):
    run = with_checkpoints(*events)
    section = coverage_section(run, history_of(run), "run1")
    assert (section.pictures or [], section.note) == ([], note)
    assert len(section.tables) == bool(events)


@pytest.mark.parametrize("experts", [[[0], [9]], [[0], [-1]], [[0], ["x"]], 7, [[0], [1], [2]]])
def test_damaged_coverage_is_told(with_checkpoints, experts):
    run = with_checkpoints(saved(2, experts))
    with pytest.raises(SettingError, match="experts of checkpoint 2"):
        coverage_section(run, history_of(run), "run1")
