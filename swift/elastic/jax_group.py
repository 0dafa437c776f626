"""This process as one of several: everything about it that JAX keeps private.

JAX can form a group of processes once (``jax.distributed.initialize``). It has no public way to host the coordination
service outside of the group, so that any process may die, nor to form the group anew while the survivors live on; its
own fault tolerance (``jax.distributed`` with ``jax_enable_recoverability``) keeps the group of the first day. Until it
has, ``CoordinationService`` and ``Link`` use what ``jax.distributed`` itself is made of. Another version of JAX may
move it: then ``check_support`` says so, before anything has started. Tried with jax 0.10.2 and 0.12.

A generation is a group: a service of its own, and in each process a backend of its own, in which process i of n has the
same device ids in every generation of n processes. So a program that was compiled in one generation, by any process,
can be loaded in the next (see ``swift.pipeline.reconfigure.executable_cache``), and no communicator of a dead group is
ever met again. What a backend holds is lost with it: state is fetched to the host before.

CPU collectives (gloo) are aborted here, by their sockets: a process whose peer has died gets an error at once, but one
that waits for a third would wait for ever. On GPU the runtime aborts NCCL by itself (not run here).

Left to itself, gloo listens at the address that the machine's own name stands for. Here the CPU backend is made with
the address from which this process reaches the service of its generation: the loopback device, unless that is on a
network.
"""

import gc
import json
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend.backend import clear_backends, register_backend_factory

from swift.errors import RunError

_NO_HEARTBEAT_S = 86_400
"""Heartbeats are the supervisor's, which also sees whether there is progress."""
LOOPBACK = "127.0.0.1"
_NUM_PORTS = 3
_SOCKET, _LONGEST_PATH = "unix:", 107
"""Of the address of a socket that is a file, and how many bytes its path may have (see ``man 7 unix``)."""
_Address = tuple[str, int]
_ADDRESSES = "swift/addresses/{}"
_DEVICES, _ALL_DEVICES = "cpu:local_topology/cpu/{}", "cpu:global_topology/cpu"
"""Where processes leave word of their devices, and the first of all of them; names that are XLA's own. With others a
process that waits for the dead would not be freed, but end by itself in time (see ``swift.elastic.worker.worker``)."""


def check_support() -> None:
    """Raises RunError where this JAX lacks what groups of processes are made of."""
    _internals()


def _internals() -> tuple[Any, Any, Any]:
    """The state that JAX keeps of its group, what makes services and clients, and what makes a backend of the CPU."""
    with suppress(ImportError):
        from jax._src import distributed, xla_bridge
        from jax._src.lib import _jax

        made = ("get_distributed_runtime_service", "get_distributed_runtime_client", "make_gloo_tcp_collectives")
        is_there = all(hasattr(_jax, name) for name in made)
        if is_there and hasattr(distributed, "global_state") and hasattr(xla_bridge, "make_cpu_client"):
            return distributed.global_state, _jax, xla_bridge.make_cpu_client
    raise RunError(
        f"jax {jax.__version__} does not have what groups of processes are made of here; "
        "use a version that pyproject.toml names"
    )


class CoordinationService:
    """The coordination service of one generation, hosted outside of its processes.

    Who reaches it may take any place in the generation. A directory that only its owner may enter keeps other users of
    the machine out; at an address nobody is.

    Args:
        num_processes: of the generation.
        where: the directory for its socket; or an address of this machine, for processes of several machines.

    Attributes:
        address: where processes find it.

    Raises:
        RunError: it could not be started there.
    """

    def __init__(self, num_processes: int, where: Path | str):
        errors = []
        for _ in range(_NUM_PORTS):  # somebody else may take the port between the two
            self.address = _free_address(where)
            try:
                self._service = self._made(num_processes)
                return
            except RuntimeError as error:
                errors.append(f"{self.address}: {error}")
        raise RunError(f"no coordination service could be started: {'; '.join(errors)}")

    def _made(self, num_processes: int) -> Any:
        _, makers, _ = _internals()
        return makers.get_distributed_runtime_service(
            self.address, num_processes, heartbeat_timeout=_NO_HEARTBEAT_S, shutdown_timeout=1, recoverable=True
        )

    def close(self) -> None:
        """Ends the service. A process that is still linked to it is aborted by JAX."""
        self._service.shutdown()


class LinkError(RuntimeError):
    """Not all processes of a generation have come in time."""


