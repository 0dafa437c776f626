"""What becomes of the terminal of a run costs it no iteration: neither of ``train`` nor of ``launch``."""

import fcntl
import os
import pty
import signal
import subprocess
import termios
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from swift.errors import INTERRUPTED
from tests.elastic.runs import (
    EVERY,
    PATIENCE_S,
    SWIFT,
    environment,
    left_behind,
    losses,
    newest_checkpoint,
    whole,
    write_config,
)

STEPS = 120
COMMANDS = {"train": (), "launch": ("--processes", "2")}
BOTH = pytest.mark.parametrize(
    "command", [pytest.param("train", marks=pytest.mark.long), pytest.param("launch", marks=pytest.mark.slow)]
)


def words(command, config, *more):
    """Words of a run that says something of every iteration."""
    return [*SWIFT, command, *COMMANDS[command], str(config), "--run-dir", str(config.parent / "run"),
            "--log-every", "1", *more]  # fmt: skip


@contextmanager
def running(command, config, output, *more, inside=()):
    """A run whose stdout and stderr are a descriptor, which this process gives up; ``inside`` begins its command."""
    with subprocess.Popen(
        [*inside, *words(command, config, *more)],
        stdin=output if inside else subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment(config),
    ) as process:
        os.close(output)
        patience = threading.Timer(PATIENCE_S, process.kill)
        patience.start()
        try:
            yield process
        finally:
            patience.cancel()
            process.kill()


def read_until(reader, text):
    """Reads what a run says until it has said this."""
    said = b""
    while text not in said:
        piece = os.read(reader, 4096)
        assert piece, said.decode()
        said += piece


def small_pipe():
    """A pipe that is full after a page."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    return reader, writer


@BOTH
@pytest.mark.parametrize("what", ["reader ends", "reader stands still", "disk is full"])
def test_a_run_whose_lines_nobody_takes_ends_as_any_other(tmp_path, command, what):
    config = write_config(tmp_path, (2, 1, 1), STEPS)
    reader, writer = small_pipe()
    if what == "disk is full":
        os.dup2(os.open("/dev/full", os.O_WRONLY), writer)
    with running(command, config, writer) as process:
        if what != "disk is full":
            read_until(reader, b"step 2/")
        if what == "reader ends":
            os.close(reader)
        assert process.wait(PATIENCE_S) == 0
    np.testing.assert_allclose(losses(tmp_path / "run"), whole(config), rtol=1e-8)


@BOTH
@pytest.mark.parametrize("what", ["reader stands still", "terminal is paused"])
def test_a_run_stops_when_it_is_asked_to_while_nobody_reads(tmp_path, command, what):
    config = write_config(tmp_path, (2, 1, 1), 10**6, **EVERY)
    reader, writer = small_pipe() if what == "reader stands still" else pty.openpty()
    with running(command, config, writer) as process:
        read_until(reader, b"step 2/")
        if what == "terminal is paused":
            termios.tcflow(reader, termios.TCOOFF)
        stands_still(process, tmp_path / "run")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == INTERRUPTED
    assert newest_checkpoint(config) == len(losses(tmp_path / "run"))
    os.close(reader)


def stands_still(process, run):
    """Waits until the run has gone on for so long that its lines fill any pipe."""
    first = len(losses(run))
    while len(losses(run)) < first + 150:
        assert process.poll() is None
        time.sleep(0.1)


@BOTH
def test_a_second_signal_ends_a_run_whose_lines_nobody_reads(tmp_path, command):
    config = write_config(tmp_path, (2, 1, 1), 10**6)
    reader, writer = small_pipe()
    with running(command, config, writer) as process:
        read_until(reader, b"step 2/")
        stands_still(process, tmp_path / "run")
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == INTERRUPTED
        while left_behind(config):
            time.sleep(0.05)
    os.close(reader)


@BOTH
def test_a_terminal_that_is_closed_is_a_request_to_stop(tmp_path, command):
    config = write_config(tmp_path, (2, 1, 1), 10**6)
    master, terminal = pty.openpty()
    with running(command, config, terminal, inside=("setsid", "--ctty")) as process:
        read_until(master, b"step 2/")
        os.close(master)
        assert process.wait(PATIENCE_S) == INTERRUPTED
    assert newest_checkpoint(config) == len(losses(tmp_path / "run"))
