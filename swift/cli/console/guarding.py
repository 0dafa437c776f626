"""A command that runs the user's operators in a child: one that ends its process costs a line, too.

No code in a process can say that something has called ``os._exit`` there, or killed it. The parent is this process
before it has imported anything large, so that it costs a millisecond; see ``watching`` for a command on several hosts.
"""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

from swift.cli.console.running_names import RunningNames
from swift.cli.console.watching import follow_parent, wait_for
from swift.errors import STOPPED


def guarded(run: Callable[[RunningNames], int], what: str) -> int:
    """Runs a command in a child process, and waits for it. In the child this returns, too.

    Args:
        run: function of the child, which notes the operators that it runs, and returns an exit code.
        what: name of the command, for the line.

    Returns:
        Its exit code, that of its signal if it got one through the parent, or 3 where it was ended in the midst, with
        a line.
    """
    running = RunningNames()
    watch, alive = os.pipe()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(alive)
        os.close(reader)
        follow_parent(watch)
        try:
            return run(running)
        finally:  # also with SystemExit, or an error and its traceback
            os.write(writer, b"+")
    os.close(watch)
    os.close(writer)
    (status, was_signalled), is_whole = wait_for(child), False
    os.set_blocking(reader, False)  # a process that an operator has left behind may have the other end
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
    """Says who may have ended the process; other threads, or other processes, may have done it while operators ran."""
    if not names:
        return "while no operator ran: by what reads the source, by what an operator has left behind, or from outside"
    if len(names) == 1:
        return f"while operator {names[0]} ran: by it, by what it calls, or from outside"
    return f"while operators {' and '.join(names)} ran: by one of them, by what one calls, or from outside"
