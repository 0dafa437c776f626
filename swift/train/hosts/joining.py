"""Joining the hosts of a run, through JAX's own coordination service."""

import ipaddress
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax

from swift.errors import JOINING_NOTE, SettingError, first_line
from swift.mesh.process_group import bound_address, find_group, own_address, use_gloo_at
from swift.topology import Topology
from swift.train.hosts.agreement import Hosts

JOINING_S, SILENCE_S = 60, 20
"""Seconds until all hosts have to have joined, and after which a silent host counts as dead."""


@dataclass(frozen=True)
class HostPlace:
    """The place of this process among the hosts of a run.

    Attributes:
        coordinator: address HOST:PORT on which host 0 listens; None: JAX finds it in the surroundings (Slurm, Open MPI,
            TPU virtual machines, Kubernetes).
        count: number of hosts; None: as the surroundings say.
        own: number of this host, from 0; None: as the surroundings say.
    """

    coordinator: str | None = None
    count: int | None = None
    own: int | None = None


def own_devices(topology: Topology, place: HostPlace) -> int:
    """Returns the number of devices that each host has to emulate.

    Raises:
        SettingError: the hosts cannot have equally many, or their number is not known.
    """
    if place.count is None:
        raise SettingError("--num-hosts", None, "has to be given where devices are emulated, each host's share of them")
    if topology.num_devices % place.count:
        allowed = f"must divide the {topology.num_devices} devices of the topology, of which each host emulates a share"
        raise SettingError("--num-hosts", place.count, allowed)
    return topology.num_devices // place.count


def join_hosts(place: HostPlace) -> Hosts:
    """Joins the other hosts, before JAX has started; the devices of all of them are then ``jax.devices()``.

    Host 0 and gloo listen at the address of the coordinator alone, or that from which this host reaches it. JAX ends
    the process with an abort, and a page of its own, where joining is not possible, and later where a host dies.

    Raises:
        SettingError: the surroundings do not say where the other hosts are, or host 0 cannot listen there.
    """
    # On by default: it catches SIGTERM, which then has no effect until a run holds it back (``swift.train.Interrupt``).
    jax.config.update("jax_enable_preemption_service", False)
    place, devices = (place, None) if place.coordinator else _place_by_surroundings(place)
    address = place.coordinator
    assert address is not None
    try:
        listening = bound_address(address) if place.own == 0 else None
        use_gloo_at(own_address(address))
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise SettingError("--coordinator", address, f"host {place.own} cannot use it: {why}") from error
    _tell_of_loopback(address, own_address(address))
    try:
        jax.distributed.initialize(
            address,
            place.count,
            place.own,
            local_device_ids=devices,
            cluster_detection_method="deactivate",
            coordinator_bind_address=listening,  # all addresses of the machine otherwise
            initialization_timeout=JOINING_S,
            heartbeat_timeout_seconds=SILENCE_S,
        )
    except (RuntimeError, ValueError) as error:
        allowed = f"host {place.own} cannot use it: {first_line(error)}"
        raise SettingError("--coordinator", address, allowed) from error
    return Hosts(jax.process_count(), jax.process_index())


def _place_by_surroundings(place: HostPlace) -> tuple[HostPlace, list[int] | None]:
    """Returns the place that the surroundings say, and the devices that this process takes; None: all it sees."""
    try:
        address, count, own, devices = find_group(place.count, place.own, JOINING_S)
        lacking = [
            name for name, value in (("an address", address), ("--num-hosts", count), ("--host", own)) if value is None
        ]
        if lacking:
            raise ValueError(f"nothing says {' and '.join(lacking)}")
    except (RuntimeError, ValueError) as error:
        allowed = f"JAX does not find the other hosts in these surroundings ({first_line(error)}): give HOST:PORT"
        raise SettingError("--coordinator", "auto", allowed) from error
    return replace(place, coordinator=address, count=count, own=own), devices if shares_machine(os.environ) else None


def shares_machine(environment: Mapping[str, str]) -> bool:
    """Whether Slurm or Open MPI has started several tasks on this machine, which then have a device each.

    JAX gives every task of theirs one device, even the only one of its machine. A task to which the scheduler shows
    fewer devices than there are tasks has its own, and takes all that it sees.
    """
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "")
    if "SLURM_PROCID" in environment:
        tasks, nodes = (environment.get(name, "") for name in ("SLURM_NTASKS", "SLURM_STEP_NUM_NODES"))
        most = max((int(words.partition("(")[0]) for words in per_node.split(",") if words), default=0)
        most = most or -(-int(tasks or 1) // int(nodes or 1))
    else:
        most = int(environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1"))
    visible = environment.get("CUDA_VISIBLE_DEVICES") or environment.get("ROCR_VISIBLE_DEVICES")
    return most > 1 and (visible is None or len(visible.split(",")) >= most)


def _tell_of_loopback(coordinator: str, own: str) -> None:
    """Says on stderr that this machine gives the coordinator's name a loopback address; shown where joining fails."""
    host = coordinator.rpartition(":")[0]
    if ipaddress.ip_address(own).is_loopback and not host.startswith(("127.", "[::1]", "localhost")):
        print(f"{JOINING_NOTE}{host} is a loopback address on this machine, which others do not reach", file=sys.stderr)