class Link:
    """A process's part in a generation: its place, its backend, and the way out.

    Args:
        address: of the generation's service.
        index: of this process, from 0.
        num_processes: of the generation.
        timeout_s: for all of them to come.
    """

    def __init__(self, address: str, index: int, num_processes: int, timeout_s: int = 60):
        jax.config.update("jax_enable_recoverability", True)
        self._state, makers, _ = _internals()
        assert self._state.client is None, "this process is in another generation"
        self._address, self._index, self._num_processes, self._timeout_s = address, index, num_processes, timeout_s
        self._lock, self._addresses, self._is_connected = threading.Lock(), set[_Address](), False
        self._client: Any = makers.get_distributed_runtime_client(
            address,
            index,
            init_timeout=timeout_s,
            shutdown_timeout=1,
            heartbeat_timeout=_NO_HEARTBEAT_S,
            shutdown_on_destruction=False,
            use_compression=True,
        )

    def join(self) -> None:
        """Meets the others, and makes the backend; once.

        Raises:
            LinkError: not all have come in time, or ``abort`` was called.
        """
        try:
            self._client.connect()
            self._is_connected = True
            self._make_backend()
        except RuntimeError as error:  # of the connection, or of the backend
            self.leave()
            raise LinkError(str(error)) from error

    def _make_backend(self) -> None:
        self._take_place(self._index)
        before = _listening_at()
        jax.devices()  # makes the backend, which listens for its peers
        mine = sorted(_listening_at() - before)
        self._client.key_value_set(_ADDRESSES.format(self._index), json.dumps(mine))
        keys = [_ADDRESSES.format(other) for other in range(self._num_processes)]
        told = [json.loads(self._client.blocking_key_value_get(key, 1000 * self._timeout_s)) for key in keys]
        self._addresses = {(host, port) for addresses in told for host, port in addresses}

    def _cpu_client(self) -> Any:
        """A backend of the CPU: of the generation, or after it one of this process alone."""
        _, makers, make = _internals()
        if self._client is None:
            return make()
        host = _own_address(self._address)
        return make(makers.make_gloo_tcp_collectives(distributed_client=self._client, hostname=host))

    def _take_place(self, index: int) -> None:
        """What the next backend is made for."""
        state = self._state
        state.coordinator_address, state.process_id, state.num_processes = self._address, index, self._num_processes
        state.client = self._client
        register_backend_factory("cpu", self._cpu_client, fail_quietly=False)

    def grid(self, num_ranks: int) -> np.ndarray:
        """The devices of the generation ``[rows, num_ranks]``, in the order of the processes."""
        devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
        return np.array(devices).reshape(-1, num_ranks)

    def abort(self) -> None:
        """Breaks what this process waits in, ``join`` or a collective: it raises. From any thread, until it has left.

        Connections are made when a program first needs them: to be sure, abort again until ``leave`` is called.
        """
        # Reading only: gloo's own thread then sees the end of the connection, and fails all that waits for it. Could a
        # send fail first, gloo (of jax 0.10 and 0.12) would queue what it has already given up, and wait for ever.
        with self._lock:
            if self._client is None or not self._is_connected:
                return
            if not self._addresses:
                self._spoil()
            for own, peer, connection in _connections():
                if {own, peer} & self._addresses:
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_RD)

    def _spoil(self) -> None:
        """Leaves word in the place of whoever has not, so that nobody waits for the dead; who reads it, fails."""
        places = range(self._num_processes)
        words = [(key.format(place), word) for place in places for key, word in ((_DEVICES, b"-"), (_ADDRESSES, b"[]"))]
        for key, word in [*words, (_ALL_DEVICES, b"-")]:
            with suppress(jax.errors.JaxRuntimeError):  # it is there already
                self._client.key_value_set_bytes(key, word)

    def leave(self) -> None:
        """Drops the backend and all that it holds; arrays and compiled programs of this generation are of no use after.

        Nothing happens where it has left before.
        """
        with self._lock:
            client, self._client = self._client, None
        if client is None:
            return
        clear_backends()
        with suppress(jax.errors.JaxRuntimeError):  # the service may be gone
            client.shutdown()  # else it goes on asking the service, and aborts the process when that ends
        self._state.client = None
        self._state.process_id, self._state.num_processes = 0, 1
        gc.collect()  # a backend lives as long as its last array, and its connections with it


def _free_address(where: Path | str) -> str:
    """Where nothing listens: in a directory, or at an address of this machine."""
    if isinstance(where, Path):
        path = where / secrets.token_hex(4)
        if len(os.fsencode(path)) > _LONGEST_PATH:
            raise RunError(f"{path}: no socket can have such a long path ({_LONGEST_PATH} bytes); use a shorter TMPDIR")
        return f"{_SOCKET}{path}"
    with socket.socket() as probe:
        probe.bind((where, 0))
        return f"{where}:{probe.getsockname()[1]}"


def _own_address(service: str) -> str:
    """The address of this machine from which a service is reached."""
    if service.startswith(_SOCKET):
        return LOOPBACK
    host, _, port = service.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        return str(probe.getsockname()[0])


def is_called_off(error: BaseException) -> bool:
    """Whether a generation came to nothing: a process of it is gone or late, or ``abort`` was called."""
    # Which of the two a broken collective raises depends on whether the program was still being started.
    is_broken = isinstance(error, jax.errors.JaxRuntimeError | ValueError) and "Gloo" in str(error)
    return is_broken or isinstance(error, LinkError)


def _listening_at() -> set[_Address]:
    """Where this process waits for connections."""
    return {found.getsockname()[:2] for found in _sockets() if _listens(found)}


def _connections() -> Iterator[tuple[_Address, _Address, socket.socket]]:
    """The TCP connections of this process: its own address, the other side's, and the connection."""
    for found in _sockets():
        with suppress(OSError):
            if not _listens(found):
                yield found.getsockname()[:2], found.getpeername()[:2], found


def _listens(found: socket.socket) -> bool:
    return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _sockets() -> Iterator[socket.socket]:
    """The TCP sockets of this process, each as a second descriptor that is closed when the next one is asked for."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            # What this descriptor was may be closed meanwhile, and its number be another's: hence all is asked of ours.
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6):
                    yield found
