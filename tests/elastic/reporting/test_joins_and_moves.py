"""Processes that rejoin and blocks that move, in the journal, and deaths in the midst of either."""

import pytest

from swift.elastic.membership.messages import Loaded, RecutFailed, RecutReady
from swift.elastic.membership.status import RecoveryPolicy
from swift.schedules.adapt.moves import MigrationPolicy
from swift.schedules.plans.normalize import DEFAULT_ASSIGNMENT, ChunkAssignment, Move
from tests.elastic.reporting.histories import ALL, A, B, C, D, History, recovering


def test_who_comes_back_is_admitted_and_costs_what_it_takes_after_the_last_iteration(live):
    recovering(live)
    live.enter(5).texts()
    live.at(9.25).start(D)
    assert live.texts() == ["process 1:1 has rejoined, admitted after iteration 6"]
    live.at(9.75).finish(5, A, B, C).at(10.75).finish(6, A, B, C)
    live.took(D, connect=0.5).at(12).form(held={5, 6}).enter(7).at(13.25).finish(7)
    (join,) = live.noted("rejoin")
    assert {
        name: join.fields[name]
        for name in ("generation", "rejoined", "resumed_from", "rejoin_s", "connect_s", "rerun_steps")
    } == {
        "generation": 3,
        "rejoined": ["1:1"],
        "resumed_from": 6,
        "rejoin_s": 4,
        "connect_s": 0.5,
        "rerun_steps": 0,
    }
    assert live.texts() == [
        "resumed after iteration 6 with 4 processes: 4.00 s after process 1:1 was admitted "
        "(coordination 2.25, connect 0.50)"
    ]
    assert live.spent()["reconfiguration"] == 2 + 1.25 + 0.25
    assert live.journal.goodput(live.time)["num_rejoins"] == 1
    assert live.journal.goodput(live.time)["num_recoveries"] == 1


def test_joiners_do_not_hide_a_recovery_whose_first_iteration_still_runs(live):
    live.die(D).at(6).form(held={3}).start(D).enter(4)
    assert live.membership.generation.form.after == 5
    live.at(7).finish(4, A, B, C)
    assert [note.fields["recovery_s"] for note in live.noted("recovery")] == [2]
    live.at(8).finish(5, A, B, C).at(9).form(held={5}).enter(6).at(10).finish(6)
    assert [note.fields["rejoin_s"] for note in live.noted("rejoin")] == [4]


def test_a_death_while_joiners_are_taken_in_makes_it_a_recovery(live):
    live.die(D).at(6).form(held={3}).enter(4).at(7).finish(4).enter(5).start(D)
    live.at(8).finish(5, A).at(8.5).die(C).at(9).form(held={4}).enter(5).at(10).finish(5)
    assert live.noted("rejoin") == []
    recovery = live.noted("recovery")[-1]
    assert [recovery.fields[name] for name in ("rejoined", "recovery_s", "rerun_steps")] == [["1:1"], 1.5, 1]
    assert [note.text for note in live.noted("generation_forming")][2:] == [
        "process 1:1 has rejoined, admitted after iteration 6",
        None,
    ]


def test_a_death_after_the_last_iteration_before_joiners_breaks_nothing_off(live):
    live.die(D).form(held={3}).enter(4).at(6).finish(4).enter(5).start(D)
    live.at(7).finish(5).at(8).finish(6, A, B, C).at(10).die(C)
    assert live.spent() == {"startup": 2, "useful": 6, "reconfiguration": 2}


def test_an_iteration_to_which_joiners_were_promised_in_vain_is_broken_off(live):
    live.die(D).form(held={3}).enter(4).at(6).finish(4).enter(5).start(D)
    for second in (7.5, 9, 10.5, 12, 12.5):
        live.at(second).alive()
    assert live.membership.generation.form.after is None
    live.at(13).form(held={4}).enter(5).at(14).finish(5)
    assert live.spent() == {"startup": 2, "useful": 5, "reconfiguration": 0.5, "rerun": 6.5}
    assert [note.fields["rejoin_s"] for note in live.noted("rejoin")] == [8]


@pytest.fixture
def moving():
    """The fixture ``live`` of a run whose blocks may move: D is down, and C is to take over the fourth block."""
    history = History(policy=RecoveryPolicy(move_rule=MigrationPolicy(is_always=True)))
    history.start(*ALL).at(2).form(held=()).enter(1).at(3).finish(1).enter(2)
    history.die(D).at(4).form(held={1}).enter(2).at(5).finish(2).enter(3).texts()
    cut = ChunkAssignment(((0, 0, 0, 1), (0, 0, 0, 0)), (Move(C.worker, D.worker),))
    history.tell(RecutReady(history.time, frozenset({D.worker}), cut, 0.2, 1e6)).tick()
    for process in (A, B, C):
        history.of(Loaded, process, history.membership.number, 0)
    return history.tick()


def test_who_takes_over_blocks_is_told_and_costs_what_it_takes_after_the_last_iteration(moving):
    moving.at(6).finish(3).at(7).finish(4).at(8).form(held={3, 4}).enter(5).at(9.5).finish(5)
    (move,) = moving.noted("recut")
    assert {
        name: move.fields[name]
        for name in ("generation", "rejoined", "cuts", "positions", "resumed_from", "recut_s", "rerun_steps")
    } == {
        "generation": 3,
        "rejoined": [],
        "cuts": [[3, 1], [4, 0]],
        "positions": {"1:0": "1:1"},
        "resumed_from": 4,
        "recut_s": 4.5,
        "rerun_steps": 0,
    }
    assert moving.texts() == [
        "blocks moved among the survivors, stages of 3, 1; 4, 0 layers, 1:0 replacing 1:1: "
        "resumed after iteration 4 with 3 processes: 4.50 s after the decision (coordination 3.00)"
    ]
    goodput = moving.journal.goodput(moving.time)
    assert (goodput["num_recuts"], goodput["num_rejoins"], goodput["num_recoveries"]) == (1, 0, 1)
    assert moving.spent()["reconfiguration"] == 1 + 1 + 0.5


def test_a_death_in_the_midst_of_a_move_makes_it_a_recovery(moving):
    moving.at(6).finish(3).at(6.5).die(C).at(7).form(held={3}).enter(4).at(8).finish(4)
    assert moving.noted("recut") == []
    (recovery,) = [note for note in moving.noted("recovery") if note.fields["generation"] == 4]
    assert recovery.fields["failed"] == ["1:0"]
    assert moving.journal.goodput(moving.time)["num_recuts"] == 0


def test_a_move_in_which_a_process_cannot_take_part_is_told_in_a_sentence(moving):
    moving.at(6).finish(3).at(6.5).of(RecutFailed, C, 3, "the plan is missing", 0).tick()
    moving.at(7).form(held={3}).enter(4).at(8).finish(4)
    assert moving.noted("recut") == []
    (refused,) = moving.noted("recut_failed")
    assert refused.fields == {"process": "1:0", "generation": 3, "reason": "the plan is missing"}
    assert refused.text == (
        "process 1:0 cannot move blocks: the plan is missing; "
        "keeping the current layer assignment until the run resumes"
    )


def test_a_move_that_is_given_up_is_no_move(moving):
    """No member leaves its iteration: all go on with the cuts of the run."""
    moving.at(12).alive()
    assert moving.membership.generation.form[1:] == (tuple(moving.now(A, B, C)), None, DEFAULT_ASSIGNMENT)
    moving.form(held={2}).enter(3).at(13).finish(3)
    assert moving.noted("recut") == moving.noted("rejoin") == []
