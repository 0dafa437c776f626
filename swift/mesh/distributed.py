"""This process as one of several: everything about it that JAX keeps private.

JAX can form a group of processes once (``jax.distributed.initialize``). It has no public way to host the coordination
service outside of the group, so that any process may die, nor to form the group anew while the survivors live on; its
own fault tolerance (``jax.distributed`` with ``jax_enable_recoverability``) keeps the group of the first day. Until it
has, ``Service`` and ``Link`` use what ``jax.distributed`` itself is made of. Another version of JAX may move it: then
``check_support`` says so, before anything has started. Tried with jax 0.10.2 and 0.12.

An epoch is a group: a service of its own, and in each process a backend of its own, in which process i of n has the
same device ids in every epoch of n processes. So a program that was compiled in one epoch, by any process, can be
loaded in the next (see ``swift.pipeline.program_store``), and no communicator of a dead group is ever met again. What a
backend holds is lost with it: state is fetched to the host before.

CPU collectives (gloo) are aborted here, by their sockets: a process whose peer has died gets an error at once, but one
that waits for a third would wait for ever. On GPU the runtime aborts NCCL by itself (not run here).
"""

import gc
import json
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.backend import clear_backends

from swift.errors import RunError

_NO_HEARTBEAT_S = 86_400
"""Heartbeats are the supervisor's, which also sees whether there is progress."""
_LOOPBACK = "127.0.0.1"


def check_support() -> None:
    """Raises RunError where this JAX lacks what groups of processes are made of."""
    _internals()


def _internals() -> tuple[Any, Any]:
    """The state that JAX keeps of its group, and the module that makes services and clients."""
    try:
        from jax._src import distributed
        from jax._src.lib import _jax

        is_there = hasattr(_jax, "get_distributed_runtime_service") and hasattr(_jax, "get_distributed_runtime_client")
        if is_there and hasattr(distributed, "global_state"):
            return distributed.global_state, _jax
    except ImportError:
        pass
    raise RunError(
        f"jax {jax.__version__} does not have what groups of processes are made of here; "
        "use a version that pyproject.toml names"
    )


class Service:
    """The coordination service of one epoch, hosted outside of its processes.

    Args:
        num_processes: of the epoch.

    Attributes:
        address: where processes find it; on the loopback device only.
    """

    def __init__(self, num_processes: int):
        _, makers = _internals()
        with socket.socket() as probe:
            probe.bind((_LOOPBACK, 0))
            self.address = f"{_LOOPBACK}:{probe.getsockname()[1]}"
        self._service: Any = makers.get_distributed_runtime_service(
            self.address, num_processes, heartbeat_timeout=_NO_HEARTBEAT_S, shutdown_timeout=1, recoverable=True
        )

    def close(self) -> None:
        """Ends the service. A process that is still linked to it is aborted by JAX."""
        self._service.shutdown()


class Link:
    """A process's part in an epoch: its place, its backend, and the way out.

    Args:
        address: of the epoch's service.
        index: of this process, from 0.
        num_processes: of the epoch.
        timeout_s: for all of them to come.

    Raises:
        jax.errors.JaxRuntimeError: not all have come in time.
    """

    def __init__(self, address: str, index: int, num_processes: int, timeout_s: int = 60):
        jax.config.update("jax_enable_recoverability", True)
        self._state, makers = _internals()
        assert self._state.client is None, "this process is in another epoch"
        self._client: Any = makers.get_distributed_runtime_client(
            address,
            index,
            init_timeout=timeout_s,
            shutdown_timeout=1,
            heartbeat_timeout=_NO_HEARTBEAT_S,
            shutdown_on_destruction=False,
            use_compression=True,
        )
        try:
            self._join(address, index, num_processes, timeout_s)
        except BaseException:
            self.leave()
            raise

    def _join(self, address: str, index: int, num_processes: int, timeout_s: int) -> None:
        self._client.connect()
        state = self._state
        state.coordinator_address, state.process_id, state.num_processes = address, index, num_processes
        state.client = self._client
        before = {found.port for found in _sockets() if found.peer is None}
        jax.devices()  # makes the backend, which listens for its peers
        mine = sorted({found.port for found in _sockets() if found.peer is None} - before)
        self._client.key_value_set(f"swift/ports/{index}", json.dumps(mine))
        keys = [f"swift/ports/{other}" for other in range(num_processes)]
        self._ports = {
            port for key in keys for port in json.loads(self._client.blocking_key_value_get(key, 1000 * timeout_s))
        }

    def grid(self, num_ranks: int) -> np.ndarray:
        """The devices of the epoch ``[rows, num_ranks]``, in the order of the processes."""
        devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
        return np.array(devices).reshape(-1, num_ranks)

    def abort(self) -> None:
        """Breaks the collectives that this process waits in, from any thread: they raise."""
        connections = [found for found in _sockets() if found.peer and {found.port, found.peer} & self._ports]
        for found in connections:
            with suppress(OSError), socket.socket(fileno=os.dup(found.descriptor)) as connection:
                connection.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        """Drops the backend and all that it holds; arrays and compiled programs of this epoch are of no use after."""
        clear_backends()
        with suppress(jax.errors.JaxRuntimeError):  # the service may be gone
            self._client.shutdown()  # else it goes on asking the service, and aborts the process when that ends
        self._state.client = self._client = None
        self._state.process_id, self._state.num_processes = 0, 1
        gc.collect()  # a backend lives as long as its last array, and its connections with it


def is_broken_collective(error: BaseException) -> bool:
    """Whether a program ended since a process of the epoch is gone, or since ``abort`` was called."""
    # Which of the two depends on whether the program was still being started or already waited for.
    return isinstance(error, jax.errors.JaxRuntimeError | ValueError) and "Gloo" in str(error)


class _Socket(NamedTuple):
    descriptor: int
    port: int
    peer: int | None  # the other side's port; None: it listens


def _sockets() -> Iterator[_Socket]:
    """The TCP sockets of this process."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                peer = None if listens else found.getpeername()[1]
                yield _Socket(int(name), found.getsockname()[1], peer)
