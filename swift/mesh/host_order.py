"""The devices of several hosts in the order of a topology: expert ranks within a host, stages between hosts.

An expert layer exchanges tokens and weights among the ranks of a worker, and peers of a stage sum its gradients: far
more bytes than the activations that stages pass on. So a host has whole workers, peers of a stage side by side.
"""

from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from swift.errors import SettingError
from swift.topology import Topology, Worker

_MAX_HOSTS = 4
"""Hosts whose workers a line names."""


def order_by_host(topology: Topology, devices: Sequence[jax.Device]) -> list[jax.Device]:
    """Orders the devices of all hosts for the workers of a topology, worker by worker.

    Args:
        topology: shape of the whole cluster.
        devices: devices of all hosts, as many as it needs, and equally many of each host.

    Raises:
        SettingError: their number is another one, or a worker would have a part of a host beside whole ones.
    """
    num_ranks, needed = topology.num_expert_ranks, topology.num_devices
    by_host = sorted(devices, key=lambda device: (device.process_index, device.id))
    num_hosts = len({device.process_index for device in devices})
    per_host = len(devices) // num_hosts
    if len(devices) != needed or needed != per_host * num_hosts:
        allowed = f"needs {needed} devices in all, equally many on each host, and {num_hosts} hosts have {len(devices)}"
        raise SettingError("Topology", topology, allowed)
    if per_host % num_ranks and num_ranks % per_host:
        allowed = f"must divide the {per_host} devices of a host, or be a multiple of them"
        raise SettingError("Topology.num_expert_ranks", num_ranks, allowed)
    stage_by_stage = sorted(topology.workers, key=lambda worker: (worker[1], worker[0]))
    first = {worker: number * num_ranks for number, worker in enumerate(stage_by_stage)}
    return [by_host[first[worker] + rank] for worker in topology.workers for rank in range(num_ranks)]


def host_line(workers: Sequence[Worker], mesh: Mesh) -> str:
    """Says in one line which workers each host has.

    Args:
        workers: worker of every row of the mesh.
        mesh: devices ``[rows, expert ranks]``.
    """
    held: dict[int, dict[str, None]] = {}
    for (d, p), devices in zip(workers, mesh.devices, strict=True):
        for device in devices:
            held.setdefault(device.process_index, {})[f"{d}:{p}"] = None
    is_split = sum(map(len, held.values())) > len(workers)
    ranks = "across hosts" if is_split else "within a host"
    shown = [f"host {host} has {', '.join(held[host])}" for host in sorted(held)[:_MAX_HOSTS]]
    rest = ["and so on"] if len(held) > _MAX_HOSTS else []
    return f"expert ranks {ranks}, stages between hosts: {'; '.join(shown + rest)}"
