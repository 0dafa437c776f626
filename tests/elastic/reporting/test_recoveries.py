"""Recoveries in the journal: the deaths of each, its parts, and how long it took."""

import pytest

from swift.elastic.membership.messages import Ready
from swift.elastic.membership.status import RecoveryPolicy
from tests.elastic.reporting.histories import ALL, A, B, C, D, History, recovering


def test_a_recovery_is_told_with_its_parts_once_all_have_finished_an_iteration(live):
    recovering(live)
    (death,), (recovery,) = live.noted("process_died"), live.noted("recovery")
    assert death.step == 3
    assert death.fields == {"process": "1:1", "incarnation": 0, "reason": "signal 9", "detection_s": 0.25}
    assert recovery.step == 4
    assert recovery.fields == {
        "generation": 2,
        "members": ["0:0", "0:1", "1:0"],
        "rejoined": [],
        "failed": ["1:1"],
        "resumed_from": 3,
        "rerun_steps": 0,
        "recovery_s": 3.5,
        "detection_s": 0.25,
        "coordination_s": 1.25 - 0.25 - 0.125 - 0.5,
        "leave_s": 0.25,
        "connect_s": 0.125,
        "load_program_s": 0.5,
        "state_s": 0.25,
        "first_step_s": 1.5,
    }
    assert live.texts() == [
        "process 1:1 is killed on purpose",
        "process 1:1 died (signal 9); 3 of 4 continue",
        "resumed after iteration 3 with 3 processes: 3.50 s after the failure (detection 0.25, coordination 0.38, "
        "leave 0.25, connect 0.12, load program 0.50, state 0.25, first step 1.50)",
    ]


def test_the_time_of_a_recovery_is_that_until_its_first_iteration_but_for_a_usual_one(live):
    """Half an iteration was broken off; the next one took 1.75 s, of which 1 s is usual."""
    recovering(live)
    assert live.spent() == {
        "startup": 2,
        "useful": 3 + 1 + 0.25,
        "detection": 0.25,
        "reconfiguration": 1.25 + 0.75,
        "rerun": 0.5,
    }
    goodput = live.journal.goodput(live.time)
    assert [goodput[f"num_{what}"] for what in ("deaths", "recoveries", "rejoins")] == [1, 1, 0]
    assert goodput["recovery_median_s"] == goodput["recovery_max_s"] == 3.5
    assert goodput["recovery_phases"]["first_step"] == {"median_s": 1.5, "max_s": 1.5}


def test_who_dies_before_the_first_iteration_is_done_sends_nobody_back_to_a_checkpoint():
    history = History().start(*ALL).at(2).form(held=()).enter(1).at(3).die(D).form(held=())
    assert history.texts()[-1] == "no iteration was done yet: starting again with the first state"


@pytest.mark.parametrize("how", ["an iteration was done", "one has a record", "resumed"])
def test_all_else_that_is_lost_is_looked_for_in_a_checkpoint(how):
    policy = RecoveryPolicy(begins_with_state=True) if how == "resumed" else None
    history = History(policy=policy).start(*ALL).at(2).form(held=()).enter(1)
    if how == "an iteration was done":
        history.at(3).finish(1)
    elif how == "one has a record":
        history.journal.record(1)
    history.at(4).die(D).form(held=())
    assert history.texts()[-1] == "no process has the state of some stage: restoring the newest checkpoint"


def test_parts_that_nobody_has_told_are_not_known(live):
    live.die(D).form(held={3}).enter(4).at(6).finish(4)
    (recovery,) = live.noted("recovery")
    assert [recovery.fields[f"{part}_s"] for part in ("leave", "first_step")] == [None, None]
    assert "leave" not in live.journal.goodput(live.time)["recovery_phases"]
    assert live.texts()[-1] == "resumed after iteration 3 with 3 processes: 1.00 s after the failure"


def test_who_is_not_heard_has_failed_when_it_was_last_heard(live):
    live.at(6).beat(4, 3, A, B, C).at(7.5).tick()
    assert live.texts()[-1] == "process 1:1 is killed: sent no heartbeat for 2 s"
    live.at(7.75).die(D).at(8).form(held={3}).enter(4).at(9).finish(4)
    (death,), (recovery,) = live.noted("process_died"), live.noted("recovery")
    assert death.fields["detection_s"] == 2.5
    assert {name: recovery.fields[name] for name in ("recovery_s", "detection_s", "coordination_s")} == {
        "recovery_s": 4,
        "detection_s": 2.5,
        "coordination_s": 0.5,
    }
    assert live.spent() == {"startup": 2, "useful": 3 + 1, "detection": 2.5, "reconfiguration": 0.5}


