"""``swift watch``: a live view of runs in a terminal, one view as text, or their report as a page that stays new."""

import argparse
import shutil
import signal
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from swift.errors import SettingError
from swift.signals import cleaning_up
from swift.watch.state import RunFollower, RunSnapshot
from swift.watch.view import Canvas, run_lines, runs_table

_LEAST_S, _MOST_S = 0.1, 3600.0
_VIEW_S, _PAGE_S = 1.0, 10.0
_LEAST_WIDTH, _LEAST_HEIGHT = 20, 5
_LEAST_RUN = 6
"""Minimum number of lines for the drawing of one of several runs."""
_FOOTER = "Ctrl-C ends the view, not the run"


def watch(options: argparse.Namespace) -> None:
    """Runs ``swift watch RUN ...``."""
    paths = list(dict.fromkeys(options.runs))
    for path in paths:
        if path.exists() and not path.is_dir():
            raise SettingError("RUN", str(path), "is not a directory")
    refresh_s = options.refresh
    if refresh_s is not None and not _LEAST_S <= refresh_s <= _MOST_S:
        raise SettingError("--refresh", refresh_s, f"must be from {_LEAST_S:g} to {_MOST_S:g} seconds")
    console = _console()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the command ends by Ctrl-C, and that is no error
    try:
        if options.serve is not None:
            from swift.watch.serve import serve  # it draws with Matplotlib, which the terminal does not need

            serve(paths, options.serve, _PAGE_S if refresh_s is None else refresh_s)
        elif options.once or not console.is_terminal or console.is_dumb_terminal:
            _print_once(paths, console)
        else:
            _follow(paths, console, _VIEW_S if refresh_s is None else refresh_s)
    except KeyboardInterrupt:
        return


def _console() -> Console:
    """Opens the console on stdout; Rich would take COLUMNS=0 for a terminal without columns."""
    console = Console()
    return console if console.width else Console(width=shutil.get_terminal_size().columns)


def _print_once(paths: Sequence[Path], console: Console) -> None:
    """Prints one snapshot of all runs."""
    followers = [RunFollower(path) for path in paths]
    has_more = _read_more(followers)
    with Console(stderr=True).status("reading the record") if has_more else nullcontext():
        while has_more:
            has_more = _read_more(followers)
    _print([follower.snapshot() for follower in followers], console)


def _read_more(followers: Sequence[RunFollower]) -> bool:
    """Reads the next part of each run; returns whether any has more to read at once."""
    return sum(follower.read() for follower in followers) > 0


def _print(runs: Sequence[RunSnapshot], console: Console) -> None:
    if len(runs) > 1:
        console.print(runs_table(runs))
    for run in runs:
        for line in run_lines(run, _canvas(console)):
            console.print(line, soft_wrap=True, highlight=False)
        if len(runs) > 1:
            console.print()


def _follow(paths: Sequence[Path], console: Console, refresh_s: float) -> None:
    """Shows the runs until Ctrl-C, on the terminal's alternate screen; the last view then stays on the normal one."""
    followers = [RunFollower(path) for path in paths]
    runs = [follower.snapshot() for follower in followers]

    def restore() -> None:
        console.set_alt_screen(False)
        console.show_cursor()

    with cleaning_up(restore):
        try:
            with Live(_view(runs, console), console=console, screen=True, auto_refresh=False) as live:
                while True:
                    deadline, has_more = time.monotonic() + refresh_s, True
                    while has_more and time.monotonic() < deadline:
                        has_more = _read_more(followers)
                    runs = [follower.snapshot() for follower in followers]
                    live.update(_view(runs, console), refresh=True)
                    time.sleep(max(0.0, deadline - time.monotonic()))
        except KeyboardInterrupt:
            console.print(_view(runs, console, has_footer=False))


def _view(runs: Sequence[RunSnapshot], console: Console, *, has_footer: bool = True) -> RenderableType:
    """Draws all runs within the terminal's height."""
    canvas, left = _canvas(console), max(_LEAST_HEIGHT, console.height) - 1
    parts: list[RenderableType] = []
    if len(runs) > 1:
        table, height = _table(runs, console, left)
        parts.append(table)
        left -= height
    for run in sorted(runs, key=lambda run: run.state in ("absent", "stopped", "ended")):
        if len(runs) > 1 and left < _LEAST_RUN:
            break
        lines = run_lines(run, canvas, left if len(runs) == 1 else max(_LEAST_RUN, left // len(runs)))
        if len(lines) <= left:
            parts += lines
            left -= len(lines)
    return Group(*parts, *[Text(_FOOTER, style="dim", no_wrap=True, overflow="crop")] * has_footer)


def _table(runs: Sequence[RunSnapshot], console: Console, most_lines: int) -> tuple[RenderableType, int]:
    """Returns a table of as many runs as fit, with those that have not ended first, and its height."""
    order = sorted(runs, key=lambda run: run.state in ("absent", "stopped", "ended"))
    number = len(runs)
    while True:
        shown = {id(run) for run in order[:number]}
        rest = [Text(f"{len(runs) - number} more runs")] if number < len(runs) else []
        table = Group(runs_table([run for run in runs if id(run) in shown]), *rest)
        height = len(console.render_lines(table, console.options.update(width=_canvas(console).width)))
        if height <= most_lines or number == 1:
            return table, height
        number = max(1, min(number - 1, number * most_lines // height))


def _canvas(console: Console) -> Canvas:
    return Canvas(max(_LEAST_WIDTH, console.width), console.options.ascii_only)
