"""Numbers in a record that no run writes, but a damaged or foreign file may hold, end no view."""

import json
import warnings

import pytest

from swift.train.display import describe
from swift.watch.state import RunFollower
from swift.watch.view import Canvas, run_lines
from tests.watch.conftest import record

DIGITS = 10**400
TIME = "2026-01-01T00:00:00+00:00"


def lines_of(path) -> list[str]:
    follower = RunFollower(path)
    while follower.read():
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return [line.plain for line in run_lines(follower.snapshot(), Canvas(100))]


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ({"event": "reconfigure", "failed": ["0:0"], "plan_ms": DIGITS, "time": TIME}, "1 lines of the record are dam"),
        ({"event": "reconfigure", "failed": ["0:0"], "plan_ms": -1e300, "time": TIME}, "--:--:--  step 1  failure"),
        ({"event": "reconfigure", "failed": ["0:0"], "time": "0001-01-01T00:00:00+00:00"}, "step 1  failure"),
        ({"event": "stage_lost", "time": "0001-01-01T00:00:00+00:00"}, "--:--:--  step 1  "),
    ],
)
def test_events(path, write, event, words):
    write().log_step(record(1))
    with (path / "events.jsonl").open("a") as file:
        file.write(json.dumps({"step": 1} | event) + "\n")
    assert words in "\n".join(lines_of(path))


@pytest.mark.parametrize(
    "more",
    [
        {"loss": DIGITS},
        {"mfu": DIGITS},
        {"input_ms": 10**310},
        {"bubble_share": 0.5},
        {"bubble_share": 0.5, "live_workers": "four"},
        {"loss": float("inf"), "mfu": -1e308},
    ],
)
def test_metrics(path, write, more):
    directory = write()
    directory.log_step(record(1))
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "loss": 2.5, "tokens_per_s": 1.0} | more) + "\n")
    assert any(line.startswith("2/40") or "2/40" in line for line in lines_of(path))


def test_losses_at_the_ends_of_the_range_draw_no_warnings(path, write):
    write()
    with (path / "metrics.jsonl").open("a") as file:
        for step in range(1, 9000):
            number = 1.7e308 * (-1) ** (step // 4)
            line = {"step": step, "loss": number, "tokens_per_s": abs(number), "drop_fraction": number}
            file.write(json.dumps(line) + "\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert any("8,999" in line for line in lines_of(path))


def test_a_bubble_without_a_number_of_workers_is_shown():
    assert describe({"bubble_share": 0.25}) == ["bubble 25 %"]
    assert describe({"bubble_share": 0.25, "live_workers": 3}) == ["3 workers live, bubble 25 %"]
