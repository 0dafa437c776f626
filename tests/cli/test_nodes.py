"""The number of nodes, and that of this one, from the command line or from Slurm and Kubernetes."""

import argparse
import socket
from pathlib import Path

import pytest

from swift.cli.nodes import NodeListener, Nodes, nodes_of
from swift.errors import SettingError

SLURM = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2"}


def options(**given):
    usual = {"processes": 6, "nodes": None, "node": None, "listen": None, "insecure_network": False}
    return argparse.Namespace(**usual | {"run_dir": Path("run")} | given)


@pytest.mark.parametrize(
    ("given", "environment", "nodes"),
    [
        ({}, {}, Nodes()),
        ({"run_dir": None}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "3"}, Nodes()),  # in the script, not under srun
        ({}, SLURM, Nodes(3, 2)),
        ({"nodes": 1}, SLURM, Nodes()),
        ({"nodes": 4}, {"JOB_COMPLETION_INDEX": "3"}, Nodes(4, 3)),
        ({"nodes": 2, "node": 1}, SLURM, Nodes(2, 1)),
        ({"nodes": 2, "node": 0, "listen": "127.0.0.1"}, {}, Nodes(2, 0, "127.0.0.1")),
        ({"nodes": 2, "node": 0, "listen": "127.0.0.1:7000"}, {}, Nodes(2, 0, "127.0.0.1", 7000)),
    ],
)
def test_nodes_are_those_asked_for_or_those_of_the_scheduler(given, environment, nodes):
    assert nodes_of(options(**given), environment) == nodes


def test_a_name_that_stands_for_the_loopback_device_is_no_place_to_be_found_at(monkeypatch):
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    with pytest.raises(SettingError, match=r"stands for 127\.0\.1\.1, which no other can reach"):
        nodes_of(options(nodes=2, node=0, insecure_network=True), {})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"nodes": 0}, "--nodes = 0: must be a whole number of at least 1"),
        ({"nodes": 7}, "= 7: must be at most --processes = 6"),
        ({"nodes": 2}, "--node = (not set): must be from 0 to 1"),
        ({"nodes": 2, "node": 2}, "--node = 2: must be from 0 to 1"),
        ({"node": 1}, "--node = 1: is for several --nodes"),
        ({"listen": "127.0.0.1"}, "--listen = '127.0.0.1': is for several --nodes"),
        ({"nodes": 2, "node": 0, "run_dir": None}, "--run-dir = (not set): several nodes need a directory"),
        ({"nodes": 2, "node": 0, "listen": "10.0.0.7"}, "add --insecure-network if you trust that network"),
        ({"nodes": 2, "node": 0, "listen": "localhost:port"}, "must be HOST or HOST:PORT"),
        ({"nodes": 2, "node": 0, "listen": "localhost:65536"}, "must be HOST or HOST:PORT"),
        ({"nodes": 2, "node": 0, "listen": "0.0.0.0"}, "must be HOST or HOST:PORT, with one address"),
        ({"nodes": 2, "node": 0, "listen": ":7000"}, "must be HOST or HOST:PORT"),
        ({"nodes": 2, "node": 0, "listen": "no.such.host.invalid"}, "is not a known host"),
    ],
)
def test_nodes_that_do_not_fit_together_are_refused(given, told):
    with pytest.raises(SettingError) as error:
        nodes_of(options(**given), {})
    assert told in str(error.value)


def test_a_port_that_is_taken_is_a_mistake():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(SettingError, match="--listen"), NodeListener.of(Nodes(2, 0, port=port)):
            pass


def test_neighbours_share_a_node_and_all_nodes_have_some():
    places = [Nodes(count=4).node_of(index, 6) for index in range(6)]
    assert places == sorted(places)
    assert set(places) == {0, 1, 2, 3}
