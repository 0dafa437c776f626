"""Runs a command in a child process, so that its death for any reason yields one line and an exit code.

A process cannot report that something killed it or called ``os._exit``. The command therefore runs in a forked
child, and the parent, which has not imported anything large yet, reports its death.

- ``run_in_child`` runs a command that calls the user's operators. Its threads record the names of the operators in
  shared memory, which the parent reads after the child dies.
- ``run_supervised`` runs one of the processes of a run on several hosts. JAX aborts a process, printing a page of text,
  if it cannot join the other hosts, or if one of them is dead or silent.

The parent forwards signals to the child, and the child does not outlive the parent.
"""

import argparse
import itertools
import mmap
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
"""Maps the status in JAX's error message to the reason why a host could not join."""
_MAX_WHY = 300

_NAME_BYTES, _NUM_SLOTS = 128, 256


@dataclass(frozen=True)
class ParentLink:
    """The child's link to its parent.

    Attributes:
        joined: write end of a pipe; a byte is written to it once this host has joined the others.
        stderr_file: file that receives stderr until then; the parent reads the cause of a failure from it.
    """

    joined: int
    stderr_file: BinaryIO

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Context for joining the other hosts: redirects stderr to a file, and notifies the parent on success."""
        sys.stderr.flush()
        stderr = os.dup(2)
        os.dup2(self.stderr_file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        os.write(self.joined, b"+")

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Context that discards stdout, since gloo prints a line there for each group of devices."""
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


def run_supervised(run: Callable[[ParentLink], int], options: argparse.Namespace) -> int:
    """Runs one host's command of a multi-host run in a child process, and waits for it.

    Args:
        run: runs the command in the child and returns an exit code.
        options: options of the command.

    Returns:
        The exit code of the child. If the child died before it exited: 130 after a signal that this process forwarded;
        otherwise, with a line on stderr, 2 if it could not join the other hosts, or 3 if it or another host died.
    """
    watch, alive = os.pipe()
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as stderr_file:
        child = os.fork()
        if child == 0:
            os.close(alive)
            _be_child(lambda: run(ParentLink(writer, stderr_file)), watch, options)
        os.close(watch)
        os.close(writer)
        status, was_signalled = _wait_for(child)
        has_joined = bool(os.read(reader, 1))
        os.close(reader)
        os.close(alive)
        if os.WIFEXITED(status):
            return os.WEXITSTATUS(status)
        if was_signalled:
            return INTERRUPTED
        stderr_file.seek(0)
        text = stderr_file.read().decode(errors="replace")
    if not has_joined:
        reason = next(
            (reason for word, reason in _REASONS.items() if word in text), "this host could not join the others"
        )
        notes = [line.removeprefix(JOINING_NOTE) for line in text.splitlines() if line.startswith(JOINING_NOTE)]
        reason = "; ".join([reason, *notes])
        print(f"swift: host {_own(options)}: --coordinator = {options.coordinator!r}: {reason}", file=sys.stderr)
        return 2
    how = signal.Signals(os.WTERMSIG(status)).name
    print(
        f"swift: host {_own(options)}: another host has died or been silent, or this one has crashed ({how}): stopped; "
        f"{_advice(options)}",
        file=sys.stderr,
    )
    return STOPPED


def _be_child(run: Callable[[], int], watch: int, options: argparse.Namespace) -> NoReturn:
    """Runs the command in the child, and exits with the command's exit code."""
    _follow_parent(watch)
    code = STOPPED
    try:
        code = run()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else STOPPED
    except Exception as error:
        if type(error).__name__ != "JaxRuntimeError":
            traceback.print_exc()
        reason = " ".join(str(error).split())[:_MAX_WHY]
        print(
            f"swift: host {_own(options)}: another host is gone, or this one has failed ({reason}): stopped; "
            f"{_advice(options)}",
            file=sys.stderr,
        )
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        finish()
        os._exit(code)  # a regular exit would wait in JAX for hosts that are gone


