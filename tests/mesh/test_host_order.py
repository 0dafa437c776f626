"""The order of the devices of several hosts: a worker's ranks on one host, peers of a stage side by side."""

from typing import NamedTuple

import numpy as np
import pytest

from swift.errors import SettingError
from swift.mesh.live import host_line, order_by_host
from swift.topology import Topology


class _Device(NamedTuple):
    """A device of a host that does not exist."""

    process_index: int
    id: int


class _Mesh(NamedTuple):
    """A mesh of such devices."""

    devices: np.ndarray


def _devices(num_hosts, per_host):
    """The devices of some hosts, with the ids that XLA gives them, in another order than that of the hosts."""
    found = [_Device(host, 2048 * host + nth) for host in range(num_hosts) for nth in range(per_host)]
    return found[::-1]


def _hosts(topology, num_hosts):
    """Host of every worker's ranks, by worker."""
    devices = order_by_host(topology, _devices(num_hosts, topology.num_devices // num_hosts))
    ranks = topology.num_expert_ranks
    return {
        worker: [device.process_index for device in devices[nth * ranks : (nth + 1) * ranks]]
        for nth, worker in enumerate(topology.workers)
    }


def test_a_host_has_whole_workers_and_peers_side_by_side():
    assert _hosts(Topology(2, 2, 2), 4) == {(0, 0): [0, 0], (1, 0): [1, 1], (0, 1): [2, 2], (1, 1): [3, 3]}
    assert _hosts(Topology(2, 2, 2), 2) == {(0, 0): [0, 0], (1, 0): [0, 0], (0, 1): [1, 1], (1, 1): [1, 1]}


def test_a_worker_may_be_larger_than_a_host():
    assert _hosts(Topology(1, 2, 4), 4) == {(0, 0): [0, 0, 1, 1], (0, 1): [2, 2, 3, 3]}


def test_every_device_is_used_once():
    devices = _devices(4, 3)
    found = order_by_host(Topology(2, 2, 3), devices)
    assert sorted(found) == sorted(devices)


@pytest.mark.parametrize(("ranks", "num_hosts", "per_host"), [(4, 2, 6), (3, 2, 2), (2, 3, 2)])
def test_devices_that_do_not_fit_the_workers_are_refused(ranks, num_hosts, per_host):
    """Whole workers and a part of one on a host; or too few devices, or too many."""
    with pytest.raises(SettingError, match="Topology"):
        order_by_host(Topology(1, 2 if ranks < 4 else 3, ranks), _devices(num_hosts, per_host))


@pytest.mark.parametrize(
    ("devices", "have"),
    [
        ([_Device(host, 2048 * host) for host in range(8)], "8 hosts have 1 each, 8 in all"),
        ([*_devices(1, 3), *(_Device(1, number) for number in range(5))], "2 hosts have 3, 5, 8 in all"),
    ],
    ids=["too few", "unequal"],
)
def test_the_devices_of_each_host_are_told(devices, have):
    """The second pair has as many devices in all as the topology, and could be taken for two hosts of four."""
    needed = 64 if len(devices) == devices[-1].process_index + 1 else 8
    with pytest.raises(SettingError, match=f"needs {needed} devices, equally many on each host, and {have}"):
        order_by_host(Topology(1, needed // 8, 8) if needed > 8 else Topology(2, 2, 2), devices)


def test_the_line_names_the_workers_of_the_first_hosts():
    topology = Topology(2, 2, 2)
    devices = np.array(order_by_host(topology, _devices(2, 4)), object).reshape(4, 2, 2)
    mesh = np.empty((4, 2), object)
    for place in np.ndindex(4, 2):
        mesh[place] = _Device(*devices[place])
    line = host_line(topology.workers, _Mesh(mesh))
    told = "8 devices on 2 hosts: expert ranks within a host, stages between hosts: host 0 has 0:0, 1:0; host 1 has "
    assert line == told + "0:1, 1:1"
