"""Processes that are silent, stuck or cannot be killed."""

from dataclasses import replace

import pytest

from swift.elastic.membership.messages import (
    ActivateGeneration,
    ClockJumped,
    Done,
    FormGeneration,
    Heartbeat,
    Kill,
    Member,
    Ready,
    RestartAll,
    Retire,
    StageLost,
    StateId,
)
from swift.elastic.membership.status import ProcessState
from swift.errors import SettingError
from tests.elastic.membership.script import LIMITS, A, B, C, D


def test_a_thawed_process_is_killed_when_it_speaks(live):
    old = live.now(D)[0].incarnation
    for _ in range(2):
        live.beat({A: 6, B: 6, C: 6})
        live.tick(1.1)
    assert live.membership.statuses[D].is_dying
    assert live.tell(Heartbeat, D, 1, 6, 5, 0) == ()
    live.die(D)
    assert [kill.member for kill in live.tell(Heartbeat, D, 1, 6, 5, 0)] == [Member(D, old)]
    live.start(D)
    assert [kill.member for kill in live.tell(Ready, D, 0, incarnation=old)] == [Member(D, old)]
    assert live.membership.statuses[D].state is ProcessState.STARTING


def test_the_others_go_on_without_a_process_that_cannot_be_killed(live):
    (kill,) = wait_until_silent(live, C)
    assert kill.member.process == C
    live.time += LIMITS.dying
    live.alive()
    assert live.tick() == []
    (retire,) = live.tick(0.1)
    assert retire == Retire(kill.member, "was killed, and has not died in 5 s")
    (form,) = live.tick()
    assert C not in {process for process, _ in form.members}
    assert live.membership.statuses[C].state is ProcessState.RETIRED
    assert live.membership.unserved_stages or C not in {process for process, _ in live.membership.present()}


def wait_until_silent(script, process):
    """Commands when all but one are heard."""
    script.time += LIMITS.heartbeat + 0.1
    for other in {A, B, C, D} - {process}:
        script.beat({other: 5})
    return script.tick()


def test_what_a_retired_process_says_changes_nothing_nor_does_its_death(live):
    wait_until_silent(live, C)
    live.time += LIMITS.dying + 0.1
    live.alive()
    live.tick()
    before = live.membership
    assert [type(one) for one in live.tell(Heartbeat, C, 1, 9, 8, 0)] == [Kill]
    assert [type(one) for one in live.tell(Ready, C, 0)] == [Kill]
    assert live.die(C) == []
    assert live.membership == before
    _, (restart,) = live.membership.restarted("a test", live.time)
    assert not live.membership.restarted("a test", live.time)[0].statuses[C].is_dying, restart


def test_who_is_killed_again_has_no_longer_to_die(live):
    wait_until_silent(live, C)
    live.membership, _ = live.membership.restarted("a test", live.time + 4)
    live.time += LIMITS.dying + 0.1
    assert [command.member.process for command in live.tick() if isinstance(command, Retire)] == [C]


def test_a_stuck_process_whose_heart_beats_is_found_by_its_progress(live):
    for _ in range(5):
        live.beat({A: 6, B: 6, C: 6, D: 5})
        live.tick(1.5)
    assert [process for process, status in live.membership.statuses.items() if status.is_dying] == [D]
    live.die(D)
    assert live.tick() == [FormGeneration(2, live.now(A, B, C))]


def stuck(script):
    """All have begun an iteration that nobody ends: a generation of the same members is to show who hangs."""
    for _ in range(4):
        script.beat(dict.fromkeys([A, B, C, D], 5))
        assert script.tick(1.5) == []
    script.alive()
    assert script.tick(0.5) == [FormGeneration(2, script.now(A, B, C, D))]


def test_who_hangs_with_all_others_is_found_since_it_does_not_leave(live):
    stuck(live)
    live.left(A, B, C)
    for _ in range(3):
        live.alive()
        assert live.tick(1.2) == []
    live.alive()
    assert [kill.member for kill in live.tick(1.2)] == list(live.now(D))
    live.die(D)
    assert live.tick() == [FormGeneration(3, live.now(A, B, C))]
    live.formed({A: {4, 5}, B: {4, 5}, C: {4, 5}})
    assert live.tick() == [ActivateGeneration(3, StateId(1, 5), live.now(A, B, C))]


def test_all_are_restarted_where_a_new_generation_does_not_help_and_may_find_their_state_again(live):
    stuck(live)
    live.formed({process: {4, 5} for process in (A, B, C, D)}, of=1)
    assert live.tick() == [ActivateGeneration(2, StateId(1, 5), live.now(A, B, C, D))]
    for _ in range(4):
        live.beat(dict.fromkeys([A, B, C, D], 6))
        assert live.tick(1.5) == []
    live.alive()
    assert live.tick(0.5) == [RestartAll("no process finished an iteration for 6 s, and all are in 6")]
    live.die(A, B, C)
    assert live.tick() == []
    live.die(D)
    assert live.tick() == [StageLost((0, 1))]
    live.start(A, B, C, D)
    live.ready(A, B)
    assert live.tick() == [], "the others are still starting"
    live.ready(C, D)
    assert live.tick() == [FormGeneration(3, live.now(A, B, C, D))]
    live.formed({process: {4, 5} for process in (A, B, C, D)}, of=1)
    assert live.tick() == [ActivateGeneration(3, StateId(1, 5), live.now(A, B, C, D))]


def test_members_that_wait_for_something_else_are_excused(live):
    for _ in range(9):
        live.alive()
        live.membership = live.membership.with_clock_reset(live.time)
        assert live.tick(1.5) == []


def test_deadlines_have_to_be_times():
    with pytest.raises(SettingError, match=r"Deadlines\.heartbeat = 0: must be a number above 0"):
        replace(LIMITS, heartbeat=0)


def test_nothing_is_decided_until_a_supervisor_that_slept_has_heard_all(live):
    live.time += 60.0
    live.membership, _ = live.membership.on(ClockJumped(live.time))
    assert live.tick(1.9) == []
    assert [type(one) for one in live.tick(0.1)] == [Kill] * 4


def test_a_generation_whose_members_have_done_all_they_were_to_do_has_no_deadline(live):
    for process in (A, B, C, D):
        live.tell(Done, process, 1, 0)
    assert live.membership.is_done
    for _ in range(9):
        live.alive()
        assert live.tick(1.5) == []
