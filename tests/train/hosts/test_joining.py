"""A host that has joined the others: what JAX's coordination service must not take over."""

import signal
import subprocess
import sys

from tests.train.hosts.runs import free_port

JOINED = """
import os, signal, sys, time
from swift.train import HostPlace, join_hosts

join_hosts(HostPlace(sys.argv[1], 1, 0))
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""


def test_sigterm_has_its_usual_effect_before_a_run_holds_it_back():
    """JAX's preemption service would catch it, and nobody would hear of it."""
    command = [sys.executable, "-c", JOINED, f"127.0.0.1:{free_port()}"]
    ended = subprocess.run(command, timeout=50, capture_output=True, check=False)
    assert ended.returncode == -signal.SIGTERM, ended.stderr.decode()
