"""Processes that fail before they are live, and news that come twice or too late, in the journal."""

from swift.elastic.membership.messages import Heartbeat, Kill, Member, Ready, Started
from swift.elastic.membership.status import RecoveryPolicy
from tests.elastic.reporting.histories import ALL, A, B, C, D, History


def test_who_cannot_go_on_before_the_first_generation_has_gone_is_no_failure():
    history = History().start(*ALL)
    history.of(Ready, A, 0, 1).tick().at(2).form(held=()).enter(1).at(3).finish(1)
    assert history.noted("cannot_continue") == history.noted("recovery") == []
    assert history.spent() == {"startup": 2, "useful": 1}


def test_a_process_that_dies_before_it_is_a_member_costs_nothing(live):
    live.die(D).at(6).form(held={3}).enter(4).at(7).finish(4).texts()
    live.tell(Started(Member(D, 1), live.time)).at(8).die(D, reason="exit code 1")
    assert live.texts() == ["process 1:1 died (exit code 1) before it was ready"]
    assert live.spent() == {"startup": 2, "useful": 5, "reconfiguration": 1}


def test_who_is_given_up_is_noted_and_the_error_says_it_to_people(live):
    live.die(D).texts()
    for incarnation in (1, 2, 3):
        live.tell(Started(Member(D, incarnation), live.time)).die(D, reason="exit code 1")
    (note,) = live.noted("run_aborted")
    assert note.fields == {"process": "1:1", "reason": "died 3 times in a row before it was live: exit code 1"}
    assert note.text is None


def test_who_is_left_out_after_failing_at_its_start_is_told():
    history = History(policy=RecoveryPolicy("restart")).start(*ALL[:3])
    for incarnation in (1, 2, 3):
        history.tell(Started(Member(D, incarnation), history.time)).die(D, reason="exit code 1")
    (note,) = history.noted("process_excluded")
    reason = "died 3 times in a row before it had finished an iteration: exit code 1"
    assert note.fields == {"process": "1:1", "reason": reason}
    assert note.text == f"process 1:1 {reason}: continuing without it"


def test_where_one_fails_at_its_start_and_all_are_restarted_nobody_is_said_to_continue():
    history = History(policy=RecoveryPolicy("restart")).start(*ALL).form(held=())
    history.texts()
    history.die(D, reason="exit code 1").at(1.1).tick()
    assert history.texts() == ["process 1:1 died (exit code 1)", "restarting all processes: 1:1 died"]


def test_the_step_of_a_note_goes_back_with_the_run_and_old_beats_do_not_count(live):
    live.at(6).finish(4).die(D).at(7).form(held={3})
    assert live.noted("generation_live")[-1].step == 3
    live.enter(4, A).tell(Heartbeat(live.membership.statuses[A].member, 1, 9, 9, live.time)).at(7.5)
    assert live.spent() == {"startup": 2, "useful": 4, "reconfiguration": 1.5}, "the first iteration is not done"
    live.die(C)
    assert live.noted("process_died")[-1].step == 3


def test_what_is_told_twice_or_too_late_is_noted_once(live):
    live.of(Ready, A, 0, 1).tick().of(Ready, B, 0, 1).tick()
    assert len(live.noted("cannot_continue")) == 1
    live.die(D).die(D)
    assert live.journal.goodput(live.time)["num_deaths"] == len(live.noted("process_died")) == 1


def test_a_line_left_in_the_pipe_of_a_dead_process_is_not_told(live):
    live.die(D).texts()
    live.of(Heartbeat, D, 1, 4, 3, 0)
    assert isinstance(live.commands[-1], Kill)
    assert live.texts() == []
