import io
import math
from contextlib import suppress

import numpy as np
import pytest
from rich.console import Console

from swift.train import display
from swift.train.display import ProgressDisplay, describe, format_duration


def record(step, **more):
    return {
        "step": step,
        "loss": 3.21987,
        "tokens_per_s": 12345.6,
        "drop_fraction": 0.271,
        "load_imbalance": 2.5,
    } | more


def run(num_steps, first_step=1, stride=1, **console):
    """Output of a run that updates at every ``stride``-th step."""
    file = io.StringIO()
    with ProgressDisplay("symi [x]", num_steps, first_step, Console(file=file, width=80, **console)) as shown:
        for step in range(first_step + stride - 1, num_steps + 1, stride):
            shown.update(record(step))
    return file.getvalue()


def test_a_log_gets_a_plain_line_for_the_first_step_and_every_tenth_of_the_run():
    lines = run(num_steps=200).splitlines()
    steps = [line.split("step ")[1].split("/")[0] for line in lines]
    assert steps == ["1", *(str(step) for step in range(20, 201, 20))]
    assert lines[0] == "symi [x]: step 1/200  loss 3.220  12,346 tokens/s  27.1 % dropped  imbalance 2.50"
    assert lines[1].startswith("symi [x]: step 20/200  loss 3.220")
    assert lines[-1].endswith("0:00 left")


@pytest.mark.parametrize(
    ("num_steps", "first_step", "stride", "steps"),
    [
        (3, 1, 1, [1, 2, 3]),
        (1, 1, 1, [1]),
        (100, 56, 1, [56, 60, 70, 80, 90, 100]),
        (40, 1, 8, [8, 16, 24, 32, 40]),
    ],
)
def test_short_resumed_and_windowed_runs(num_steps, first_step, stride, steps):
    lines = run(num_steps, first_step, stride).splitlines()
    assert [int(line.split("step ")[1].split("/")[0]) for line in lines] == steps


def test_a_line_says_how_old_the_newest_checkpoint_is():
    file = io.StringIO()
    with ProgressDisplay("symi", 4, 1, Console(file=file, width=200)) as shown:
        shown.saved(None)
        shown.update(record(1))
        shown.saved(2)
        for step in (2, 3, 4):
            shown.update(record(step))
    assert [line.split("imbalance 2.50  ")[1].split("  ")[0] for line in file.getvalue().splitlines()] == [
        "no checkpoint yet",
        "checkpoint of this iteration",
        "checkpoint 1 iteration old",
        "checkpoint 2 iterations old",
    ]


def test_a_terminal_gets_one_line_that_is_redrawn_and_its_cursor_back():
    text = run(num_steps=3, force_terminal=True, legacy_windows=False)
    assert "\x1b[?25l" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert "symi [x]" in text
    assert "3/3" in text
    assert "loss 3.220" in text
    assert "step 1/3" not in text


def test_the_terminal_is_restored_after_an_interrupt():
    file = io.StringIO()
    shown = ProgressDisplay("symi", 3, 1, Console(file=file, force_terminal=True, width=80))
    with pytest.raises(KeyboardInterrupt), shown:
        raise KeyboardInterrupt
    assert file.getvalue().rindex("\x1b[?25h") > file.getvalue().rindex("\x1b[?25l")


@pytest.mark.parametrize("terminal", [False, True])
def test_a_note_is_printed_as_it_is(terminal):
    file = io.StringIO()
    with ProgressDisplay("symi", 3, 1, Console(file=file, force_terminal=terminal, width=80)) as shown:
        shown.note("[bold]worker 1:0 failed[/bold]")
    assert "[bold]worker 1:0 failed[/bold]\n" in file.getvalue()


def test_stdout_stays_clean(capsys):
    with ProgressDisplay("symi", 2, 1) as shown:
        shown.note("note")
        shown.update(record(1))
        shown.update(record(2))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "note\nsymi: step 1/2" in captured.err


def test_time_left_leaves_out_the_step_that_compiles(monkeypatch):
    times = iter([100.0, 102.0, 104.0])  # The first step took 100 s, those after it 2 s each.
    monkeypatch.setattr(display.time, "monotonic", lambda: next(times))
    file = io.StringIO()
    with ProgressDisplay("symi", 5, 1, Console(file=file)) as shown:
        for step in (1, 2, 3):
            shown.update(record(step))
    lines = file.getvalue().splitlines()
    assert [line.rpartition("  ")[2] for line in lines] == ["imbalance 2.50", "0:06 left", "0:04 left"]


def test_unknown_and_odd_metrics():
    assert describe({"step": 1, "loss": None}) == []
    assert describe({"step": 1, "loss": math.nan, "drop_fraction": np.float32(0.5)}) == ["loss nan", "50.0 % dropped"]


def test_durations():
    assert [format_duration(seconds) for seconds in (0, 59.6, 3599, 3661, 90000)] == [
        "0:00",
        "1:00",
        "59:59",
        "1:01:01",
        "25:00:00",
    ]


def test_what_a_run_does_before_its_first_step_is_shown_and_a_mistake_leaves_nothing_of_it():
    file = io.StringIO()
    with (
        suppress(ValueError),
        ProgressDisplay("symi", 4, 1, Console(file=file, width=80, force_terminal=True)) as shown,
    ):
        shown.stage("reading the data")
        raise ValueError
    assert "reading the data (0 s)" in file.getvalue()
    assert file.getvalue().endswith("\x1b[1A\x1b[2K"), repr(file.getvalue())


def test_a_log_has_a_line_of_what_comes_before_the_first_step_once_no_mistake_can_be_told():
    file = io.StringIO()
    with ProgressDisplay("symi", 4, 1, Console(file=file, width=80)) as shown:
        shown.stage("reading the data")
        shown.stage("making the first state", True)
    assert file.getvalue() == "symi: making the first state\n"


def test_the_cursor_is_there_all_the_time():
    """A process that is killed while it compiles could not bring it back."""
    file = io.StringIO()
    with ProgressDisplay("symi", 4, 1, Console(file=file, width=80, force_terminal=True)):
        assert file.getvalue().rfind("\x1b[?25h") > file.getvalue().rfind("\x1b[?25l")


@pytest.mark.parametrize("width", [100, 80, 60, 40])
def test_no_value_is_cut_in_a_narrow_terminal(width):
    parts = ["loss 2.345", "123,456 tokens/s", "22.0 % dropped", "", "4 workers live, bubble 23 %", "saved 12 ago"]
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(display.progress_lines("a run with a long name", 12_345, 200_000, "12:34:56 left", parts))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    for whole in ("12,345/200,000", "12:34:56 left", *parts):
        assert any(whole in line for line in lines)
