"""Nodes in processes of their own, and what the first node hears of their children."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from swift.deadlines import Deadlines
from swift.elastic.transport.messages import NODE_UPDATES, NodeUpdate
from swift.elastic.transport.nodes import NODES
from swift.elastic.transport.remote_node import serve_node

NODE = """
import os, sys
from pathlib import Path
from swift.errors import RunError
from swift.elastic.transport.remote_node import serve_node
from swift.elastic.state.run_files import node_memory
from swift.deadlines import Deadlines
try:
    serve_node(
        Path(sys.argv[1]),
        int(sys.argv[2]),
        deadlines=Deadlines(start=float(sys.argv[3])),
        environment=os.environ,
        storage=Path("/dev/shm"),
        corpus=None,
        is_end_requested=lambda: False,
    )
except RunError as error:
    sys.exit(str(error))
"""
SILENCE_S = 3.0


@contextmanager
def node(run_dir, number=1, patience_s=60.0):
    command = [sys.executable, "-c", NODE, str(run_dir), str(number), str(patience_s)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def serve(run_dir, start_s, *, is_end_requested=False):
    serve_node(
        run_dir,
        1,
        deadlines=Deadlines(start=start_s),
        environment=os.environ,
        storage=run_dir,
        corpus=None,
        is_end_requested=lambda: is_end_requested,
    )


def start(fleet, who, code, log):
    fleet.start(who, [sys.executable, "-c", code], log)


def hear(fleet, number=1):
    """So many lines, by whom."""
    deadline, heard = time.monotonic() + 30, []
    while len(heard) < number and time.monotonic() < deadline:
        fleet.deaths()  # as a supervisor does all the time
        heard += [(line.child, line.line) for line in fleet.received(0.05)]
    return heard


def until_dead(fleet):
    deadline, dead = time.monotonic() + 30, []
    while not dead and time.monotonic() < deadline:
        dead = fleet.deaths()
        time.sleep(0.02)
    return [(death.child, death.reason) for death in dead]


def come(number=1, *, is_there=True):
    return NODES, NODE_UPDATES.line(NodeUpdate(number, is_there))


def is_alive(pid):
    with suppress(OSError):
        return Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def until_gone(pid):
    deadline = time.monotonic() + 30
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_alive(pid)
