"""Stages and states that are lost, and the state that a generation starts from."""

import pytest

from swift.elastic.membership.messages import (
    ActivateGeneration,
    FormGeneration,
    ReshardState,
    Restored,
    RestoreFailed,
    RestoreState,
    ShardLayout,
    StageLost,
    StartGeneration,
    StateId,
    StopRun,
    processes_of,
)
from swift.topology import Topology
from tests.elastic.membership.script import RANKS, A, B, C, D, Script, after_go, survivors


def test_survivors_that_hold_no_common_iteration_go_back_to_the_checkpoint(live):
    live.die(D)
    live.tick()
    live.formed({A: {4, 5}, B: {2, 3}, C: {4, 5}})
    assert live.tick() == [ActivateGeneration(2, None)]


def test_a_lost_stage_is_waited_for_and_its_state_is_lost(live):
    live.die(B)
    live.tick()
    live.die(D)
    assert live.tick() == [StageLost((1,))]
    assert live.membership.unserved_stages
    live.start(D)
    assert live.tick() == []
    live.ready(D)
    assert live.tick() == [FormGeneration(3, live.now(A, C, D))]
    live.formed({A: {4, 5}, C: {4, 5}})
    live.formed({D: {4, 5}}, of=0)
    assert live.tick() == [ActivateGeneration(3, None)], "what a restarted process holds is of an older time"


def test_a_killed_stage_that_finds_its_state_again_goes_on_from_it(live):
    live.die(B, D)
    live.tick()
    live.start(B, D)
    live.ready(B, D)
    assert live.tick() == [FormGeneration(2, live.now(A, B, C, D))]
    live.formed({A: {4, 5}, B: {3, 4}, C: {4, 5}, D: ()})
    assert live.tick() == [ActivateGeneration(2, StateId(1, 4), live.now(A, B, C))]


def test_the_newest_state_is_that_of_the_newest_generation_that_every_stage_has(live):
    live.die(D)
    live.tick()
    live.formed({A: {6}}, of=1)
    live.formed({B: {5}, C: {5}}, of=1)
    assert live.tick() == [ActivateGeneration(2, StateId(1, 5), live.now(B, C))], "C has it for stage 0; A copies"


def test_a_worker_of_several_processes_is_there_when_all_of_them_are():
    processes = processes_of(Topology(1, 1, 3), by_rank=True)
    script = Script(processes)
    script.start(*processes)
    script.ready(*processes)
    script.tick()
    script.formed(dict.fromkeys(processes, ()))
    script.tick()
    script.die(processes[1])
    assert script.tick() == [StageLost((0,))]
    script.start(processes[1])
    script.ready(processes[1])
    assert script.tick() == [FormGeneration(2, script.now(*processes))]
    script.formed({processes[0]: {4}, processes[1]: (), processes[2]: {4}})
    assert script.tick() == [ActivateGeneration(2, None)]


def test_members_run_from_their_own_state_and_only_once(live):
    go = survivors(live)
    assert after_go(live, newest=20, is_full=True, written=29) == [StartGeneration(go, 29)]
    assert after_go(live, newest=40, is_full=True, written=29) == []


@pytest.mark.parametrize(("newest", "is_full", "loads"), [(40, True, True), (40, False, False), (30, True, False)])
def test_a_checkpoint_is_preferred_to_states_where_it_is_newer_and_nothing_is_lost(live, newest, is_full, loads):
    go = survivors(live)
    wanted = RestoreState(2) if loads else StartGeneration(go)
    assert after_go(live, newest=newest, is_full=is_full) == [wanted]


def test_members_wait_for_a_checkpoint_as_long_as_it_takes_and_run_from_it(live):
    survivors(live)
    assert after_go(live, newest=40, is_full=True) == [RestoreState(2)]
    for _ in range(9):
        live.alive()
        assert live.tick(1.5) == []
    assert live.membership.on(Restored(StateId(1, 40), live.time)) == (live.membership, ()), "it was for an older one"
    live.membership, commands = live.membership.on(Restored(StateId(2, 40), live.time, 30))
    assert commands == (StartGeneration(ActivateGeneration(2, StateId(2, 40)), 30, is_restored=True),)


def test_a_checkpoint_that_cannot_be_read_ends_the_run_that_waits_for_it(live):
    survivors(live)
    after_go(live, newest=40, is_full=True)
    assert live.membership.on(RestoreFailed(1, live.time, "lost"))[1] == ()
    assert live.membership.on(RestoreFailed(2, live.time, "lost", "see there"))[1] == (StopRun("lost", "see there"),)


@pytest.mark.parametrize(
    ("stored", "command"),
    [
        ({"written": 9}, StopRun),
        ({"written": 9, "is_busy": True}, RestoreState),
        ({"newest": 5, "written": 9}, RestoreState),
        ({"newest": 5}, StartGeneration),
    ],
)
def test_a_lost_state_comes_from_a_checkpoint_or_ends_the_run_and_at_the_beginning_none_is_lost(live, stored, command):
    live.die(D)
    live.tick()
    live.formed({A: {4, 5}, B: {2, 3}, C: {4, 5}})
    live.tick()
    assert [type(one) for one in after_go(live, **stored)] == [command]


def test_ranks_that_are_fewer_run_from_a_state_that_is_resharded_for_them(elastic):
    r0, r1, r2, r3 = RANKS
    elastic.die(r2)
    elastic.tick()
    elastic.formed({r0: {4}, r1: {4}, r3: {4}})
    (go,) = elastic.tick()
    assert after_go(elastic) == [ReshardState(2, StateId(1, 4), ShardLayout(RANKS, (1,)))]
    elastic.membership, commands = elastic.membership.on(Restored(StateId(2, 4), elastic.time))
    assert commands == (StartGeneration(ActivateGeneration(2, StateId(2, 4), go.holders), is_restored=True),)


def test_where_slices_are_lost_a_newer_checkpoint_is_preferred_though_it_has_not_all_experts_either(elastic):
    r0, r1, _, r3 = RANKS
    elastic.die(RANKS[2])
    elastic.tick()
    elastic.formed({r0: {4}, r1: {4}, r3: {4}})
    elastic.tick()
    assert after_go(elastic, newest=5) == [RestoreState(2)]
