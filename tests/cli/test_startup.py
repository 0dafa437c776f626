"""The first seconds of a command: a terminal shows at once that it starts, and nothing of that stays."""

import io
import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from swift.cli.main import Startup


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextmanager
def terminal() -> Iterator[Terminal]:
    """Has stdout and stderr on one terminal for the block; pytest would take a fixture's away before the test."""
    shown = Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", shown)
        patch.setattr("sys.stderr", shown)
        yield shown


def visible(text: str) -> str:
    """Returns what is left on a terminal of one line, of which some were erased."""
    return text.rpartition("\r\x1b[2K")[2]


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_the_line_is_there_at_once_and_gives_way_to_what_is_printed(name):
    with terminal() as shown, Startup("swift train: starting"):
        assert visible(shown.getvalue()) == "swift train: starting (0 s)"
        print("first", file=getattr(sys, name))
        print("second", file=getattr(sys, name))
        assert visible(shown.getvalue()) == "first\nsecond\n"
        assert sys.stderr is shown
    assert visible(shown.getvalue()) == "first\nsecond\n"


def test_the_line_is_redrawn_meanwhile(monkeypatch):
    monkeypatch.setattr("swift.cli.main._PERIOD_S", 0.001)
    with terminal() as shown, Startup("swift train: starting"):
        deadline = time.monotonic() + 30
        while shown.getvalue().count("starting") < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
    assert shown.getvalue().count("starting") >= 3
    assert visible(shown.getvalue()) == ""


def test_nothing_is_shown_elsewhere(capsys):
    with Startup("swift train: starting"):
        print("first")
    assert capsys.readouterr() == ("first\n", "")


def test_a_mistake_on_a_terminal_costs_one_line_after_a_line_that_came_before_jax(here):
    ours, theirs = pty.openpty()
    words = ["train", "tiny.gin", "--set", "Experiment.num_step=3"]
    # Whatever imports JAX before the line is shown, would say so.
    watch = "import swift.cli.main as c, sys; d = c.Startup._draw; c.Startup._draw = lambda s: "
    watch += "(assert_free(), d(s)); assert_free = lambda: s_seen.append('jax' in sys.modules); s_seen = []; "
    watch += f"code = c.main({words}); print(s_seen[0]); sys.exit(code)"
    with os.fdopen(ours, "rb", buffering=0) as screen:
        process = subprocess.Popen([sys.executable, "-c", watch], cwd=here, stderr=theirs, stdout=subprocess.PIPE)
        os.close(theirs)
        first = screen.read(100).decode()
        rest = b""
        try:
            while piece := screen.read(1000):
                rest += piece
        except OSError:  # the terminal is closed
            pass
        told, _ = process.communicate()
    assert "swift train: starting" in first
    assert (process.returncode, told.decode()) == (2, "False\n")
    line = "swift: Experiment.num_step = 3: Experiment has no such setting; did you mean num_steps?\r\n"
    assert visible(first + rest.decode()) == line
