"""A command on several hosts: on each of them, one process that trains and one that waits for it.

JAX ends a process with an abort, and a page of text, where it cannot join the other hosts, and where one of them is
dead or silent: no code in that process could make it a line and an exit code. So it is a child, and its parent, in
which there is no JAX, says what has happened. The parent passes signals on; the child does not outlive it.
"""

import argparse
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, NoReturn

from swift.errors import INTERRUPTED, JOINING_NOTE, STOPPED
from swift.output import finish
from swift.signals import stop_signals

_REASONS = {
    "ALREADY_EXISTS": "another host has the same --host",
    "ABORTED": "another host has the same --host",
    "INVALID_ARGUMENT": "host 0 expects fewer hosts; all of them need the same --num-hosts",
    "DEADLINE_EXCEEDED": "not all hosts have joined in time; host 0 has to be reachable there, and each host started",
}
"""Causes of a failure to join, by the status that JAX reports."""
_MAX_WHY = 300


@dataclass(frozen=True)
class ParentLink:
    """The child's link to its parent.

    Attributes:
        joined: pipe to which a byte is written once this host has joined the others.
        said: file that takes what is written to stderr until then.
    """

    joined: int
    said: BinaryIO

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Context in which this host joins the others; then the parent knows that it has."""
        sys.stderr.flush()
        stderr = os.dup(2)
        os.dup2(self.said.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        os.write(self.joined, b"+")

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Context in which nothing reaches stdout: gloo prints a line there for each group of devices."""
        sys.stdout.flush()
        stdout = os.dup(1)
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(stdout, 1)
            os.close(stdout)


def watched(run: Callable[[ParentLink], int], options: argparse.Namespace) -> int:
    """Runs a command in a child process, and waits for it.

    Args:
        run: function of the child, which returns an exit code.
        options: options of the command.

    Returns:
        Its exit code; 2 where it could not join the others, and 3 where it or another host has died, with a line.
    """
    watch, alive = os.pipe()
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            os.close(alive)
            _be_child(lambda: run(ParentLink(writer, said)), watch, options)
        os.close(watch)
        os.close(writer)
        status, was_signalled = wait_for(child)
        has_joined = bool(os.read(reader, 1))
        os.close(reader)
        os.close(alive)
        if os.WIFEXITED(status):
            return os.WEXITSTATUS(status)
        if was_signalled:
            return INTERRUPTED
        said.seek(0)
        text = said.read().decode(errors="replace")
    if not has_joined:
        why = next((why for word, why in _REASONS.items() if word in text), "this host could not join the others")
        notes = [line.removeprefix(JOINING_NOTE) for line in text.splitlines() if line.startswith(JOINING_NOTE)]
        why = "; ".join([why, *notes])
        print(f"swift: host {_own(options)}: --coordinator = {options.coordinator!r}: {why}", file=sys.stderr)
        return 2
    how = signal.Signals(os.WTERMSIG(status)).name
    print(
        f"swift: host {_own(options)}: another host has died or been silent, or this one has crashed ({how}): stopped; "
        f"{_advice(options)}",
        file=sys.stderr,
    )
    return STOPPED


def _be_child(run: Callable[[], int], watch: int, options: argparse.Namespace) -> NoReturn:
    """Runs as the child."""
    follow_parent(watch)
    code = STOPPED
    try:
        code = run()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else STOPPED
    except Exception as error:
        if type(error).__name__ != "JaxRuntimeError":
            traceback.print_exc()
        why = " ".join(str(error).split())[:_MAX_WHY]
        print(
            f"swift: host {_own(options)}: another host is gone, or this one has failed ({why}): stopped; "
            f"{_advice(options)}",
            file=sys.stderr,
        )
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        finish()
        os._exit(code)  # a regular exit would wait for hosts that are gone


def follow_parent(watch: int) -> None:
    """Has this process get signals from its parent, and end with it, the only one with the other end of this pipe."""
    os.setpgid(0, 0)  # so the terminal's Ctrl-C comes once, from the parent
    threading.Thread(target=_end_with_parent, args=(watch,), name="parent", daemon=True).start()


def _end_with_parent(watch: int) -> None:
    os.read(watch, 1)  # ends when the parent does
    os._exit(STOPPED)


def wait_for(child: int) -> tuple[int, bool]:
    """Waits for the child, to which it passes signals on; returns its status, and whether there was a signal."""
    passed: list[int] = []

    def pass_on(number: int, _: object) -> None:
        passed.append(number)
        os.kill(child, number)

    before = {number: signal.signal(number, pass_on) for number in stop_signals()}
    try:
        _, status = os.waitpid(child, 0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return status, bool(passed)


def _advice(options: argparse.Namespace) -> str:
    """Says what is saved and how to continue."""
    from swift.checkpoint.storage.directory import (  # which loads JAX, without starting it
        checkpoint_steps,
        committed_steps,
    )

    how = f"continue with --run-dir {options.run_dir} --resume on the hosts that are left"
    if options.command == "compare":
        return how
    steps = checkpoint_steps(options.run_dir / "checkpoints")
    if steps:
        return f"the checkpoint of iteration {steps[-1]} is kept; {how}"
    if committed_steps(options.run_dir / "checkpoints"):
        return f"no checkpoint has a manifest any more; see swift checkpoint verify {options.run_dir}"
    return "there is no checkpoint yet; start again in another --run-dir"


def _own(options: argparse.Namespace) -> str:
    return "?" if options.host is None else str(options.host)
