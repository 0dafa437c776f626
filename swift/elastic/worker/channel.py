"""The pipes between a process and the supervisor: commands on standard input, messages on standard output.

``CommandListener`` takes a worker's commands as they arrive, and ``ControlChannel`` sends its messages from any thread.
All processes of a run, including the services, configure JAX with ``configure_jax`` and write through ``LineWriter``.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TextIO

import jax

from swift.config.experiment import Experiment
from swift.elastic.membership.messages import Connect, Heartbeat, PhaseTimed, PreloadPrograms, StartGeneration
from swift.elastic.transport.messages import (
    WORKER_COMMANDS,
    WORKER_MESSAGES,
    Begin,
    FormGroup,
    Halt,
    Hang,
    Stop,
    WorkerCommand,
    WorkerMessage,
)
from swift.tasks import start_thread

_HEARTBEAT_S, _ABORT_S = 0.5, 0.05


def configure_jax(experiment: Experiment, num_devices: int) -> None:
    """Configures JAX for CPU devices; must be called before JAX creates a backend.

    Args:
        experiment: settings of the run.
        num_devices: number of devices of this process.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
    jax.config.update("jax_enable_x64", experiment.compute_dtype == "float64")
    jax.config.update("jax_enable_compilation_cache", False)  # the run has its own executable cache


class LineWriter:
    """Writes protocol lines to standard output, from any thread.

    Everything else that the process or its libraries write to standard output is redirected to standard error, at the
    level of file descriptors, so that it cannot mix with the protocol.

    Args:
        gone: called when nobody reads the output any more; does not return.
    """

    def __init__(self, gone: Callable[[], NoReturn]):
        self._output, self._gone, self._lock = os.fdopen(os.dup(sys.stdout.fileno()), "w"), gone, threading.Lock()
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def write(self, line: str) -> None:
        """Writes a line, which must end with a newline."""
        try:
            with self._lock:
                self._output.write(line)
                self._output.flush()
        except BrokenPipeError:
            self._gone()

    def repeat(self, line: Callable[[], str]) -> None:
        """Starts a thread that writes the result of ``line()`` every half second, as a heartbeat."""

        def beat() -> None:
            while True:
                time.sleep(_HEARTBEAT_S)
                self.write(line())

        start_thread(beat, name="heartbeat")


def wait_to_begin(source: TextIO, gone: Callable[[], NoReturn]) -> Begin:
    """Waits for the first command of the supervisor; exits if that is ``Stop``.

    Args:
        source: stream of commands, one per line.
        gone: called when the supervisor is gone; does not return.
    """
    line = source.readline()
    if not line.endswith("\n"):
        gone()
    command = WORKER_COMMANDS.read(line)
    if isinstance(command, Stop):
        os._exit(0)
    assert isinstance(command, Begin), f"{command} has come first"
    return command


