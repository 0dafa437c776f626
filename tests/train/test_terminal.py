"""A display on a real terminal: what libraries write to file descriptor 2 is above it, and does not tear it."""

import os
import pty
import re
import subprocess
import sys
from contextlib import suppress

from rich.text import Text

from swift.train import display
from swift.train.display import Terminal

CODE = """
import os, runpy, sys, time
from rich.text import Text
Terminal = runpy.run_path(sys.argv[1])["Terminal"]
with Terminal(lambda: Text("[display]"), None, 20, catches_stderr=True) as terminal:
    os.write(2, b"from a library\\n")
    time.sleep(0.3)
    terminal.print("from us")
    os.write(2, b"without an end")
os.write(2, b"after\\n")
"""


def sent_to_a_terminal():
    """All that a terminal is sent as stderr of a process that runs ``CODE``."""
    terminal, other = pty.openpty()
    path = display.__file__
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, path],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=other,
        env=os.environ | {"TERM": "xterm"},
    )
    os.close(other)
    sent = b""
    with suppress(OSError):  # how Linux ends a terminal whose last process has ended
        while piece := os.read(terminal, 65536):
            sent += piece
    os.close(terminal)
    return sent.decode(), process.wait(timeout=60)


def test_what_libraries_write_past_python_is_above_the_display():
    sent, code = sent_to_a_terminal()
    assert code == 0, sent
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line).strip() for line in sent.splitlines()]
    texts = ["from a library", "from us", "without an end", "after"]
    assert [line for line in lines if line in texts] == texts
    assert sent.rindex("\x1b[?25h") > sent.rindex("\x1b[?25l")
    assert sent.count("[display]") > 2


def test_without_a_terminal_only_lines_are_written(capfd):
    with Terminal(lambda: Text("[display]"), catches_stderr=True) as terminal:
        os.write(2, b"from a library\n")
        terminal.print("from us")
    assert capfd.readouterr().err == "from a library\nfrom us\n"