def test_who_is_stuck_has_failed_when_something_last_went_on(live):
    for second in (6.5, 8, 9.5, 11, 11.5):
        live.at(second).beat(4, 3, A, B, C).beat(3, 3, D)
    live.die(D)
    assert live.noted("process_killed")[0].fields["reason"] == "is still in iteration 3, others are in 4"
    assert live.noted("process_died")[0].fields["detection_s"] == 6.5
    assert live.spent() == {"startup": 2, "useful": 3, "detection": 6.5}


def test_several_deaths_are_one_recovery_from_the_first_on(live):
    live.texts()
    live.die(D).at(5.25).die(C).at(6).form(held={3}).enter(4).at(7).finish(4, A)
    assert live.noted("recovery") == []
    live.finish(4, B)
    (recovery,) = live.noted("recovery")
    assert recovery.fields["failed"] == ["1:1", "1:0"]
    assert recovery.fields["recovery_s"] == 2
    assert live.texts() == [
        "process 1:1 died (signal 9); 3 of 4 continue",
        "process 1:0 died (signal 9); 2 of 4 continue",
        "resumed after iteration 3 with 2 processes: 2.00 s after the first of 2 failures (coordination 1.00)",
    ]
    assert live.journal.goodput(live.time)["num_deaths"] == 2


def test_a_death_in_the_first_iteration_after_another_belongs_to_the_same_recovery(live):
    live.die(D).at(6).form(held={3}).enter(4).at(6.5).die(C).at(7).form(held={3}).enter(4).at(8).finish(4)
    (recovery,) = live.noted("recovery")
    assert recovery.fields["generation"] == 3
    assert recovery.fields["recovery_s"] == 3
    assert live.spent() == {"startup": 2, "useful": 4, "reconfiguration": 2}


def test_time_in_which_two_failures_are_undetected_counts_once(live):
    live.at(5.5).beat(4, 3, A, C).at(6).beat(4, 3, A).at(6.5).beat(4, 3, A).at(8).tick()
    assert [note.fields["process"] for note in live.noted("process_killed")] == ["0:1", "1:0", "1:1"]
    live.die(B, C)
    assert [note.fields["detection_s"] for note in live.noted("process_died")] == [3, 2.5]
    assert live.spent() == {"startup": 2, "useful": 3, "detection": 3}


def test_a_member_that_cannot_go_on_is_a_failure_too(live):
    live.of(Ready, A, 0, 1).tick().at(6).form(held={3}).enter(4).at(7).finish(4)
    assert "process 0:0 lost its group in generation 1" in live.texts()
    goodput = live.journal.goodput(live.time)
    assert [goodput[f"num_{what}"] for what in ("deaths", "recoveries")] == [0, 1]


def test_all_who_are_started_again_are_one_line_and_one_recovery(live):
    live.texts()
    for second in (6.5, 8, 9.5, 11):
        live.at(second).alive()
    live.at(11.5).alive()
    live.at(12).form(held={3}).enter(4)  # a new generation, which does not help
    live.texts()
    for second in (13.5, 15, 16.5, 18):
        live.at(second).alive()
    live.at(18.5).alive()
    live.die(*ALL)
    assert live.texts() == [
        "restarting all processes: no process finished an iteration for 6 s, and all are in 4",
        "stages 0 and 1 have no live process; waiting for one to rejoin",
    ]
    live.start(*ALL)
    assert live.texts() == ["processes 0:0, 0:1, 1:0 and 1:1 have rejoined"]
    live.at(19.5).form(held={3}).enter(4).at(20.5).finish(4)
    assert live.noted("recovery")[0].fields["detection_s"] == 6.5
    # The iteration that the new generation broke off had taken 6.5 s by then.
    assert live.spent() == {"startup": 2, "useful": 4, "rerun": 6.5, "detection": 6.5, "reconfiguration": 1.5}


def test_a_later_death_is_not_that_of_the_kill_before(live):
    live.journal.kill_injected(D, 105)
    live.at(5.5).die(D).form(held={3}).enter(4).start(D).at(6).finish(4, A, B, C).at(7).finish(5, A, B, C)
    live.form(held={5}).enter(6).at(9).die(D)
    assert [note.fields["detection_s"] for note in live.noted("process_died")] == [0.5, 0]
    live.form(held={5}).enter(6).at(10).finish(6)
    assert live.noted("rejoin") == []
    assert [note.fields["recovery_s"] for note in live.noted("recovery")] == [1, 1]
