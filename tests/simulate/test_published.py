"""Oobleck, Varuna and Bamboo come to the averages that Oobleck's artifact comes to, on its own traces."""

import pytest

from swift.simulate.engine import simulate
from swift.simulate.published import GLOBAL_RENDEZVOUS_S, SLOWDOWN, Bamboo, Oobleck, Varuna, published
from swift.simulate.traces import Event, Trace

REMOVALS = {
    "6h": (21600.0, (10, 14, 4, 16, 7, 28, 22, 17, 21, 26, 6, 24, 29, 25, 19)),
    "30m": (1800.0, (1, 13, 5, 23, 16, 21, 14, 20, 7, 4, 12, 3, 17, 25, 2)),
}
"""Nodes that go in each period, of 30."""
AVERAGES = {  # samples/s of Bamboo, Varuna, Oobleck
    ("bert-large", "6h"): (77.0, 260.1, 287.1),
    ("bert-large", "30m"): (75.5, 232.8, 285.2),
    ("gpt3-medium", "6h"): (None, 29.5, 29.3),
    ("gpt3-medium", "30m"): (None, 27.9, 29.1),
    ("gpt3-6.7b", "6h"): (None, 4.15, 4.33),
    ("gpt3-6.7b", "30m"): (None, None, 4.11),
}
"""Published. Left out is Varuna's 1.06 of GPT-3 6.7B: see the last test."""
CASES = [
    (model, period, strategy, average)
    for (model, period), averages in AVERAGES.items()
    for strategy, average in zip((Bamboo, Varuna, Oobleck), averages, strict=True)
    if average is not None
]


def thirty(period_s, victims):
    added = [Event(0.0, "add", f"node{number}") for number in range(1, 31)]
    removed = [Event(period_s * index, "remove", f"node{number}") for index, number in enumerate(victims, start=1)]
    return Trace((*added, *removed), period_s * len(victims))


@pytest.mark.parametrize(("model", "period", "strategy", "average"), CASES)
def test_the_average_is_within_5_percent_of_the_published_one(model, period, strategy, average):
    outcome = simulate(strategy(published(model)), thirty(*REMOVALS[period]))
    assert outcome.samples_per_s == pytest.approx(average, rel=0.05)


def test_a_model_that_does_not_fit_is_out_of_memory_and_not_slow():
    period_s, victims = REMOVALS["6h"]
    trace = Trace(thirty(period_s, victims).events, 16 * period_s)
    outcome = simulate(Oobleck(published("gpt3-6.7b")), trace)
    assert outcome.spent_s["out_of_memory"] == pytest.approx(period_s)
    assert outcome.spent_s["waiting"] == 0


def test_fewer_nodes_than_are_published_wait():
    trace = thirty(1000.0, range(1, 18))
    for strategy in (Oobleck, Varuna):
        assert simulate(strategy(published("gpt-2")), trace).spent_s["waiting"] == pytest.approx(1000.0)


def test_bamboo_absorbs_a_loss_and_takes_a_double_one_for_fatal():
    bamboo = Bamboo(published("bert-large"))
    absorbed = simulate(bamboo, thirty(5000.0, (5, 1)))
    assert absorbed.spent_s["lost"] == 0
    assert absorbed.spent_s["reconfiguration"] == 76.0
    events = (*thirty(5000.0, (5,)).events, Event(5000.0, "remove", "node4"))  # node 5, and its shadow
    fatal = simulate(bamboo, Trace(events, 9000.0))
    assert fatal.spent_s["reconfiguration"] == GLOBAL_RENDEZVOUS_S
    assert fatal.spent_s["lost"] > 0


def test_bamboo_slows_down_for_a_spare_node_that_goes():
    """The artifact's 30 nodes are 2 pipelines of 12, and 6 spare nodes."""
    bamboo = Bamboo(published("bert-large"))
    outcome = simulate(bamboo, thirty(5000.0, (30, 1)))
    assert outcome.stretches[-1].iteration_s == pytest.approx(SLOWDOWN * bamboo.iteration_s)


def test_varuna_saves_every_tenth_iteration_and_the_first_after_a_restart():
    model = published("gpt3-medium")
    outcome = simulate(Varuna(model), thirty(1800.0, (1, 2)))
    step_s, slower_s = model.samples / model.varuna[0], model.samples / model.varuna[1]
    run, left_s = divmod(1800.0, 10 * step_s + 11.2)
    restart_s = 78.7 - 11.2
    first_s = slower_s + 11.2
    assert outcome.spent_s["reconfiguration"] == pytest.approx(restart_s)
    assert outcome.spent_s["lost"] == pytest.approx(min(left_s, 10 * step_s), abs=11.2)
    assert outcome.spent_s["saving"] >= (run + 1) * 11.2
    assert first_s < 1800 - restart_s


def test_varuna_falls_short_of_the_published_figure_where_restarts_take_a_third_of_the_time():
    """The published iterations continue while a restart is under way, and count; see docs/tools.md."""
    outcome = simulate(Varuna(published("gpt3-6.7b")), thirty(*REMOVALS["30m"]))
    assert outcome.samples_per_s == pytest.approx(0.71, abs=0.01)
