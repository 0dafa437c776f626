"""Generations that form after deaths, and that processes join."""

from swift.elastic.membership.messages import (
    ActivateGeneration,
    Connect,
    Formed,
    FormGeneration,
    Kill,
    PhaseTimed,
    Ready,
    StageLost,
    StateId,
)
from tests.elastic.membership.script import A, B, C, D, Script


def test_the_first_generation_waits_until_everybody_is_ready_and_everybody_has_formed():
    script = Script()
    script.start(A, B, C, D)
    script.ready(A, B, C)
    assert script.tick(1) == []
    script.ready(D)
    assert script.tick() == [FormGeneration(1, script.now(A, B, C, D))]
    script.formed({A: (), B: (), C: ()})
    assert script.tick() == []
    script.formed({D: ()})
    assert script.tick() == [ActivateGeneration(1, None)]
    assert script.tick() == []


def test_who_is_not_ready_in_time_is_killed_and_the_first_generation_forms_without_it():
    script = Script()
    script.start(A, B, C, D)
    script.time = 9.5
    script.ready(A, B, C)
    assert script.tick() == []
    assert script.tick(1) == [Kill(*script.now(D), "was not ready 10 s after its start")]
    assert script.tick() == []
    script.die(D)
    assert script.tick() == [FormGeneration(1, script.now(A, B, C))]


def test_a_run_that_never_has_somebody_for_a_stage_says_so():
    script = Script()
    script.start(A, C)
    script.time = 9.5
    script.ready(A, C)
    assert script.tick(1) == [StageLost((1,))]
    assert script.tick() == []


def test_a_death_makes_an_generation_of_the_others_that_goes_on_where_all_of_them_can(live):
    live.die(D)
    assert live.tick() == [FormGeneration(2, live.now(A, B, C))]
    live.formed({A: {4, 5}, B: {3, 4}, C: {3, 4}})
    assert live.tick() == [ActivateGeneration(2, StateId(1, 4), live.now(A, B, C))]


def test_two_deaths_at_once_are_one_generation(live):
    live.die(A, D)
    assert live.tick() == [FormGeneration(2, live.now(B, C))]
    assert live.tick() == []


def test_a_death_while_forming_makes_a_newer_generation_and_answers_to_the_older_are_not_counted(live):
    live.die(D)
    live.tick()
    live.formed({A: {4}, B: {4}})
    live.die(C)
    assert live.tick() == [FormGeneration(3, live.now(A, B))]
    live.tell(Formed, A, 2, frozenset({StateId(1, 4)}), 0)
    live.formed({B: {4}})
    assert live.tick() == []
    live.formed({A: {4}})
    assert live.tick() == [ActivateGeneration(3, StateId(1, 4), live.now(A, B))]


def test_who_does_not_form_in_time_is_killed_and_left_out_once_it_is_dead(live):
    live.die(D)
    live.tick()
    live.formed({A: {4}, B: {4}})
    for _ in range(3):
        live.alive()
        live.tick(1.5)
    live.alive()
    assert live.membership.statuses[C].is_dying
    assert live.tick() == []
    live.die(C)
    assert live.tick() == [FormGeneration(3, live.now(A, B))]


def test_who_has_met_the_others_is_given_time_to_compile(live):
    live.die(D)
    live.tick()
    live.tell(PhaseTimed, A, 2, "connect", 0.1, 0)
    live.formed({B: {4}, C: {4}})
    for _ in range(3):
        live.alive()
        assert live.tick(1.5) == []
    for _ in range(2):
        live.alive()
        live.tick(1.5)
    assert [process for process, status in live.membership.statuses.items() if status.is_dying] == [A]


def test_joiners_are_admitted_together_after_the_iteration_that_nobody_has_entered_yet(live):
    live.die(C, D)
    live.tick()
    live.formed({A: {4}, B: {4}})
    live.tick()
    live.start(C, D)
    live.ready(C, D)
    assert live.tick() == [], "nobody is known to run yet"
    live.beat({A: 7, B: 6})
    assert live.tick() == [FormGeneration(3, live.now(A, B, C, D), after=8)]
    live.formed({A: {7, 8}, B: {7, 8}, C: (), D: ()})
    assert live.tick() == [ActivateGeneration(3, StateId(2, 8), live.now(A, B))]


def joining(script):
    """D has died and come back, and all others are in iteration 8 while they are told to end it."""
    script.die(D)
    script.tick()
    script.formed({A: {4}, B: {4}, C: {4}})
    script.tick()
    script.start(D)
    script.ready(D)
    script.beat({A: 8, B: 8, C: 8})
    assert script.tick() == [FormGeneration(3, script.now(A, B, C, D), after=9)]


def test_a_death_while_somebody_joins_makes_an_generation_of_all_who_are_ready(live):
    joining(live)
    live.die(A)
    assert live.tick() == [FormGeneration(4, live.now(B, C, D))]
    live.formed({B: {7, 8}, C: {7, 8}, D: ()})
    assert live.tick() == [ActivateGeneration(4, StateId(2, 8), live.now(B, C))]


def test_a_joiner_that_dies_costs_an_generation_but_no_iteration(live):
    joining(live)
    live.die(D)
    assert live.tick() == [FormGeneration(4, live.now(A, B, C))]


def test_members_that_never_end_the_iteration_before_a_join_are_told_to_abort(live):
    joining(live)
    for _ in range(4):
        live.alive()
        assert live.tick(1.5) == []
    live.alive()
    assert live.tick(0.5) == [FormGeneration(4, live.now(A, B, C, D))]


def test_a_member_that_cannot_go_on_though_all_live_gets_a_new_generation_of_the_same(live):
    live.tell(Ready, A, 0, 1)
    assert live.tick() == [FormGeneration(2, live.now(A, B, C, D))]
    live.tell(Ready, B, 0, 1)
    assert live.tick() == [], "it did not know yet of the newer one"


def test_a_member_that_cannot_go_on_before_a_join_does_not_keep_the_others_waiting(live):
    joining(live)
    live.tell(Ready, A, 0, 2)
    assert live.tick() == [FormGeneration(4, live.now(A, B, C, D))]


def test_all_enter_once_the_last_has_left(live):
    live.die(D)
    live.tick()
    assert live.left(A, C) == []
    assert live.left(A) == [], "once more"
    assert live.left(B) == [Connect(2, live.now(A, B, C))]
