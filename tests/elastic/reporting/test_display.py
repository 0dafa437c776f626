"""The display of a run of processes, on a terminal and in a log."""

import io
import re

import pytest
from rich.console import Console

from swift.deadlines import Deadlines
from swift.elastic.membership.messages import Died, Formed, Heartbeat, Member, Ready, Started, Tick, processes_of
from swift.elastic.membership.state_machine import Membership
from swift.elastic.reporting.journal import Journal
from swift.elastic.reporting.reporter import Display, goodput_table, worker_table
from swift.topology import Topology


def told(membership, *events):
    for event in events:
        membership, _ = membership.on(event)
    return membership


def starting(*, by_rank=False):
    """A run of two pipelines and two stages, or of one and two with two ranks each, whose processes are started."""
    processes = processes_of(Topology(1, 2, 2) if by_rank else Topology(2, 2), by_rank=by_rank)
    membership = Membership.of(processes, Deadlines(), 0)
    return told(membership, *(Started(Member(process, 0), 0) for process in processes))


def live(*, by_rank=False):
    """The same, in iteration 3 of the first generation; 1,000 seconds on."""
    membership = starting(by_rank=by_rank)
    everybody = [status.member for status in membership.statuses.values()]
    membership = told(membership, *(Ready(member, 1000) for member in everybody), Tick(1000))
    membership = told(membership, *(Formed(member, 1, frozenset(), 1000) for member in everybody), Tick(1000))
    return told(membership, *(Heartbeat(member, 1, 3, 2, 1000) for member in everybody))


def metrics(step):
    return {"step": step, "loss": 3.21987, "tokens_per_s": 12345.6}


def shown(show, **console):
    """Output of a display that begins at second 1,000."""
    file = io.StringIO()
    with Display("kill [x]", 200, 1000.0, Console(file=file, width=80, **console)) as display:
        show(display)
    return file.getvalue()


def printed(renderable):
    file = io.StringIO()
    Console(file=file, width=80).print(renderable)
    return [line.split() for line in file.getvalue().splitlines() if line.strip(" ─━")]


def run(display):
    """200 steps, two a second."""
    for step in range(1, 201):
        display.update(live(), 1010 + step / 2)
        display.record(metrics(step))


def test_a_log_gets_events_and_a_plain_line_for_every_tenth_of_the_run():
    lines = shown(run).splitlines()
    steps = [line.split("step ")[1].split("/")[0] for line in lines]
    assert steps == ["1", *(str(step) for step in range(20, 201, 20))]
    assert lines[0] == "   10.5 s  kill [x]: step 1/200  loss 3.220  12,346 tokens/s"
    assert lines[1] == "   20.0 s  kill [x]: step 20/200  loss 3.220  12,346 tokens/s  1:30 left"


def test_a_line_says_how_old_the_newest_checkpoint_is():
    def show(display):
        for step, newest in ((1, None), (20, 20), (40, 20)):
            display.update(live(), 1010)
            display.saved(newest)
            display.record(metrics(step))

    told = [line.split("tokens/s  ")[1].split("  ")[0] for line in shown(show).splitlines()]
    assert told == ["no checkpoint yet", "checkpoint of this iteration", "checkpoint 20 iterations old"]


def test_steps_that_are_run_again_get_no_second_line_nor_a_wrong_pace():
    def run_again(display):
        for step, time in [(20, 1010), (39, 1020), (20, 1024), (39, 1028), (40, 1031)]:
            display.update(live(), time)
            display.record(metrics(step))

    lines = shown(run_again).splitlines()
    assert [line.split("step ")[1].split("  ")[0] for line in lines] == ["20/200", "40/200"]
    assert lines[1].endswith("2:48 left"), "20 steps took 21 s, with all that befell them"


@pytest.mark.parametrize("terminal", [False, True])
def test_an_event_is_a_line_that_begins_with_its_second_and_is_never_wrapped(terminal):
    text = "[bold]process 1:1 died[/bold] " + "x" * 100
    assert f"   12.3 s  {text}\n" in shown(lambda display: display.note(text, 1012.345), force_terminal=terminal)


def test_a_terminal_gets_the_workers_and_the_newest_step_redrawn_and_its_cursor_back():
    def show(display):
        assert display._terminal._live.refresh_per_second == 4
        run(display)

    text = shown(show, force_terminal=True, legacy_windows=False)
    assert "  110.0 s  loss 3.220  12,346 tokens/s" in text
    assert "200/200" in text
    assert "0:00 left" in text
    assert "pipeline" in text
    assert "step 20/200" not in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_terminal_has_a_bar_and_the_time_left_at_any_width(width):
    file = io.StringIO()
    everything = {
        "drop_fraction": 0.2,
        "load_imbalance": 2.5,
        "bubble_share": 0.1,
        "live_workers": 6,
        "period_ratio": 1.2,
    }
    with Display("a name of some length", 2000, 0, Console(file=file, width=width, force_terminal=True)) as display:
        display.saved(8)
        for step in (1, 900):
            display.update(live(), step)
            display.record(metrics(step) | everything)
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue()).splitlines()
    (line,) = {line.strip() for line in lines if "900/2,000" in line}
    assert line.startswith("a name of some length ━")
    assert line.endswith("18:20 left")


