"""Joining the hosts of a run, through JAX's own coordination service."""

from dataclasses import dataclass

import jax

from swift.errors import SettingError, first_line
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

    JAX ends the process with an abort, and a page of its own, where that is not possible, and later where a host dies.

    Raises:
        SettingError: the surroundings do not say where the other hosts are, or host 0 cannot listen there.
    """
    # On by default: it catches SIGTERM, which then has no effect until a run holds it back (``swift.train.Interrupt``).
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.count,
            place.own,
            cluster_detection_method=None if place.coordinator is None else "deactivate",
            initialization_timeout=JOINING_S,
            heartbeat_timeout_seconds=SILENCE_S,
        )
    except ValueError as error:
        allowed = f"JAX does not find the other hosts in these surroundings ({error}): give HOST:PORT"
        raise SettingError("--coordinator", "auto", allowed) from error
    except RuntimeError as error:
        allowed = f"host {place.own} cannot use it: {first_line(error)}"
        raise SettingError("--coordinator", place.coordinator or "auto", allowed) from error
    return Hosts(jax.process_count(), jax.process_index())
