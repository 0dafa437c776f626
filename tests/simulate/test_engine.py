"""The engine does what a strategy's turns say, second by second."""

from dataclasses import dataclass, field

import pytest

from swift.simulate.engine import simulate
from swift.simulate.strategies import Decision, IterationTiming, Pause, Saves
from swift.simulate.traces import Event, Trace

SAVES = Saves(every=3, stall_s=1.0)
PACE = IterationTiming(10.0, SAVES)


@dataclass(frozen=True)
class Scripted:
    """Takes its turns from a list, one at each change."""

    turns: tuple
    told: list = field(default_factory=list)
    name, source, iteration_s, samples = "scripted", "a list", 10.0, 7.0

    def start(self, nodes):
        assert nodes == ("a",)
        return 0, Decision(PACE)

    def change(self, state, moment):
        self.told.append(moment)
        return state + 1, self.turns[state]


def run(*turns, times=(50.0, 53.0), horizon_s=100.0):
    """A node goes at the first time, comes back at the second, and so on."""
    events = [Event(time_s, ("remove", "add")[i % 2], "a") for i, time_s in enumerate(times[: len(turns)])]
    strategy = Scripted(turns)
    outcome = simulate(strategy, Trace((Event(0.0, "add", "a"), *events), horizon_s))
    assert sum(outcome.spent_s.values()) == pytest.approx(horizon_s)
    return outcome, strategy.told


def spent(outcome):
    return {cause: pytest.approx(seconds) for cause, seconds in outcome.spent_s.items() if seconds}


def test_without_a_change_iterations_and_saves_follow_each_other():
    outcome, _ = run()
    # Saves begin at 30, 61 and 92 s; 7 s of an iteration are under way in the end.
    assert spent(outcome) == {"useful": 97.0, "saving": 3.0}
    assert outcome.iterations == pytest.approx(9.7)
    assert outcome.ettr == pytest.approx(0.97)
    assert outcome.samples_per_s == pytest.approx(7 * 9.7 / 100)


def test_nothing_happens_where_there_is_no_turn():
    assert run(None, None)[0] == run()[0]


def test_the_iteration_under_way_is_lost():
    outcome, told = run(Decision(PACE, "iteration", (Pause("detection", 3.0), Pause("reconfiguration", 2.0))))
    assert (told[0].iterations_run, told[0].iterations_kept, told[0].is_running) == (4, 4, True)
    # 4 iterations by 41 s; 9 s are lost; from 55 s on 4 more, a save, and 4 s of a fifth.
    assert spent(outcome) == {"useful": 84.0, "saving": 2.0, "lost": 9.0, "detection": 3.0, "reconfiguration": 2.0}


def test_all_since_the_newest_save_is_lost():
    outcome, _ = run(Decision(PACE, "checkpoint", (Pause("reconfiguration", 5.0),)))
    assert spent(outcome) == {"useful": 74.0, "saving": 2.0, "lost": 19.0, "reconfiguration": 5.0}
    assert [stretch.lost for stretch in outcome.stretches] == [1, 0, 0]


def test_a_save_that_cannot_be_restored_yet_is_no_help():
    slow = Decision(IterationTiming(10.0, Saves(3, 1.0, lag=2)), "iteration")
    outcome, _ = run(slow, Decision(PACE, "checkpoint"), times=(10.0, 10.0 + 41.5))
    # The second pace has 4 iterations by then. A save after the third takes 2 more to be of use.
    assert outcome.spent_s["lost"] == pytest.approx(10 + 40 + 0.5)


def test_the_iteration_under_way_is_finished_first():
    outcome, _ = run(Decision(IterationTiming(20.0), "nothing", (Pause("reconfiguration", 2.0),), stretch=2.0))
    # 9 of its 10 s are over: 2 s more, 2 s of a pause, 46 s at half the speed.
    assert spent(outcome) == {"useful": 73.0, "slowdown": 24.0, "saving": 1.0, "reconfiguration": 2.0}


def test_a_save_under_way_is_finished_first():
    outcome, _ = run(Decision(IterationTiming(10.0), "nothing"), times=(30.25,))
    assert spent(outcome) == {"useful": 99.0, "saving": 1.0}


def test_what_was_saved_before_a_pause_is_not_lost_by_a_later_turn():
    saved = Decision(IterationTiming(10.0), "nothing", (Pause("saving", 2.0),), saved=True)
    outcome, told = run(saved, Decision(IterationTiming(10.0), "checkpoint"), times=(45.0, 80.0))
    # At 51 s the fifth iteration is done and saved; from 53 s on there are 2 more, which are lost, and 7 s.
    assert (told[1].iterations_run, told[1].iterations_kept) == (7, 7)
    assert spent(outcome) == {"useful": 70.0, "saving": 3.0, "lost": 27.0}


def test_a_new_failure_ends_the_pauses_and_a_new_join_waits_for_them():
    pauses = (Pause("detection", 3.0), Pause("reconfiguration", 10.0))
    first, join = Decision(PACE, "iteration", pauses), Decision(PACE, "nothing", (Pause("reconfiguration", 1.0),))
    outcome, told = run(first, join, times=(50.0, 55.0))
    assert not told[1].is_running
    assert (outcome.spent_s["detection"], outcome.spent_s["reconfiguration"]) == (3.0, 11.0)
    outcome, _ = run(first, None, first, times=(50.0, 52.0, 55.0))
    assert (outcome.spent_s["detection"], outcome.spent_s["reconfiguration"]) == (6.0, pytest.approx(12.0))


def test_the_rest_of_an_iteration_is_stretched_again_by_a_second_turn():
    slower = Decision(IterationTiming(20.0), "nothing", stretch=2.0)
    outcome, _ = run(slower, slower, times=(45.0, 47.0))
    # 6 s were left, then 12, of which 2 pass, and of the other 10 there are 20.
    assert outcome.stretches[1].end_s == pytest.approx(47 + 20)


def test_waiting_is_counted_by_its_cause():
    outcome, _ = run(Decision(None, "iteration", waits_for="out_of_memory"), Decision(PACE), times=(50.0, 70.0))
    assert spent(outcome) == {"useful": 70.0, "saving": 1.0, "lost": 9.0, "out_of_memory": 20.0}


def test_what_happens_at_the_end_costs_nothing():
    assert run(Decision(None, "checkpoint"), times=(100.0,))[0] == run()[0]


def test_goodput_over_time_is_what_is_kept():
    outcome, _ = run(Decision(PACE, "checkpoint", (Pause("reconfiguration", 5.0),)))
    edges, goodput = outcome.goodput(4)
    assert edges.tolist() == [0, 25, 50, 75, 100]
    assert goodput.mean() == pytest.approx(outcome.ettr)
    # The first pace lasts 41 s with its save, and its last iteration of 4 is undone.
    assert goodput[1] == pytest.approx(3 * (30.75 - 25) / 30.75 * 10 / 25)
