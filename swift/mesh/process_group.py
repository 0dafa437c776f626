"""Addresses at which processes on several machines connect, which JAX has no public way to set or find.

By default, gloo listens on the address to which the machine's own name resolves; on some distributions this is a
loopback address. JAX has no setting for this address, and no function that finds the other hosts without joining them.
"""

import errno
import socket
from contextlib import suppress
from typing import Any

import jax
from jax.extend.backend import register_backend_factory

from swift.errors import RunError

LOOPBACK = "127.0.0.1"


def jax_internals() -> tuple[Any, Any, Any]:
    """Returns JAX's process-group state, its module of service and client factories, and its CPU client factory.

    Raises:
        RunError: this version of JAX lacks one of them.
    """
    with suppress(ImportError):
        from jax._src import distributed, xla_bridge
        from jax._src.lib import _jax

        names = ("get_distributed_runtime_service", "get_distributed_runtime_client", "make_gloo_tcp_collectives")
        is_there = all(hasattr(_jax, name) for name in names)
        if is_there and hasattr(distributed, "global_state") and hasattr(xla_bridge, "make_cpu_client"):
            return distributed.global_state, _jax, xla_bridge.make_cpu_client
    raise RunError(
        f"jax {jax.__version__} lacks the private interfaces that groups of processes use; "
        "use a version that pyproject.toml names"
    )


def find_group(
    count: int | None, process_id: int | None, timeout_s: int
) -> tuple[str | None, int | None, int | None, list[int] | None]:
    """Asks JAX for the process group that Slurm, Open MPI, Kubernetes or a TPU host started this process in.

    Args:
        count: number of processes, or None to detect it.
        process_id: number of this process, or None to detect it.
        timeout_s: time limit, in seconds.

    Returns:
        (the address of process 0, the number of processes, the number of this process, each None if not detected; the
        devices that JAX would give this process, or None for all visible devices.)

    Raises:
        RunError: this version of JAX detects process groups in a different way.
    """
    with suppress(ImportError):
        from jax._src.clusters import ClusterEnv

        if hasattr(ClusterEnv, "auto_detect_unset_distributed_params"):
            group: Any = ClusterEnv.auto_detect_unset_distributed_params(None, count, process_id, None, None, timeout_s)
            return group
    raise RunError(f"jax {jax.__version__} does not find other hosts in the way that is known; give HOST:PORT")


def use_gloo_at(address: str) -> None:
    """Makes a process group's next CPU backend listen on the given address of this machine."""
    state, makers, make = jax_internals()

    def make_client() -> Any:
        if state.client is None:
            return make()
        return make(makers.make_gloo_tcp_collectives(distributed_client=state.client, hostname=address))

    register_backend_factory("cpu", make_client, fail_quietly=False)


def own_address(service: str) -> str:
    """Returns the address of this machine from which HOST:PORT is reachable; raises OSError if it is not."""
    family, address = _resolved(service)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def bound_address(service: str) -> str:
    """Returns the local address and port to bind so that other machines reach a service at HOST:PORT on this one.

    The address differs from HOST's if the network translates addresses, as for a Kubernetes service.
    """
    family, address = _resolved(service)
    host = address[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            host = own_address(service)
    return f"[{host}]:{address[1]}" if ":" in host else f"{host}:{address[1]}"


def _resolved(service: str) -> tuple[socket.AddressFamily, Any]:
    """Resolves HOST:PORT to (address family, argument of ``connect``), preferring IPv4 to IPv6."""
    host, _, port = service.rpartition(":")
    entries = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    family, *_, address = min(entries, key=lambda entry: entry[0] != socket.AF_INET)
    return family, address
