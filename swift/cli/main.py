"""The command-line entry point: runs a command, and turns errors into a one-line message and an exit code.

During the first seconds of a slow command, a terminal shows a status line until the command prints something.
"""

import argparse
import errno
import importlib
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Any, Self, TextIO

from swift.cli.options import HIDDEN, command_line
from swift.cli.parser import with_negative_values, with_suggestion
from swift.cli.processes import run_in_child, run_supervised
from swift.errors import INTERRUPTED, STOPPED, RunError, SettingError, first_line, printable
from swift.output import protect
from swift.variables import drop_fixed

_PERIOD_S = 0.2
_CLEAR = "\r\x1b[2K"

_LONG = ("train", "compare", "launch", "evaluate")
"""Commands that need several seconds before they print anything."""
_RESULT_IN_FILES = ("train", "compare", "compared", "launch", "import", "export")
"""Commands that write their result to files, so that a closed stdout is not an error; others print it on stdout."""
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_MODULES = {
    "compare": "swift.cli.compare",
    "compared": "swift.cli.compared_run",
    "compile": "swift.cli.compile",
    "compiler": "swift.cli.compile",
    "place": "swift.cli.place",
    "plan": "swift.cli.plan",
    "simulate": "swift.cli.simulate",
    "launch": "swift.cli.launch",
    "checkpoint": "swift.cli.checkpoints",
    "settings": "swift.cli.settings",
    "config": "swift.cli.settings",
    "data": "swift.cli.data",
    "train": "swift.cli.train",
    "report": "swift.cli.report",
    "watch": "swift.cli.watch",
    "doctor": "swift.cli.doctor",
    "evaluate": "swift.cli.evaluate",
    "generate": "swift.cli.generate",
    "import_model": "swift.cli.hub",
    "export": "swift.cli.hub",
    "export_to_hub": "swift.cli.hub",
} | dict.fromkeys((command.replace("-", "_") for command in HIDDEN), "swift.cli.child_entry")
"""Maps the name of each command's function to its module, which is imported only when the command runs."""


