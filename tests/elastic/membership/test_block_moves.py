"""Moves of blocks to survivors: when they pay, what they wait for, and processes that refuse them."""

import pytest

from swift.elastic.membership.messages import (
    ActivateGeneration,
    FormGeneration,
    Loaded,
    PhaseTimed,
    PreloadPrograms,
    RecutFailed,
    RecutReady,
    StateId,
)
from swift.elastic.membership.status import ProcessState
from swift.schedules.adapt.moves import Downtimes, MigrationPolicy
from tests.elastic.membership.script import B_DOWN, LIMITS, MOVED, A, B, C, D, found, lost


def test_survivors_take_over_blocks_in_a_planned_change_and_once():
    script = lost()
    assert found(script) == [FormGeneration(3, script.now(A, C, D), 8, MOVED)]
    script.formed({A: (7, 8), C: (7, 8), D: (7, 8)})
    assert script.tick() == [ActivateGeneration(3, StateId(2, 8), script.now(A, C, D))]
    script.beat({A: 10, C: 10, D: 10})
    assert found(script) == []


def test_blocks_move_once_the_last_process_has_the_programs_however_long_it_takes():
    script = lost()
    script.membership, _ = script.membership.on(RecutReady(script.time, B_DOWN, MOVED, 0.5, 1e9))
    assert script.tick() == [PreloadPrograms(2, script.now(A, C, D), MOVED)]
    for process in (A, C):
        script.tell(Loaded, process, 2, 0)
    for iteration in range(8, 8 + 2 * LIMITS.progress):
        assert script.tick(1.0) == []
        script.beat(dict.fromkeys((A, C, D), iteration))
    script.tell(Loaded, D, 2, 0)
    form = FormGeneration(3, script.now(A, C, D), iteration + 1, MOVED)
    assert form.stays_connected
    assert script.tick() == [form]


def test_programs_are_loaded_anew_once_another_process_has_died_meanwhile():
    script = lost()
    script.membership, _ = script.membership.on(RecutReady(script.time, B_DOWN, MOVED, 0.5, 1e9))
    script.tick()
    script.die(C)
    assert script.tick() == [FormGeneration(3, script.now(A, D))]
    script.tell(Loaded, A, 2, 0)  # sent before it had heard of the death
    script.formed({A: (6, 7), D: (6, 7)})
    script.tick()
    script.beat({A: 9, D: 9})
    assert script.tick() == []
    moved = FormGeneration(4, script.now(A, D), 10, MOVED)
    assert found(script, B_DOWN | {C.worker}) == [moved]


def test_a_process_that_does_not_know_the_cut_as_it_is_to_load_it_goes_on_and_no_blocks_move():
    script = lost()
    script.membership, _ = script.membership.on(RecutReady(script.time, B_DOWN, MOVED, 0.5, 1e9))
    script.tick()
    script.tell(Loaded, A, 2, 0)
    script.tell(RecutFailed, C, 2, "another plan", 0)
    script.tell(Loaded, D, 2, 0)
    assert script.tick() == []
    assert script.membership.statuses[C].state is ProcessState.LIVE
    assert found(script) == []


def test_who_does_not_know_the_cut_is_in_the_next_generation_and_blocks_stay_from_then_on():
    """D has another plan. Neither the same failure nor another one leads to a second try."""
    script = lost()
    found(script)
    script.left(A, C)
    script.tell(RecutFailed, D, 3, "another plan", 0)
    assert script.tick() == [FormGeneration(4, script.now(A, C, D))]
    script.formed({A: (7, 8), C: (7, 8), D: (7, 8)}, of=2)
    assert script.tick() == [ActivateGeneration(4, StateId(2, 8), script.now(A, C, D))]
    script.beat({A: 10, C: 10, D: 10})
    assert found(script) == []
    script.start(B)
    script.ready(B)
    assert script.tick() == [FormGeneration(5, script.now(A, B, C, D), 11)]
    script.formed({A: (10, 11), B: (), C: (10, 11), D: (10, 11)})
    script.tick()
    script.beat(dict.fromkeys((A, B, C, D), 13))
    script.die(C)
    script.tick()
    script.formed(dict.fromkeys((A, B, D), (12, 13)))
    script.tick()
    script.beat({A: 15, B: 15, D: 15})
    assert found(script, frozenset({C.worker})) == []


def test_joiners_come_before_blocks():
    script = lost()
    script.start(B)
    script.ready(B)
    assert found(script) == [FormGeneration(3, script.now(A, B, C, D), 8)]


@pytest.mark.parametrize("failed", [frozenset(), frozenset({D.worker}), frozenset({B.worker, C.worker})])
def test_a_cut_for_other_failures_is_not_used(failed):
    assert found(lost(), failed) == []


def test_without_a_rule_blocks_stay():
    assert found(lost(rule=None)) == []


def test_blocks_move_where_that_pays_before_the_return_that_is_expected():
    """At 12.5 GB/s the two moves of 1 GB take 0.16 s, which a gain of a half makes up for in 0.32 s."""
    assert found(lost(MigrationPolicy(Downtimes(0.31)))) == []
    script = lost(MigrationPolicy(Downtimes(0.33)))
    assert found(script) == [FormGeneration(3, script.now(A, C, D), 8, MOVED)]


def test_how_long_a_move_takes_and_how_long_workers_stay_away_is_learnt():
    """A move for which all wait for two seconds, and downtimes of ten: then such a move does not pay any more."""
    script = lost(MigrationPolicy(Downtimes()))
    assert found(script) == [FormGeneration(3, script.now(A, C, D), 8, MOVED)]
    script.formed({A: (7, 8), C: (7, 8), D: (7, 8)})
    script.tick()
    script.time += 2.0
    for member in (A, C, D):
        script.tell(PhaseTimed, member, 3, "state", 0.5, 0)
    assert script.membership.moves.rule.bytes_per_s == 5e8
    script.beat({A: 10, C: 10, D: 10})
    script.start(B)
    script.ready(B)
    script.tick()
    assert script.membership.moves.rule.downtimes.expected_s == 2.0
    script.formed({A: (10, 11), B: (), C: (10, 11), D: (10, 11)})
    script.tick()
    script.beat(dict.fromkeys((A, B, C, D), 13))
    script.die(B)
    script.tick()
    script.formed(dict.fromkeys((A, C, D), (12, 13)))
    script.tick()
    script.beat({A: 15, C: 15, D: 15})
    assert found(script) == []
