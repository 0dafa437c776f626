"""A run on two nodes continues without one of them, and readmits it: two processes, or two machines and a network."""

import contextlib
import signal
import subprocess
import threading
import time

import numpy as np
import pytest
from faults.machines import MAY_BE_POSSIBLE, BridgedMachines

from tests.elastic.runs import (
    PATIENCE_S,
    SWIFT,
    environment,
    left_behind,
    losses,
    scratch,
    wait_for,
    whole,
    write_config,
)

pytestmark = pytest.mark.slow


class OneMachine:
    """Both nodes here; one is lost by killing its supervisor."""

    flags = ("--listen", "127.0.0.1")

    def command(self, node):  # noqa: ARG002
        return []

    def lose(self, nodes):
        nodes[1].kill()
        nodes[1].wait()

    def find(self, nodes, start):
        nodes[1] = start(1)


class TwoMachines(BridgedMachines):
    """Machines of which one is lost by cutting its wire."""

    flags = ("--insecure-network",)

    def command(self, node):
        return self.wrap(node)

    def lose(self, nodes):  # noqa: ARG002
        self.cut(1)

    def find(self, nodes, start):  # noqa: ARG002
        self.mend(1)


@pytest.fixture(params=["one", "two"])
def machines(request, tmp_path):
    with contextlib.ExitStack() as stack:
        if request.param == "two" and not MAY_BE_POSSIBLE:
            pytest.skip("only root can make networks, with ip and unshare")
        yield OneMachine() if request.param == "one" else stack.enter_context(TwoMachines(tmp_path))


def test_a_node_that_is_lost_is_done_without_and_taken_back(machines, tmp_path):
    config = write_config(tmp_path, (2, 2, 1), 10**6)
    words = ["launch", "--processes", "4", "--nodes", "2", *machines.flags, str(config)]

    def start(node):
        command = [*machines.command(node), *SWIFT, *words, "--run-dir", str(tmp_path / "run"), "--node", str(node)]
        pipes = {"stderr": subprocess.PIPE if node == 0 else subprocess.DEVNULL, "text": True}
        process = stack.enter_context(subprocess.Popen(command, env=environment(config), **pipes))
        stack.callback(process.kill)
        return process

    with contextlib.ExitStack() as stack:
        nodes = [start(0), start(1)]
        patience = threading.Timer(PATIENCE_S, nodes[0].kill)
        stack.callback(patience.cancel)
        patience.start()
        wait_for(nodes[0], "running with 4 processes")
        time.sleep(3)
        machines.lose(nodes)
        wait_for(nodes[0], "node 1 is lost")
        wait_for(nodes[0], "with 2 processes")
        machines.find(nodes, start)
        wait_for(nodes[0], "node 1 has joined")
        wait_for(nodes[0], "with 4 processes")
        time.sleep(3)
        nodes[0].send_signal(signal.SIGINT)
        rest = nodes[0].stderr.read()
        assert nodes[0].wait(60) == 130, rest
        assert nodes[1].wait(60) == 3  # the run is not finished
    found = losses(tmp_path / "run")
    np.testing.assert_allclose(found, whole(config, "--stop-at", len(found)), rtol=1e-8)
    assert left_behind(config) == {}
    assert scratch(nodes[0].pid) == []
    assert list((tmp_path / "run").glob(".swift-*")) == []
    assert not (tmp_path / "run" / ".meeting.json").exists()