def _follow_parent(watch: int) -> None:
    """Makes this child process receive the terminal's signals only through its parent, and end with its parent.

    Args:
        watch: read end of a pipe whose only write end is in the parent, so that the pipe closes when the parent dies.
    """
    os.setpgid(0, 0)  # so that the terminal's Ctrl-C arrives only once, from the parent
    threading.Thread(target=_end_with_parent, args=(watch,), name="parent", daemon=True).start()


def _end_with_parent(watch: int) -> None:
    os.read(watch, 1)  # returns when the parent has ended
    os._exit(STOPPED)


def _wait_for(child: int) -> tuple[int, bool]:
    """Waits for the child and forwards signals to it; returns (its wait status, whether a signal was forwarded)."""
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
    """Returns advice for the user: which checkpoint is kept, and how to continue."""
    from swift.checkpoint.manifest import checkpoint_steps, committed_steps

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


class RunningNames:
    """The name of the operator that each thread runs, in memory shared between a process and its later children.

    Recording a name takes about a microsecond. Names longer than 128 bytes are truncated. With more than 256 threads,
    some overwrite each other's names. The same happens if an operator forks and its children run operators.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _NUM_SLOTS * _NAME_BYTES)
        self._own, self._numbers = threading.local(), itertools.count()

    def note(self, name: str) -> None:
        """Records the operator that this thread runs from now on; an empty name means none."""
        try:
            begin = self._own.begin
        except AttributeError:
            begin = self._own.begin = next(self._numbers) % _NUM_SLOTS * _NAME_BYTES
        self._memory[begin : begin + _NAME_BYTES] = name.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")

    def names(self) -> list[str]:
        """Returns the names of all running operators, sorted and without duplicates."""
        begins = range(0, len(self._memory), _NAME_BYTES)
        encoded = {self._memory[begin : begin + _NAME_BYTES].rstrip(b"\0") for begin in begins}
        return sorted(name.decode(errors="ignore") for name in encoded if name)


def run_in_child(run: Callable[[RunningNames], int], what: str) -> int:
    """Runs a command that calls the user's operators in a child process, and waits for it.

    Like ``os.fork``, it returns in both processes; in the child, with the command's exit code.

    Args:
        run: runs the command in the child, records the operators that it runs, and returns an exit code.
        what: name of the command, for the error line.

    Returns:
        The exit code of the child; 128 + N if it was killed by signal N after the parent forwarded a signal; 3, with a
        line on stderr, if something else ended it early.
    """
    running = RunningNames()
    watch, alive = os.pipe()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(alive)
        os.close(reader)
        _follow_parent(watch)
        try:
            return run(running)
        finally:  # tells the parent that the command ended by itself, which includes SystemExit and errors
            os.write(writer, b"+")
    os.close(watch)
    os.close(writer)
    (status, was_signalled), is_whole = _wait_for(child), False
    # Do not read until end of file: a process that an operator left behind may hold the write end open.
    os.set_blocking(reader, False)
    with suppress(BlockingIOError):
        is_whole = bool(os.read(reader, 1))
    os.close(reader)
    os.close(alive)
    code = os.waitstatus_to_exitcode(status)
    if is_whole or was_signalled:
        return code if code >= 0 else 128 - code
    how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    by = _who(running.names())
    print(f"swift: {what}: the process that runs the operators was ended in the midst ({how}), {by}", file=sys.stderr)
    return STOPPED


def _who(names: list[str]) -> str:
    """Returns a clause on what may have ended the process, which is never certain, even if only one operator ran."""
    if not names:
        return "while no operator ran: by what reads the source, by what an operator has left behind, or from outside"
    if len(names) == 1:
        return f"while operator {names[0]} ran: by it, by what it calls, or from outside"
    return f"while operators {' and '.join(names)} ran: by one of them, by what one calls, or from outside"
