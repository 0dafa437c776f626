"""Restarts of one process, of all where that was asked for, and of all for those that return."""

from dataclasses import replace

from swift.elastic.membership.messages import (
    AbortRun,
    ActivateGeneration,
    Died,
    Done,
    FaultInjected,
    FormGeneration,
    Heartbeat,
    Ready,
    RestartAll,
    StageLost,
    StartProcess,
    StateId,
    StopRun,
)
from swift.elastic.membership.status import RecoveryPolicy
from tests.elastic.membership.script import A, B, C, D, after_go, may_restart, once, script_live, survivors


def test_who_is_ended_with_all_others_is_not_given_up(live):
    for _ in range(4):
        live.membership, commands = live.membership.restarted("because", live.time)
        assert commands == (RestartAll("because"),)
        assert live.die(A, B, C, D) == []
        live.start(A, B, C, D)


def test_a_process_that_dies_three_times_before_it_is_live_is_given_up(live):
    assert live.die(D) == [], "it was live"
    for quick_deaths in (1, 2, 3):
        live.start(D)
        commands = live.die(D)
        assert len(commands) == (quick_deaths == 3)
    assert commands == [AbortRun(D, "died 3 times in a row before it was live: killed")]


def test_a_process_that_dies_with_its_node_is_not_given_up_for_it(live):
    live.die(D)
    for _ in range(5):
        live.start(D)
        assert not live.tell(Died, D, 0, "node 1 is gone", False)


def running(script):
    """All but D run, and have finished an iteration since it died."""
    go = survivors(script)
    after_go(script)
    script.beat(dict.fromkeys([A, B, C], 32))
    return go


def test_a_dead_process_is_started_again_once_the_others_run(live):
    survivors(live)
    assert may_restart(live) == [], "the others need the cores"
    after_go(live)
    assert may_restart(live) == []
    live.beat(dict.fromkeys([A, B, C], 32))
    assert may_restart(live) == [StartProcess(D)]
    assert may_restart(live, held_down=frozenset({D})) == []
    assert may_restart(live, away={D: 1.0}) == []


def test_a_process_is_not_started_more_often_than_was_said_unless_it_is_harmed_on_purpose(live):
    live.membership = replace(live.membership, policy=RecoveryPolicy(max_restarts=1))
    for _ in range(3):
        live.membership, _ = live.membership.on(FaultInjected(*live.now(D), live.time))
        live.die(D)
        live.start(D)
        live.ready(D)
    live.die(D)
    live.start(D)
    live.ready(D)
    running(live)
    assert may_restart(live) == []


def test_a_run_ends_where_a_stage_has_nobody_who_may_be_started_again(live):
    live.membership = replace(live.membership, policy=RecoveryPolicy(max_restarts=0))
    live.die(B, D)
    live.tick()
    assert may_restart(live) == [StopRun("stage 1 has no process left that may be restarted")]


def test_a_stage_whose_node_stays_away_ends_the_run_and_no_sooner(live):
    live.die(B, D)
    live.tick()
    assert may_restart(live, away={B: 9.0, D: 11.0}) == []
    reason = "stage 1 has no process left that may be restarted (or whose node has returned)"
    assert may_restart(live, away={B: 11.0, D: 11.0}) == [StopRun(reason)]


def test_a_process_that_is_held_down_is_started_where_its_stage_has_no_other(live):
    live.die(B, D)
    live.tick()
    assert may_restart(live, held_down=frozenset({D})) == [StartProcess(B)]
    assert may_restart(live, held_down=frozenset({B, D})) == [StartProcess(B), StartProcess(D)]


def test_all_are_restarted_after_a_death_where_that_was_asked_for(live):
    live.membership = replace(live.membership, policy=RecoveryPolicy("restart"))
    assert live.die(D) == [RestartAll("1:1 died")]
    assert live.die(A, B, C) == [], "they were killed with it"


def test_where_processes_join_once_all_are_restarted_for_those_that_return():
    script = once()
    script.start(A, B, C)
    script.ready(A, B, C)
    assert script.tick() == [FormGeneration(2, script.now(A, B, C))]
    script.formed({process: {4} for process in (A, B, C)}, of=1)
    assert script.tick() == [ActivateGeneration(2, StateId(1, 4), script.now(A, B, C))]
    script.beat(dict.fromkeys([A, B, C], 6))
    script.start(D)
    assert script.tick() == []
    script.ready(D)
    before = script.membership
    script.tell(Done, A, 2, 0)
    assert script.tick() == [], "a member has nothing left to do"
    script.membership = before
    assert script.tick() == [RestartAll("1:1 can rejoin")]
    script.die(A, B, C, D)
    script.tick()
    script.start(A, B, C, D)
    script.ready(A, B, C, D)
    assert script.tick() == [FormGeneration(3, script.now(A, B, C, D))]


def test_where_processes_join_once_nobody_is_restarted_for_another_before_there_are_copies():
    script = once(memory_checkpoint_every=2)
    script.start(A, B, C)
    script.ready(A, B, C)
    script.tick()
    script.formed({process: {4} for process in (A, B, C)}, of=1)
    script.tick()
    after_go(script)
    script.start(D)
    script.ready(D)
    for process, finished in [(A, 8), (B, 8), (C, 5), (C, 7)]:
        script.tell(Heartbeat, process, 2, finished + 1, finished, 0)
        assert script.tick() == [], "a copy may not be complete"
    script.tell(Heartbeat, C, 2, 9, 8, 0)
    assert script.tick() == [RestartAll("1:1 can rejoin")]


def test_where_processes_join_once_all_are_restarted_if_one_could_not_continue_or_none_does():
    script = script_live(recovery="restart", joins_once=True)
    script.tell(Ready, B, 0, 1)
    assert script.tick() == [RestartAll("a process could not continue")]
    script = script_live(recovery="restart", joins_once=True)
    for _ in range(4):
        script.beat(dict.fromkeys([A, B, C, D], 6))
        assert script.tick(1.5) == []
    script.alive()
    assert script.tick(0.5) == [RestartAll("no process finished an iteration for 6 s, and all are in 6")]


def test_where_all_are_needed_a_generation_waits_for_them_and_the_run_ends_without_one():
    script = once(needs_all=True)
    script.start(A, B, C)
    script.ready(A, B, C)
    assert StageLost not in map(type, script.tick())
    assert may_restart(script, held_down=frozenset({D})) == [StartProcess(D)]
    assert may_restart(script, away={D: 9.0}) == []
    reason = "stage 1 has no process left that may be restarted (or whose node has returned)"
    assert may_restart(script, away={D: 11.0}) == [StopRun(reason)]
    script.start(D)
    script.ready(D)
    assert script.tick() == [FormGeneration(2, script.now(A, B, C, D))]
