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


JOIN = {"event": "rejoin", "rejoined": ["0:0"], "resumed_from": 15}


def run(dropped, loss, live=4.0, summary=None, until=15, events=(JOIN,)):
    """A run of 40 iterations; ``live`` is the number of workers in those from the 11th to the 15th."""
    live_T = np.full(40, 4.0)
    live_T[10:until] = live
    numbers = {"drop_fraction": np.full(40, dropped), "loss": np.full(40, loss), "live_workers": live_T}
    steps = SimpleNamespace(steps_T=np.arange(1, 41))
    return SimpleNamespace(numbers=numbers, metrics=steps, summary=summary, events=events)


def text_of(lines):
    return " ".join(lines)


def test_it_tells_what_was_dropped_and_what_that_is_worth(tour):
    fixed, moving = run(0.42, 2.0), run(0.0043, 1.8)
    fixed.numbers["loss"] = np.repeat([5.0, 2.0], [20, 20])
    moving.numbers["loss"] = np.repeat([5.0, 1.8], [10, 30])
    text = text_of(tour.gain_of(fixed, moving))
    assert "Static placement dropped 42 % of the tokens, load-following placement 0.43 %," in text
    assert "The loss of the last 20 iterations is 1.80 instead of 2.00." in text
    # The mean of iterations 10 to 29 has one of 5.0, so that it is 1.96; that of 9 to 28 has two, and is 2.12.
    assert "It was 2.00 after 29 iterations instead of 40." in text


def test_a_gain_is_not_told_where_there_is_none(tour):
    text = text_of(tour.gain_of(run(0.42, 2.25), run(0.2, 2.5)))
    assert text.endswith("is 2.50 instead of 2.25.")


def test_it_tells_who_was_killed(tour):
    goodput = {"num_recoveries": 1, "recovery_median_s": 1.25}
    killed = run(0.2, 2.25 + 1e-9, live=3.0, summary={"goodput": goodput})
    text = text_of(tour.recovery_of(run(0.2, 2.25), killed))
    assert "Process 0:0 was killed after iteration 10. 1.2 s later the other three trained on" in text
    assert "micro-batches for 5 iterations, until it was back with a copy of its stage." in text
    assert "within 1e-09 of the run without failures" in text


@pytest.mark.parametrize(
    ("until", "events"), [(40, ()), (15, ()), (40, (JOIN,)), (15, ({**JOIN, "rejoined": ["1:0"]},))]
)
def test_it_says_that_a_process_is_back_only_where_the_record_does(tour, until, events):
    summary = {"goodput": {"num_recoveries": 1, "recovery_median_s": 1.25}}
    killed = run(0.2, 2.25, live=3.0, summary=summary, until=until, events=events)
    text = text_of(tour.recovery_of(run(0.2, 2.25), killed))
    assert f"micro-batches for {until - 10} iterations, and it was not back when the run ended." in text


def test_it_tells_that_nobody_was_killed(tour):
    (line,) = tour.recovery_of(run(0.2, 2.25), run(0.2, 2.25, summary={"goodput": {"num_recoveries": 0}}))
    assert line.startswith("No process was killed")