class CommandListener:
    """Reads the supervisor's commands in a thread; ends the process when the supervisor is gone.

    Args:
        source: stream of commands, one per line.
        aborter: called with the number of a generation that the main thread has to join at once, even if it waits in a
            collective; returns a function to call repeatedly until the main thread has taken the command.
        load_ahead: called with a command to preload programs; returns at once.
        gone: called when the supervisor is gone; does not return.

    Attributes:
        newest: newest command to form a generation.
        halt: newest command to stop the run after an iteration.
        hangs: whether an injected fault makes the next iteration hang forever.
    """

    def __init__(
        self,
        source: TextIO,
        aborter: Callable[[int], Callable[[], None]],
        load_ahead: Callable[[PreloadPrograms], None],
        gone: Callable[[], NoReturn],
    ):
        self._source, self._aborter, self._load_ahead, self._gone = source, aborter, load_ahead, gone
        self._changed = threading.Condition()
        self._step: Connect | StartGeneration | None = None  # newest command to connect or to run
        self._taken = 0  # newest generation whose command the main thread has taken
        self.newest: FormGroup | None = None
        self.halt: Halt | None = None
        self.hangs = False
        start_thread(self._listen, name="commands")

    def wait_to_form(self, after: int, timeout_s: float | None = None) -> FormGroup | None:
        """Waits for the command to form a generation newer than ``after``; returns None after ``timeout_s`` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.is_old(after), timeout_s):
                return None
            assert self.newest is not None
            self._taken = self.newest.form.number
            return self.newest

    def wait_to_enter(self, number: int) -> bool:
        """Waits until all members have left the old generation; returns False if a newer one is to be formed."""
        return isinstance(self._wait_for(Connect, number), Connect)

    def wait_to_start(self, number: int) -> StartGeneration | None:
        """Waits for the command to run a generation; returns None if a newer one is to be formed."""
        command = self._wait_for(StartGeneration, number)
        return command if isinstance(command, StartGeneration) else None

    def is_old(self, number: int) -> bool:
        """Returns whether the supervisor wants a newer generation than ``number``."""
        return self.newest is not None and self.newest.form.number > number

    def _wait_for(self, kind: type[Connect] | type[StartGeneration], number: int) -> Connect | StartGeneration | None:
        def has_come() -> bool:
            step = self._step
            return isinstance(step, kind) and number == (
                step.go.number if isinstance(step, StartGeneration) else step.number
            )

        with self._changed:
            self._changed.wait_for(lambda: has_come() or self.is_old(number))
            return None if self.is_old(number) else self._step

    def _listen(self) -> None:
        try:
            for line in self._source:
                if line.endswith("\n"):  # otherwise the supervisor died while it wrote the line
                    self._take(WORKER_COMMANDS.read(line))
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # a regular exit would wait for threads in XLA
        self._gone()

    def _take(self, command: WorkerCommand) -> None:
        if isinstance(command, Stop):
            os._exit(0)
        if isinstance(command, FormGroup) and command.form.after is None:
            # Done before the main thread learns of the command: until then, the group to abort is surely the old one.
            abort = self._aborter(command.form.number)
            start_thread(self._abort_until_taken, command.form.number, abort)
        if isinstance(command, PreloadPrograms):
            self._load_ahead(command)
        with self._changed:
            match command:
                case FormGroup():
                    self.newest = command
                case Halt():
                    self.halt = command
                case Hang():
                    self.hangs = True
                case Connect() | StartGeneration():
                    self._step = command
            self._changed.notify_all()

    def _abort_until_taken(self, number: int, abort: Callable[[], None]) -> None:
        while self._taken < number:
            abort()
            time.sleep(_ABORT_S)


class ControlChannel:
    """Sends messages and heartbeats to the supervisor, on standard output.

    Args:
        gone: called when the supervisor is gone; does not return.

    Attributes:
        generation: generation that the process runs; 0 if none. Heartbeats report this and the next two attributes.
        entered: newest iteration that the process has begun.
        finished: newest iteration that the process has finished.
    """

    def __init__(self, gone: Callable[[], NoReturn]):
        self._output = LineWriter(gone)
        self.generation = self.entered = self.finished = 0
        self._output.repeat(self._heartbeat)

    def send(self, kind: type[WorkerMessage], **fields: Any) -> None:
        """Sends a message: a class of ``swift.elastic.transport.messages`` with these fields."""
        self._output.write(WORKER_MESSAGES.line_of(kind, **fields))

    @contextmanager
    def timed(self, number: int, phase: str) -> Iterator[None]:
        """Reports the duration of the ``with`` block as one phase in the transition to a generation."""
        start_time = time.perf_counter()
        yield
        self.send(PhaseTimed, number=number, phase=phase, seconds=round(time.perf_counter() - start_time, 4))

    def send_heartbeat(self) -> None:
        """Sends a heartbeat now, so that the supervisor learns of progress without delay."""
        self._output.write(self._heartbeat())

    def _heartbeat(self) -> str:
        progress = {"number": self.generation, "entered": self.entered, "finished": self.finished}
        return WORKER_MESSAGES.line_of(Heartbeat, **progress)
