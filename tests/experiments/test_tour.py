"""The demo's closing sentences have the numbers of its runs."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

PATH = Path(__file__).parents[2] / "experiments" / "tour" / "tour.py"


@pytest.fixture
def tour(monkeypatch):
    spec = importlib.util.spec_from_file_location("tour", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "scalars", lambda run, name: run.numbers[name])
    return module


JOIN = {"event": "join", "joined": ["0:0"], "after": 15}


def run(dropped, loss, live=4.0, summary=None, until=15, events=(JOIN,)):
    """A run of 40 iterations; ``live`` is the number of workers in those from the 11th to the 15th."""
    live_T = np.full(40, 4.0)
    live_T[10:until] = live
    numbers = {"drop_share": np.full(40, dropped), "loss": np.full(40, loss), "live_workers": live_T}
    steps = SimpleNamespace(steps_T=np.arange(1, 41))
    return SimpleNamespace(numbers=numbers, metrics=steps, summary=summary, events=events)


def test_it_tells_what_was_dropped_and_who_was_killed(tour):
    goodput = {"num_recoveries": 1, "recovery_median_s": 1.25}
    killed = run(0.2, 2.25 + 1e-9, live=3.0, summary={"goodput": goodput})
    text = " ".join(tour.summary_of(run(0.42, 2.5), run(0.0043, 2.25), killed))
    assert "Static placement dropped 42 % of the tokens, load-following placement 0.43 %," in text
    assert "The loss of the last 20 iterations is 2.25 instead of 2.50." in text
    assert "Process 0:0 was killed after iteration 10. 1.2 s later the other three trained on" in text
    assert "micro-batches for 5 iterations, until it was back with a copy of its stage." in text
    assert "within 1e-09 of the run without failures" in text


@pytest.mark.parametrize(("until", "events"), [(40, ()), (15, ()), (40, (JOIN,)), (15, ({**JOIN, "joined": ["1:0"]},))])
def test_it_says_that_a_process_is_back_only_where_the_record_does(tour, until, events):
    summary = {"goodput": {"num_recoveries": 1, "recovery_median_s": 1.25}}
    killed = run(0.2, 2.25, live=3.0, summary=summary, until=until, events=events)
    text = " ".join(tour.summary_of(run(0.42, 2.5), run(0.2, 2.25), killed))
    assert f"micro-batches for {until - 10} iterations, and it was not back when the run ended." in text


def test_it_tells_that_nobody_was_killed(tour):
    lines = tour.summary_of(run(0.42, 2.5), run(0.2, 2.25), run(0.2, 2.25, summary={"goodput": {"num_recoveries": 0}}))
    assert lines[-1].startswith("No process was killed")


@pytest.mark.parametrize("after", [2.29, 2.251, 2.21])
def test_a_difference_as_between_seeds_is_no_gain(tour, after):
    text = " ".join(tour.summary_of(run(0.42, 2.25), run(0.2, after), run(0.2, after)))
    assert f"Their losses, 2.25 and {after:.2f}, differ less than those of two seeds" in text
    assert "instead of" not in text
