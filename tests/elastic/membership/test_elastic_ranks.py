"""Elastic runs: any number of ranks continue, with slices of the state that are cut anew for them."""

from dataclasses import replace

from swift.elastic.membership.messages import ActivateGeneration, FormGeneration, Ready, ShardLayout, StageLost, StateId
from tests.elastic.membership.script import RANKS


def find(script, *found):
    """The first of those who have formed knows of slices elsewhere: process, generation, iteration."""
    generation = script.membership.generation
    script.membership = replace(
        script.membership,
        generation=replace(
            generation, known_slices=frozenset((process, StateId(of, step)) for process, of, step in found)
        ),
    )


def test_the_ranks_that_are_there_go_on_at_once(elastic):
    r0, r1, r2, r3 = RANKS
    elastic.die(r2)
    assert elastic.tick() == [FormGeneration(2, elastic.now(r0, r1, r3))]
    elastic.formed({r0: {4, 5}, r1: {4, 5}, r3: {3, 4}})
    find(elastic, (r2, 1, 4), (r2, 1, 3))
    assert elastic.tick() == [ActivateGeneration(2, StateId(1, 4), elastic.now(r0, r1, r3), ShardLayout(RANKS, (1,)))]


def test_a_state_with_all_slices_is_preferred_to_a_newer_one(elastic):
    r0, r1, r2, r3 = RANKS
    elastic.die(r2)
    elastic.tick()
    elastic.formed({r0: {4, 5}, r1: {4, 5}, r3: {4, 5}})
    find(elastic, (r2, 1, 4))
    (go,) = elastic.tick()
    assert (go.stamp, go.is_whole) == (StateId(1, 4), True)


def test_where_slices_are_lost_all_go_on_from_the_newest_state_that_most_have(elastic):
    r0, r1, _, r3 = RANKS
    elastic.die(RANKS[2])
    elastic.tick()
    elastic.formed({r0: {4, 5}, r1: {3, 4}, r3: {4, 5}})
    assert elastic.tick() == [
        ActivateGeneration(2, StateId(1, 4), elastic.now(r0, r1, r3), ShardLayout(RANKS, (1,)), is_whole=False)
    ]


def shrunk(script):
    """The second rank is lost, and the others are in iteration 8 on a state that was cut for them."""
    r0, r1, r2, r3 = RANKS
    script.die(r1)
    script.tick()
    script.formed({r0: {4, 5}, r2: {4, 5}, r3: {4, 5}})
    script.tick()
    script.beat({r0: 8, r2: 8, r3: 8})
    return r0, r2, r3


def test_who_comes_back_makes_the_ranks_more_again(elastic):
    others = shrunk(elastic)
    elastic.start(RANKS[1])
    elastic.ready(RANKS[1])
    assert elastic.tick() == [FormGeneration(3, elastic.now(*RANKS), after=9)]
    elastic.formed({process: {8, 9} for process in others}, of=2)
    elastic.formed({RANKS[1]: {4}}, of=1)  # it has found an old state
    assert elastic.tick() == [ActivateGeneration(3, StateId(2, 9), elastic.now(*others), ShardLayout(others, (2,)))]


def test_the_same_ranks_go_on_with_what_they_have_and_the_cut_stays_that_of_older_copies(elastic):
    others = shrunk(elastic)
    elastic.tell(Ready, others[0], 0, 2)
    assert elastic.tick() == [FormGeneration(3, elastic.now(*others))]
    elastic.formed({process: {6, 7} for process in others}, of=2)
    assert elastic.tick() == [ActivateGeneration(3, StateId(2, 7), elastic.now(*others))]
    elastic.die(others[0])
    elastic.tick()
    elastic.formed({process: {8} for process in others[1:]}, of=3)
    (go,) = elastic.tick()
    assert (go.layout, go.is_whole) == (ShardLayout(others, (2, 3)), False)


def test_who_has_lost_everything_though_nobody_is_less_has_its_slices_cut_anew(elastic):
    elastic.die(RANKS[2])
    elastic.start(RANKS[2])
    elastic.ready(RANKS[2])
    assert elastic.tick() == [FormGeneration(2, elastic.now(*RANKS))]
    elastic.formed({process: {4} for process in RANKS if process != RANKS[2]})
    elastic.formed({RANKS[2]: ()})
    find(elastic, (RANKS[2], 1, 4))
    (go,) = elastic.tick()
    assert (go.stamp, go.layout) == (StateId(1, 4), ShardLayout(RANKS, (1,)))


def test_what_is_lost_before_the_first_iteration_is_made_again(elastic):
    elastic.die(RANKS[2])
    elastic.tick()
    elastic.formed({process: {0} for process in RANKS if process != RANKS[2]})
    assert elastic.tick() == [ActivateGeneration(2, None)]


def test_the_last_rank_goes_on_alone_and_without_it_the_stage_is_lost(elastic):
    elastic.die(*RANKS[1:])
    assert elastic.tick() == [FormGeneration(2, elastic.now(RANKS[0]))]
    elastic.formed({RANKS[0]: {5}})
    elastic.tick()
    elastic.die(RANKS[0])
    assert elastic.tick() == [StageLost((0,))]


def test_an_old_state_that_is_there_by_chance_is_not_gone_back_to(elastic):
    others = shrunk(elastic)
    elastic.die(others[0])
    elastic.start(others[0])
    elastic.ready(others[0])
    elastic.tick()
    elastic.formed({others[0]: {4}}, of=2)
    elastic.formed({process: {7, 8} for process in others[1:]}, of=2)
    find(elastic, *((process, 2, 4) for process in others))
    (go,) = elastic.tick()
    assert (go.stamp, go.is_whole) == (StateId(2, 8), False)


def test_where_only_some_have_taken_up_a_state_that_was_cut_anew_that_before_is_as_good(elastic):
    """The first has; the others have not, and one of them dies with all that it had of the new one."""
    r0, r1, r2, r3 = RANKS
    elastic.die(r1)
    elastic.tick()
    elastic.formed({process: {4} for process in (r0, r2, r3)})
    elastic.tick()
    elastic.die(r2)
    assert elastic.tick() == [FormGeneration(3, elastic.now(r0, r3))]
    elastic.formed({r0: {4}}, of=2)
    elastic.formed({r3: {4}}, of=1)
    find(elastic, (r0, 1, 4), (r1, 1, 4), (r2, 1, 4), (r3, 2, 4))
    assert elastic.tick() == [ActivateGeneration(3, StateId(1, 4), elastic.now(r3), ShardLayout(RANKS, (1,)))]
