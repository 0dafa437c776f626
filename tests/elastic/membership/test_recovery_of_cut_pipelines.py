"""Recovery where pipelines are cut differently, from the beginning or because blocks have moved."""

from swift.elastic.membership.messages import (
    ActivateGeneration,
    CheckpointsListed,
    Formed,
    FormGeneration,
    StageLost,
    StateId,
    covers_whole_state,
    newest_complete_state,
)
from swift.schedules.plans.normalize import ChunkAssignment, Move
from tests.elastic.membership.script import MOVED, A, B, C, D, found, lost, moved, script_live

APART = ChunkAssignment(((0, 0, 1), (0, 1, 1)))
"""Pipelines that are cut differently: A has the first two of three chunks, B the last, C the first, D the last two."""


def test_where_pipelines_are_cut_differently_those_who_have_every_chunk_go_on():
    live = script_live(own_cut=APART)
    live.die(B, C)
    assert live.tick() == [FormGeneration(2, live.now(A, D))]
    live.formed({A: {4, 5}, D: {4}})
    assert live.tick() == [ActivateGeneration(2, StateId(1, 4), live.now(A, D))]


def test_a_chunk_that_nobody_has_is_waited_for_though_each_stage_has_a_worker():
    live = script_live(own_cut=APART)
    live.die(A, D)
    assert live.tick() == [StageLost((0, 1))]
    assert live.membership.lost_without([A, D]) == (0, 1)
    assert live.membership.lost_without([A]) == live.membership.lost_without([B, C]) == ()
    live.start(A)
    live.ready(A)
    assert live.tick() == [FormGeneration(2, live.now(A, B, C))]


def test_a_state_is_gone_on_with_only_if_workers_that_have_every_chunk_hold_it():
    live = script_live(own_cut=APART)
    live.die(D)
    live.tick()
    live.formed({A: {4}, B: {4, 5}, C: {4, 5}})
    assert live.tick() == [ActivateGeneration(2, StateId(1, 4), live.now(A, B, C))]


def test_who_returns_ends_a_move_and_gets_blocks_of_those_who_took_them():
    script = moved()
    script.start(B)
    script.ready(B)
    assert script.tick() == [FormGeneration(4, script.now(A, B, C, D), 11)]
    script.formed({A: (10, 11), B: (), C: (10, 11), D: (10, 11)})
    assert script.tick() == [ActivateGeneration(4, StateId(3, 11), script.now(A, C, D), cut=MOVED)]
    script.beat(dict.fromkeys((A, B, C, D), 13))
    script.die(B)
    assert script.tick() == [FormGeneration(5, script.now(A, C, D))]
    script.formed(dict.fromkeys((A, C, D), (12, 13)))
    script.tick()
    script.beat({A: 15, C: 15, D: 15})
    assert found(script) == [FormGeneration(6, script.now(A, C, D), 16, MOVED)]


def test_a_second_failure_in_the_midst_of_a_move_is_survived_with_the_blocks_of_before():
    """D is killed once A has got its blocks, and C has not; A has its own state of before, too, and D finds it."""
    script = lost()
    found(script)
    script.formed({A: (7, 8), C: (7, 8), D: (7, 8)})
    script.tick()
    script.die(D)
    assert script.tick() == [StageLost((1,))]
    script.start(D)
    script.ready(D)
    assert script.tick() == [FormGeneration(4, script.now(A, C, D))]
    script.left(A, C, D)
    before, moved = StateId(2, 8), StateId(3, 8)
    for member, held in ((A, {before, moved}), (C, {before}), (D, {before})):
        script.tell(Formed, member, 4, frozenset(held), 0)
    assert script.tick() == [ActivateGeneration(4, moved, script.now(A), cut=MOVED)]


def test_blocks_that_one_worker_took_over_are_all_there_where_its_stage_alone_is_left_and_another_joins():
    """D dies, so that stage 1 waits for it; A has all blocks of the newest state, and D, which returns, has none."""
    script = moved()
    script.die(D)
    script.tick()
    script.start(D)
    script.ready(D)
    script.tick()
    script.formed({A: (8, 9), C: (8, 9), D: ()})
    assert script.tick() == [ActivateGeneration(4, StateId(3, 9), script.now(A, C), cut=MOVED)]


def test_where_nobody_has_a_block_in_the_midst_of_a_move_all_go_back_with_the_blocks_of_the_run():
    script = lost()
    found(script)
    script.formed({A: (), C: (7, 8), D: ()})
    assert script.tick() == [ActivateGeneration(3, None)]
    script.membership, commands = script.membership.on(CheckpointsListed(script.time, 4, True, False, 8))
    assert commands == (FormGeneration(4, script.now(A, C, D)),)


def test_who_has_the_place_of_another_counts_for_its_blocks():
    """B is down: A has the first half of the layers, D in B's place the second one, and C all of them."""
    everyone, newest = (A, B, C, D), StateId(3, 9)
    cut = ChunkAssignment(((0, 0, 1, 1), (0, 0, 0, 0)), (Move(D.worker, B.worker),))
    assert covers_whole_state(everyone, [A, D], cut)
    assert covers_whole_state(everyone, [C], cut)
    assert not covers_whole_state(everyone, [D], cut)
    held_by = {A: frozenset({newest}), D: frozenset({newest}), C: frozenset({StateId(3, 8)})}
    assert newest_complete_state(everyone, held_by, lambda _: cut) == newest
