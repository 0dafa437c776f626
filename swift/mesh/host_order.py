"""The devices of several hosts in the order of a topology: expert ranks within a host, stages between hosts.

An expert layer exchanges tokens and weights among the ranks of a worker, and peers of a stage sum its gradients: far
more bytes than the activations that stages pass on. So a host has whole workers, peers of a stage side by side.
"""

from collections import Counter
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
    counts = list(Counter(device.process_index for device in by_host).values())
    num_hosts, per_host = len(counts), counts[0]
    if len(devices) != needed or set(counts) != {per_host}:
        have = f"{num_hosts} hosts have {_some(counts)}, {len(devices)} in all"
        raise SettingError("Topology", topology, f"needs {needed} devices, equally many on each host, and {have}")
    if per_host % num_ranks and num_ranks % per_host:
        allowed = f"must divide the {per_host} devices of a host, or be a multiple of them"
        raise SettingError("Topology.num_expert_ranks", num_ranks, allowed)
    stage_by_stage = sorted(topology.workers, key=lambda worker: (worker[1], worker[0]))
    first = {worker: number * num_ranks for number, worker in enumerate(stage_by_stage)}
    return [by_host[first[worker] + rank] for worker in topology.workers for rank in range(num_ranks)]


def _some(counts: Sequence[int]) -> str:
    """Lists the first numbers of devices; one where all hosts have it."""
    if len(set(counts)) == 1:
        return f"{counts[0]} each"
    return ", ".join([*map(str, counts[:_MAX_HOSTS]), *["and so on"] * (len(counts) > _MAX_HOSTS)])


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
    devices_told = f"{mesh.devices.size} devices on {len(held)} hosts"
    return f"{devices_told}: expert ranks {ranks}, stages between hosts: {'; '.join(shown + rest)}"
