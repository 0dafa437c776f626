"""Snapshots as lines: what they say, and that they fit whatever the terminal."""

from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from swift.report.history import Incident
from swift.watch.state import SERIES, ExpertLoads, RunSnapshot
from swift.watch.view import Canvas, run_lines, runs_table, state_text


def loads(num_layers=2, num_experts=8):
    popularity_LE = np.full((num_layers, num_experts), 100.0)
    popularity_LE[:, 0] = 300
    return ExpertLoads(20, popularity_LE, np.full((num_layers, num_experts), 2.0), popularity_LE / 10)


def snapshot(**changes) -> RunSnapshot:
    metrics = {"step": 30, "loss": 2.5, "tokens_per_s": 12_345.0, "drop_fraction": 0.1, "validation_loss": 2.25}
    facts = {
        "path": Path("runs/mine"),
        "name": "mine",
        "state": "running",
        "reason": "",
        "silent_s": 0.5,
        "num_steps": 40,
        "metrics": metrics,
        "series": {name: np.linspace(5, 1, 30) for name in SERIES},
        "seconds_left": 75.0,
        "loads": loads(),
        "members": ("0:0", "0:1", "1:0", "1:1"),
        "absent_members": ("1:1",),
        "num_failures": 1,
        "incidents": tuple(Incident("failure", 60.0 * n, n, ("1:1",), "died (exit code 9)", 0.25) for n in range(9)),
        "saved_step": 20,
        "read_share": 1.0,
        "num_damaged": 0,
        "trouble": "",
    }
    return RunSnapshot(**facts | changes)


def text(run, width=100, height=None, **more):
    return "\n".join(line.plain for line in run_lines(run, Canvas(width, **more), height))


def test_a_run_says_how_far_it_is_and_how_well_it_goes():
    shown = text(snapshot())
    for words in (
        "mine  running",
        "30/40  1:15 left",
        "loss 2.500",
        "12,345 tokens/s",
        "10.0 % dropped",
        "validation loss 2.250",
        "checkpoint 10 iterations old",
        "3 of 4 live  absent: 1:1  1 failure",
        "step 8  failure: 1:1 died (exit code 9) (0.25 s)",
    ):
        assert words in shown, words


def test_a_curve_falls_with_the_loss():
    lines = text(snapshot(), 42).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("loss  "))
    rows = lines[first : first + 10]
    widths = [row[12:].count("\u2588") for row in rows]
    assert widths == sorted(widths)
    assert widths[0] < widths[-1] == 30
    assert rows[0].startswith("loss  4.862")  # one in 30 columns is cut at the top
    assert rows[9].startswith("      1.000")


def test_experts_with_more_tokens_than_slots_stand_out():
    lines = run_lines(snapshot(), Canvas(100))
    layer = next(line for line in lines if line.plain.startswith("layer 0"))
    load, replicas, dropped = layer.plain[12:].split("\u2502")
    assert load[:3] == "\u2588" * 3  # 300 of 1,000 tokens need 4.8 of 16 slots
    assert set(load[3:]) == {"\u2583"}  # 1.6 of 4.8
    assert set(replicas) == {"\u2584"}  # 2 of 4.8
    assert dropped == " 10.0 %"
    red = [(span.start, span.end) for span in layer.spans if span.style == "red"]
    assert red == [(12, 13), (13, 14), (14, 15)]


def test_many_experts_share_columns_and_the_busiest_is_seen():
    shown = text(snapshot(loads=loads(1, 256)), 100)
    assert "a column is the busiest of 7 of 256 experts" in shown
    layer = next(line for line in shown.splitlines() if line.startswith("layer 0"))
    assert layer[12] == "\u2588"
    assert len(layer) <= 100


@pytest.mark.parametrize("width", [20, 33, 60, 80, 200])
@pytest.mark.parametrize("height", [1, 5, 12, 24, 60])
def test_a_drawing_fits_the_terminal(width, height):
    run = snapshot(loads=loads(64, 64), num_damaged=3, trouble="x" * 300, reason="y" * 300)
    lines = run_lines(run, Canvas(width), height)
    assert len(lines) <= height
    assert all(line.cell_len <= width for line in lines)


def test_a_file_gets_messages_whole():
    assert "x" * 300 in text(snapshot(trouble="x" * 300), 40)


def test_layers_that_do_not_fit_are_summed_up():
    shown = text(snapshot(loads=loads(64), incidents=()), 100, 24)
    assert "more layers drop 10.0 to 10.0 %" in shown
    assert text(snapshot(loads=loads(64)), 100).count("layer ") == 64


def test_ascii_is_enough():
    assert text(snapshot(), ascii_only=True).isascii()


def test_nothing_in_a_record_can_change_the_terminal():
    evil = "\x1b[31m\n\x07"
    run = snapshot(members=(evil,), absent_members=(evil,), trouble=evil, metrics={"step": 1, "loss": evil})
    run_2 = snapshot(incidents=(Incident("stop", 0.0, 1, (evil,), evil),))
    for shown in (text(run), text(run_2)):
        assert "\x1b" not in shown
        assert "\x07" not in shown


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"state": "stalled", "silent_s": 95.0}, "stalled: no line for 1:35"),
        ({"state": "starting", "silent_s": 7.0}, "starting: no line for 0:07"),
        ({"state": "starting", "silent_s": None}, "starting"),
        ({"state": "stopped", "reason": "interrupted"}, "stopped: interrupted"),
        ({"state": "absent"}, "absent: waiting for a run in this directory"),
        ({"state": "running", "read_share": 0.25}, "reading 25 %"),
        ({"state": "ended"}, "ended"),
    ],
)
def test_a_state_says_why(changes, words):
    assert state_text(snapshot(**changes)) == words


@pytest.mark.parametrize("metrics", [{}, {"step": 1}, {"step": 1, "loss": None, "tokens_per_s": [], "mfu": "fast"}])
def test_a_run_without_numbers_is_drawn_too(metrics):
    bare = snapshot(metrics=metrics, series={name: np.zeros(0) for name in SERIES}, loads=None, members=())
    assert text(bare).startswith("mine  running")
    assert text(snapshot(metrics=metrics, series={name: np.full(3, np.nan) for name in SERIES}))


def test_runs_of_the_same_name_are_told_apart():
    runs = [snapshot(), snapshot(path=Path("other/mine")), snapshot(name="third")]
    console = Console(width=120)
    with console.capture() as captured:
        console.print(runs_table(runs))
    shown = captured.get()
    assert "runs/mine" in shown
    assert "other/mine" in shown
    assert "third" in shown
    assert shown.count("30/40") == 3