class Startup:
    """A context manager that shows on stderr what a command is doing while JAX is imported.

    The line is erased before anything else is printed on stdout or stderr, and at the end of the ``with`` block. An
    error message is therefore still a single line. If stderr is not a terminal, nothing is shown.

    Args:
        text: what the command is doing, such as ``swift train: starting``.
    """

    def __init__(self, text: str):
        self._text, self._begun = text, time.monotonic()
        self._lock, self._is_over = threading.Lock(), threading.Event()
        self._streams: dict[str, TextIO] = {}

    def __enter__(self) -> Self:
        if sys.stderr is not None and sys.stderr.isatty():  # None if the process was started with stderr closed
            self._terminal = sys.stderr
            for name in ("stdout", "stderr"):
                self._streams[name] = getattr(sys, name)
                setattr(sys, name, _Watched(self._streams[name], self.end))
            self._draw()
            threading.Thread(target=self._redraw, name="startup", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Erases the line and stops redrawing it; a second call does nothing."""
        with self._lock:
            if not self._streams:
                return
            self._is_over.set()
            for name, stream in self._streams.items():
                if isinstance(getattr(sys, name), _Watched):
                    setattr(sys, name, stream)
            self._streams = {}
            self._terminal.write(_CLEAR)
            self._terminal.flush()

    def _redraw(self) -> None:
        while not self._is_over.wait(_PERIOD_S):
            with self._lock:
                if not self._is_over.is_set():
                    self._draw()

    def _draw(self) -> None:
        self._terminal.write(f"{_CLEAR}{self._text} ({time.monotonic() - self._begun:.0f} s)")
        self._terminal.flush()


class _Watched:
    """A stream that calls a function before each write."""

    def __init__(self, stream: TextIO, before: Any):
        self._stream, self._before = stream, before

    def write(self, text: str) -> int:
        self._before()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: words of the command line, or None for those of this process. With None, the process is assumed to
            run nothing else, so that its streams and environment may be changed.

    Returns:
        The exit code: 0 for success; 2 for a user's mistake, with one line on stderr; 3 for a run that cannot continue;
        as in a shell, 130 for Ctrl-C, or for SIGTERM or SIGHUP once a run has saved a checkpoint, and 141 for a closed
        pipe.
    """
    try:
        options = command_line().parse_args(with_negative_values(sys.argv[1:] if arguments is None else arguments))
    except OSError as error:  # from --version or --help, if stdout is closed or full
        return _unwritten(error)
    if arguments is None:
        protect(["stderr", *["stdout"] * (options.command in _RESULT_IN_FILES)])
    if arguments is None and (dropped := drop_fixed(os.environ)):  # must happen before JAX is imported
        names = " and ".join(dropped)
        print(f"swift: {names} would change results and has no effect: settings alone decide them", file=sys.stderr)
    # The user's operators may kill the process. ``serve`` monitors its processes itself.
    if arguments is None and options.command == "data" and options.action != "serve":
        what = f"data {options.action} {options.config}"
        return run_in_child(lambda running: _run(argparse.Namespace(**vars(options), running=running)), what)
    if getattr(options, "coordinator", None) is None:
        return _run(options)
    return run_supervised(lambda link: _run(argparse.Namespace(**vars(options), link=link)), options)


def _run(options: argparse.Namespace) -> int:
    """Runs a command in this process; returns its exit code."""
    # Ctrl-C must end the process at once: a KeyboardInterrupt inside JAX can crash or get lost. Commands that shut down
    # gracefully use ``swift.train.interrupt``.
    previous = signal.signal(signal.SIGINT, signal.SIG_DFL), sys.unraisablehook
    sys.unraisablehook = _ignore_late_writes
    logging.getLogger("asyncio").addFilter(_is_no_late_write)  # never removed: they are logged at exit
    # The warning comes from an Orbax save that cannot start a thread; the error itself is still raised.
    warnings.filterwarnings("ignore", r"coroutine .* was never awaited", RuntimeWarning)
    try:
        # Import the module only now: JAX takes a second, and --help, a misspelled command or `plan` should not wait.
        is_long = options.command in _LONG
        with Startup(f"swift {options.command}: starting") if is_long else nullcontext():
            function = _function_of(options)
            module = importlib.import_module(_MODULES[function])
            getattr(module, function)(options)
        sys.stdout.flush()  # a closed pipe must raise here, and not when the interpreter ends
    except SettingError as error:
        return _fail(with_suggestion(error), 2)
    except RunError as error:
        return _fail(str(error), STOPPED)
    except (RuntimeError, AssertionError):
        mistake = _why_jax_does_not_start()
        if mistake is None:
            raise
        return _fail(str(mistake), 2)
    except MemoryError as error:
        return _fail(f"there is not enough memory: {first_line(error)}", STOPPED)
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if options.command not in _RESULT_IN_FILES:
            return _unwritten(error)
        if error.errno not in _UNWRITABLE:  # a bug, since stdout is protected and never fails for these commands
            raise
        return _fail(f"{error.filename or 'a file'} cannot be written: {error.strerror}", STOPPED)
    finally:
        signal.signal(signal.SIGINT, previous[0])
        sys.unraisablehook = previous[1]
    return 0


def _unwritten(error: OSError) -> int:
    """Handles an error from stdout: prints a line unless the reader closed the pipe, and returns the exit code.

    Output that Python would still flush as the process exits is discarded. Errors from other files are raised.
    """
    is_closed = isinstance(error, BrokenPipeError)
    if not is_closed and (error.filename is not None or error.errno not in _UNWRITABLE):
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141 if is_closed else _fail(f"stdout cannot be written: {error.strerror}", STOPPED)


def _why_jax_does_not_start() -> SettingError | None:
    """Returns an error for the user if JAX finds no devices of the requested platform, or None if it does.

    JAX raises wherever a command first needs devices, and has no exception class for this case. For CUDA without a GPU,
    it raises an AssertionError without a message.
    """
    if "jax" not in sys.modules:
        return None
    jax = sys.modules["jax"]
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        name, allowed = jax.config.jax_platforms, "must name platforms whose devices JAX finds here, such as cpu"
        if not name:  # JAX has chosen the platform itself
            name, allowed = "", "the platform that JAX chooses does not start; cpu does"
        reason = f" ({' '.join(str(error).split())[:200]})" if str(error) else ""
        return SettingError("JAX_PLATFORMS", name, f"{allowed}: see swift doctor --host{reason}")
    return None


def _function_of(options: argparse.Namespace) -> str:
    """Returns the name of the function that runs a command: usually the command's own name."""
    if options.command == "import":
        return "import_model"
    return (
        "export_to_hub" if options.command == "export" and options.format == "hf" else options.command.replace("-", "_")
    )


def _ignore_late_writes(unraisable: Any) -> None:
    """Reports exceptions that no caller can catch, except those of file writes that complete after a failed save.

    Orbax 0.12.8 closes its event loop at the first failed write. TensorStore still completes the other writes, and
    prints a traceback for each. The failure itself is raised, and the next save removes the files that were written.
    """
    if not (isinstance(unraisable.exc_value, RuntimeError) and str(unraisable.exc_value) == "Event loop is closed"):
        sys.__unraisablehook__(unraisable)


def _is_no_late_write(record: logging.LogRecord) -> bool:
    """Filters asyncio's log: drops lines about Orbax writes that failed after the first, whose error is raised."""
    text = record.getMessage()
    return not ("exception was never retrieved" in text and "orbax" in text)


def _fail(line: str, code: int) -> int:
    print(f"swift: {printable(' '.join(line.split()))}", file=sys.stderr)
    return code
