"""Seconds of a run by cause, and iterations that are run again."""

import pytest

from swift.elastic.reporting.goodput import Goodput
from tests.elastic.reporting.histories import A, B, C, D


def test_a_run_without_failures_is_useful_from_its_first_generation_on(live):
    assert live.texts() == ["forming generation 1 with 4 processes", "running with 4 processes"]
    assert live.at(5.5).spent() == {"startup": 2, "useful": 3.5}
    goodput = live.journal.goodput(105.5)
    assert goodput["goodput"] == 3.5 / 5.5
    assert goodput["recovery_median_s"] is None
    assert goodput["recovery_phases"] == {}


def test_iterations_that_somebody_had_finished_are_run_again(live):
    """A has finished 4 at 6, and goes back to 3 and on, a second each."""
    live.at(6).finish(4, A).enter(5, A).at(6.5).die(D)
    live.at(7).form(held={3}).enter(4).at(8).finish(4).enter(5).at(9).finish(5)
    (recovery,) = live.noted("recovery")
    assert recovery.fields["rerun_steps"] == 1
    assert recovery.text.startswith("resumed after iteration 3 with 3 processes, 1 iteration again: 1.50 s")
    assert live.spent() == {"startup": 2, "useful": 3 + 1 + 1, "reconfiguration": 0.5, "rerun": 0.5 + 1}
    assert live.journal.goodput(live.time)["rerun_steps"] == 1


@pytest.mark.parametrize("heard_from", ["record", "late record", "late beat"])
def test_what_a_death_seemed_to_break_off_may_be_finished(live, heard_from):
    """The second from 5 on was of use, and iteration 4 is the one that is run again."""
    if heard_from == "record":
        live.journal.record(4)
    live.at(6).die(D)
    if heard_from == "late beat":
        live.finish(4, A)
    if heard_from == "late record":
        live.journal.record(4)
    live.at(7).form(held={3}).enter(4).at(8).finish(4)
    assert live.noted("recovery")[0].fields["rerun_steps"] == 1
    assert live.spent() == {"startup": 2, "useful": 3 + 1, "reconfiguration": 1, "rerun": 1}
    live.at(9).die(C)
    assert live.spent() == {"startup": 2, "useful": 3 + 1, "reconfiguration": 1, "rerun": 2}, "5 is broken off"


def test_where_an_generation_starts_from_a_checkpoint_is_heard_from_its_members(live):
    """Beats without an iteration say nothing yet; 2 and 3 are run again."""
    live.die(D).at(6).form(held=()).beat(0, 0).texts()
    live.enter(2).at(7).finish(2).enter(3).at(8).finish(3).at(9).finish(4)
    (recovery,) = live.noted("recovery")
    assert [recovery.fields[name] for name in ("resumed_from", "rerun_steps", "recovery_s")] == [1, 2, 2]
    assert live.spent() == {"startup": 2, "useful": 4, "reconfiguration": 1, "rerun": 2}
    assert live.journal.goodput(live.time)["rerun_steps"] == 2


def test_windows_of_iterations_count_as_many(live):
    """The usual iteration takes a second; a window of four takes five, from the second to the last run again."""
    for step in (7, 11, 15, 19):
        live.at(step + 2).finish(step).beat(step + 4, step)
    live.at(22).die(D).form(held={17}).beat(21, 17).at(27).finish(21)
    assert live.spent() == {"startup": 2, "useful": 3 + 16 + 2, "rerun": 1 + 2, "reconfiguration": 1}
    assert live.journal.goodput(live.time)["rerun_steps"] == 2


def test_an_iteration_of_which_only_the_state_tells_is_not_run_again(live):
    live.die(D).form(held={4}).enter(5).at(6).finish(5)
    assert live.noted("recovery")[0].fields["rerun_steps"] == 0


def test_a_stage_without_a_process_is_waited_for(live):
    live.texts()
    live.die(B).at(6).die(D)
    assert live.texts() == [
        "process 0:1 died (signal 9); 3 of 4 continue",
        "process 1:1 died (signal 9)",
        "stage 1 has no live process; waiting for one to rejoin",
    ]
    live.at(8).alive().at(9).start(D)
    assert live.texts() == ["process 1:1 has rejoined"]
    live.at(10).form(held={3}).enter(4).at(11).finish(4)
    assert live.spent() == {"startup": 2, "useful": 4, "reconfiguration": 2, "waiting": 3}
    assert live.noted("recovery")[0].fields["recovery_s"] == 6


def test_news_that_were_heard_before_what_was_seen_meanwhile_take_no_time():
    goodput = Goodput(0)
    goodput.go_live(0, 2)
    goodput.finish(1, 3)
    goodput.finish(2, 2.5)
    goodput.fail(2, 2.25, 2.75)
    goodput.go_live(1, 2.875)
    goodput.finish(2, 4)
    assert {cause: s for cause, s in goodput.seconds(3).items() if s} == {
        "startup": 2,
        "useful": 1,
        "reconfiguration": 0.5,
        "rerun": 0.5,
    }


def test_time_between_a_death_and_the_want_of_a_stage_is_not_waited():
    goodput = Goodput(0)
    goodput.go_live(0, 2)
    goodput.fail(2, 2, 2)
    goodput.wait(3)
    assert {cause: s for cause, s in goodput.seconds(7).items() if s} == {
        "startup": 2,
        "reconfiguration": 1,
        "waiting": 4,
    }