def test_before_the_first_step_a_terminal_says_what_is_waited_for():
    text = shown(lambda display: display.update(starting(), 1000.5), force_terminal=True, legacy_windows=False)
    assert "    0.5 s  waiting for the first step" in text
    assert "kill [x]" in text
    assert "starting" in text


def test_the_terminal_is_restored_after_an_interrupt():
    def interrupt(_):
        raise KeyboardInterrupt

    file = io.StringIO()
    with pytest.raises(KeyboardInterrupt), Display("kill", 3, 0, Console(file=file, force_terminal=True)) as display:
        interrupt(display)
    assert file.getvalue().rindex("\x1b[?25h") > file.getvalue().rindex("\x1b[?25l")


def test_stdout_stays_clean(capsys):
    with Display("kill", 2, 0) as display:
        display.note("note", 1)
        display.update(live(), 2)
        display.record(metrics(1))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("    1.0 s  note\n    2.0 s  kill: step 1/2")


def test_a_worker_has_a_row_with_what_it_does():
    membership = starting()
    assert printed(worker_table(membership)) == [
        ["stage", "pipeline", "state", "step", "generation", "restarts"],
        ["0", "0", "starting", "-", "-", "0"],
        ["0", "1", "starting", "-", "-", "0"],
        ["1", "0", "starting", "-", "-", "0"],
        ["1", "1", "starting", "-", "-", "0"],
    ]
    membership = live()
    a, b, c, d = (status.member for status in membership.statuses.values())
    assert printed(worker_table(membership))[1] == ["0", "0", "live", "3", "1", "0"]
    membership = told(membership, Died(d, 1000, "signal 9"), Tick(1000))
    membership = told(membership, Started(Member(d.process, 1), 1000))
    assert printed(worker_table(membership))[1:] == [
        ["0", "0", "forming", "-", "2", "0"],
        ["0", "1", "forming", "-", "2", "0"],
        ["1", "0", "forming", "-", "2", "0"],
        ["1", "1", "starting", "-", "-", "1"],
    ]
    membership = told(membership, *(Formed(member, 2, frozenset(), 1000) for member in (a, b, c)), Tick(1000))
    membership = told(membership, *(Heartbeat(member, 2, 5, 4, 1000) for member in (a, b, c)))
    membership = told(membership, Ready(Member(d.process, 1), 1000), Tick(1000), Formed(a, 3, frozenset(), 1000))
    assert printed(worker_table(membership))[1:] == [
        ["0", "0", "forming", "-", "3", "0"],
        ["0", "1", "forming", "5", "2", "0"],
        ["1", "0", "forming", "5", "2", "0"],
        ["1", "1", "forming", "-", "3", "1"],
    ], "those who have not answered still run the generation before"
    assert printed(worker_table(told(membership, Tick(1005))))[1][2] == "killed"


def test_ranks_are_shown_where_there_are_several():
    rows = printed(worker_table(live(by_rank=True)))
    assert rows[0][:4] == ["stage", "pipeline", "rank", "state"]
    assert [row[:3] for row in rows[1:]] == [["0", "0", "0"], ["0", "0", "1"], ["1", "0", "0"], ["1", "0", "1"]]


def test_the_time_of_a_run_by_cause():
    goodput = Journal(0).goodput(8.0)
    goodput |= {"startup_s": 1.0, "useful_s": 6.0, "rerun_s": 1.0}
    assert printed(goodput_table(goodput)) == [
        ["time", "s", "%"],
        ["startup", "1.0", "12.5"],
        ["useful", "6.0", "75.0"],
        ["detection", "0.0", "0.0"],
        ["reconfiguration", "0.0", "0.0"],
        ["rerun", "1.0", "12.5"],
        ["waiting", "0.0", "0.0"],
        ["total", "8.0", "100.0"],
    ]
    assert printed(goodput_table(Journal(0).goodput(0.0)))[-1] == ["total", "0.0", "0.0"]
    parts = {"detection": {"median_s": 0.125, "max_s": 0.5}, "first_step": {"median_s": 1.0, "max_s": 2.0}}
    goodput |= {"num_recoveries": 3, "recovery_median_s": 1.5, "recovery_max_s": 2.5, "recovery_phases": parts}
    assert printed(goodput_table(goodput))[8:] == [
        ["recovery,", "of", "3", "median", "(s)", "maximum", "(s)"],
        ["detection", "0.12", "0.50"],
        ["first", "step", "1.00", "2.00"],
        ["total", "1.50", "2.50"],
    ]


def test_the_cursor_is_there_all_the_time():
    """A process that is killed while it waits could not bring it back."""
    file = io.StringIO()
    with Display("kill", 3, 0, Console(file=file, force_terminal=True)):
        assert file.getvalue().rindex("\x1b[?25h") > file.getvalue().rindex("\x1b[?25l")
