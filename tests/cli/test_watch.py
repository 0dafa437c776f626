"""``swift watch`` as it is typed: while a run trains, in a terminal and in a pipe, and what it refuses."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

PATIENCE_S = 180


class Screen:
    """A command in a terminal of its own, and all that it has written there."""

    def __init__(self, *words: str, **environment: str):
        self._ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "swift", *words]
        # A session of its own has the terminal as its controlling one, from which Ctrl-C comes.
        start = "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        start += "os.execv(sys.argv[1], sys.argv[1:])"
        self.process = subprocess.Popen(
            [sys.executable, "-c", start, *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=os.environ | environment,
        )
        os.close(theirs)
        self.text = ""

    def wait_for(self, *words: str) -> str:
        """Waits until the command has written all words since the last call; returns what it has written."""
        deadline = time.monotonic() + PATIENCE_S
        self.text = ""
        while not all(word in self.text for word in words):
            assert time.monotonic() < deadline, self.text[-4000:]
            if not self._read():
                assert all(word in self.text for word in words), self.text[-4000:]
        return self.text

    def press(self, key: bytes) -> None:
        os.write(self._ours, key)

    def end(self) -> str:
        """Waits for the end of the command; returns what it has written since the last call."""
        while self._read():
            pass
        return self.text

    def _read(self) -> bool:
        ready, _, _ = select.select([self._ours], [], [], PATIENCE_S)
        assert ready, self.text[-4000:]
        try:
            piece = os.read(self._ours, 1 << 16)
        except OSError:  # the command has ended
            return False
        self.text += re.sub(r"\x1b\[[0-9;]*m", "", piece.decode(errors="replace"))
        return bool(piece)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@contextmanager
def screen(*words: str, **environment: str) -> Iterator[Screen]:
    shown = Screen(*words, **environment)
    try:
        yield shown
    finally:
        shown.close()


@contextmanager
def training(run_dir) -> Iterator[subprocess.Popen]:
    words = ["train", "tiny.gin", "--run-dir", str(run_dir), "--set", "Experiment.num_steps=1000000"]
    words += ["--set", "CheckpointConfig.every=1000"]
    process = subprocess.Popen([sys.executable, "-m", "swift", *words], stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_run_is_watched_from_before_it_begins_to_its_end(here):
    with screen("watch", "run", "--refresh", "0.1", LINES="40", COLUMNS="100") as shown:
        shown.wait_for("absent: waiting for a run in this directory", "Ctrl-C ends the view, not the run")
        with training(here / "run") as process:
            shown.wait_for("starting")
            text = shown.wait_for("run  running", "/1,000,000", "tokens/s", "layer 0", "replicas", "of 2 live")
            assert "loss" in text
            process.send_signal(signal.SIGINT)
            shown.wait_for("stopped: interrupted", "checkpoint of this iteration")
            assert process.wait(PATIENCE_S) == 130
        shown.press(b"\x03")
        text = shown.end()
        assert shown.process.wait(PATIENCE_S) == 0
        # The normal screen has the last view, and a cursor.
        assert text.index("\x1b[?1049l") < text.rindex("stopped: interrupted")
        assert text.rindex("\x1b[?25h") > text.rfind("\x1b[?25l")
        assert "Traceback" not in text


def test_a_signal_restores_the_terminal(half_run):
    with screen("watch", str(half_run)) as shown:
        shown.wait_for("half  stopped")
        shown.process.send_signal(signal.SIGTERM)
        assert "\x1b[?1049l" in shown.end()
        assert shown.process.wait(PATIENCE_S) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("words", "environment"), [(["--once"], {}), ([], {"TERM": "dumb"}), (["--once"], {"COLUMNS": "0"})]
)
def test_one_view_in_a_terminal(half_run, words, environment):
    with screen("watch", str(half_run), *words, **environment) as shown:
        text = shown.end()
        assert shown.process.wait(PATIENCE_S) == 0
    for line in ("half  stopped", "4/6", "layer 0", "2 of 2 live"):
        assert line in text
    assert "\x1b[?" not in text


def test_one_view_in_a_pipe(half_run, tell):
    told = tell("watch", str(half_run), "missing")
    assert (told.code, told.err, told.new) == (0, "", [])
    for words in ("half  stopped", "missing  absent: waiting for a run in this directory", "4/6"):
        assert words in told.out
    assert "\x1b" not in told.out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["tiny.gin"], "RUN = 'tiny.gin': is not a directory"),
        (["run", "--refresh", "0"], "--refresh = 0.0: must be from 0.1 to 3600 seconds"),
        (["run", "--refresh", "nan"], "--refresh = nan: must be from 0.1 to 3600 seconds"),
        (["run", "--refresh=-1"], "--refresh = -1.0: must be from 0.1 to 3600 seconds"),
        (["--serve", "run"], "argument --serve: 'run': must be a port, from 1 to 65535; a RUN comes before --serve"),
        (["run", "--serve", "65536"], "argument --serve: '65536': must be a port"),
        (["run", "--serve", "--once"], "argument --once: not allowed with argument --serve"),
        ([], "the following arguments are required: RUN"),
    ],
)
def test_a_mistake_costs_a_line(words, line, refusal):
    assert refusal("watch", *words).removeprefix("swift watch: ").startswith(line)


def test_a_view_needs_neither_jax_nor_matplotlib(half_run):
    check = "import sys; from swift.cli.main import main; main(['watch', *sys.argv[1:]]); "
    check += "sys.exit(str({'jax', 'matplotlib', 'orbax', 'scipy'} & sys.modules.keys() or ''))"
    told = subprocess.run([sys.executable, "-c", check, str(half_run)], capture_output=True, text=True, check=False)
    assert (told.returncode, told.stderr.strip()) == (1, "")
