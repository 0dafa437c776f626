"""JAX process groups that can be formed repeatedly, through JAX's private interfaces.

JAX can form a process group once (``jax.distributed.initialize``). It has no public way to host the coordination
service outside the group, so that any process may die. Nor can it form a new group while the survivors stay alive: its
own fault tolerance (``jax.distributed`` with ``jax_enable_recoverability``) keeps the first group. Until JAX supports
both, ``CoordinationService`` and ``JaxGroup`` use the building blocks of ``jax.distributed``. If another version of JAX
has moved them, ``check_support`` says so before anything has started. Tested with jax 0.10.2 and 0.12.

Each generation is a new group, with its own coordination service and a new backend in each process; only a generation
in which blocks move keeps the group of the previous one. Process i of n has the same device ids in every generation of
n processes, so a program that was compiled in one generation can be loaded in another (see
``swift.pipeline.reconfigure.executables``). No communicator of a dead group is ever used again. Arrays are lost with
their backend, so states are copied to the host first.

**Aborting CPU collectives (gloo).** A process that waits for a dead peer gets an error at once, but a process that
waits for a third, live one would wait forever. Gloo has no call to abort this wait, so ``JaxGroup.abort`` shuts down
its sockets. Gloo listens on the address from which this process reaches the coordination service: loopback, unless the
service is on a network. Groups on accelerators are not aborted, see ``swift.elastic.accelerators``.

A process may also wait for a dead peer to connect to it, without a time limit and without a socket that could be shut
down. To end that wait, the process connects to itself in place of every peer. The data that gloo publishes tell it how:
for each process a host, an address, and a number for each peer, which the peer sends when it connects. If another
version of XLA publishes them in another layout, the wait cannot be ended, and the process exits after a time limit (see
``swift.elastic.worker.worker``).

**Compiling for a group without its members.** A program is bound to the ids of the group's devices, which depend only
on the indices of the processes. When a backend of several processes starts, each process publishes its devices through
the coordination service, and the first one collects them. In a ``CompileOnlyGroup``, one process publishes devices as
each of the processes in turn, and continues as the first; the real group can run the programs that it compiles. JAX can
compile for devices that do not exist (``jax.experimental.topologies``) on TPU and GPU, but not yet on CPU.
"""

import gc
import json
import os
import secrets
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from jax.extend.backend import clear_backends, register_backend_factory

from swift.errors import RunError
from swift.mesh.process_group import LOOPBACK, jax_internals, own_address
from swift.tasks import start_thread

Address = tuple[str, int]
"""Host and port."""
_GLOO = "cpu:gloo"
"""Directory in XLA's key-value store where gloo publishes the addresses of processes."""
_NUMBER, _MAX_NUMBER = np.dtype("=i8"), 1 << 14
"""Gloo numbers a process's connections from 0; a number above this limit indicates that the layout is unknown."""
_CONNECT_S = 1.0
_NO_HEARTBEAT_S = 86_400
"""A day, in seconds, to turn off JAX's heartbeats: the supervisor has its own, and also monitors progress."""
_NUM_PORTS = 3
_SOCKET, _MAX_PATH = "unix:", 107
"""Prefix of the address of a Unix socket, and the maximum size of its path in bytes (see ``man 7 unix``)."""
_ADDRESSES = "swift/addresses/{}"
_TIMEOUT = "jax_cpu_get_global_topology_timeout_minutes"
_PUBLISHED = "cpu:local_topology/"


def check_support() -> None:
    """Raises RunError if this version of JAX lacks the private interfaces that process groups need."""
    jax_internals()


class CoordinationService:
    """The coordination service for a generation, hosted outside its processes so that any of them may die.

    Anyone who can connect may pose as a process of the generation. A socket in a directory that only its owner may
    enter keeps other users of the machine out; a network address does not.

    Args:
        num_processes: number of processes in the generation.
        where: directory for a Unix socket, or an address of this machine for processes on several machines.

    Attributes:
        address: address at which processes connect.

    Raises:
        RunError: the service cannot be started.
    """

    def __init__(self, num_processes: int, where: Path | str):
        errors = []
        self.address, self._instead = "", None
        for attempt in range(_NUM_PORTS):  # another process may take the port before the service does
            try:
                if attempt and isinstance(where, Path):  # the directory was removed, or its disk is full
                    where = self._instead = self._instead or Path(tempfile.mkdtemp(prefix="swift-", dir="/dev/shm"))
                self.address = _free_address(where)
                self._service = self._start_service(num_processes)
                self._admit(num_processes)
            except (RuntimeError, OSError) as error:
                errors.append(f"{self.address or where}: {error}")
            else:
                return
        self._remove_instead()
        raise RunError(f"no coordination service could be started: {'; '.join(errors)}")

    def _start_service(self, num_processes: int) -> Any:
        _, makers, _ = jax_internals()
        return makers.get_distributed_runtime_service(
            self.address, num_processes, heartbeat_timeout=_NO_HEARTBEAT_S, shutdown_timeout=1, recoverable=True
        )

    def _admit(self, num_processes: int) -> None:
        """Connects and disconnects once in the name of each process, so that the processes never wait to connect.

        The service makes a first connection wait until all processes have connected. Nothing can end that wait, and JAX
        aborts a process that waits too long: if one died before it had connected, all others would die, too. The
        service admits a process at once if it was connected before. The connections made here wait for each other in
        the same way, so none is made until every one of them has a thread.

        Raises:
            RunError: not enough threads can be started; the service is closed.
        """
        may_connect, threads, errors = threading.Event(), list[threading.Thread](), list[Exception]()

        def connect_as(index: int) -> None:
            may_connect.wait()
            if len(threads) == num_processes:
                try:
                    connect_once(index)
                except Exception as error:
                    errors.append(error)

        def connect_once(index: int) -> None:
            client = _client(self.address, index, _NO_HEARTBEAT_S)
            client.connect()
            client.shutdown()

        try:
            for index in range(num_processes):
                threads.append(start_thread(connect_as, index, name=f"connects as {index}"))
        except RunError:
            self._service.shutdown()
            raise
        finally:
            may_connect.set()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Shuts down the service. JAX aborts any process that is still connected."""
        self._service.shutdown()
        self._remove_instead()

    def _remove_instead(self) -> None:
        if self._instead is not None:
            shutil.rmtree(self._instead, ignore_errors=True)


class JaxGroupError(RuntimeError):
    """A generation was not formed: not all of its processes connected in time, or it was aborted."""


class JaxGroup:
    """A process group as seen by one process, which joins, gets a backend, and leaves.

    Args:
        address: address of the generation's coordination service.
        index: index of this process, from 0.
        num_processes: number of processes in the generation.
        timeout_s: time limit for all processes to connect, in seconds.
    """

    def __init__(self, address: str, index: int, num_processes: int, timeout_s: int = 60):
        jax.config.update("jax_enable_recoverability", True)
        self._state, _, _ = jax_internals()
        assert self._state.client is None, "this process is a member of another group"
        self._address, self._index, self._num_processes, self._timeout_s = address, index, num_processes, timeout_s
        self._lock, self._is_connected, self._is_aborted = threading.Lock(), False, False
        self._own, self._addresses = list[Address](), set[Address]()
        self._client: Any = _client(address, index, timeout_s)

    def join(self) -> None:
        """Connects to the other processes and creates the backend; must be called only once.

        Raises:
            JaxGroupError: not all processes connected in time, or ``abort`` was called.
        """
        try:
            self._client.connect()
            self._is_connected = True
            self._make_backend()
        except RuntimeError as error:  # from the connection or the backend
            self.leave()
            raise JaxGroupError(str(error)) from error

    def _make_backend(self) -> None:
        self._configure_backend(self._index)
        before = listening_at()
        jax.devices()  # creates the backend, which begins to listen for the other processes
        self._own = sorted(listening_at() - before)
        self._client.key_value_set(_ADDRESSES.format(self._index), json.dumps(self._own))
        keys = [_ADDRESSES.format(other) for other in range(self._num_processes)]
        published = [json.loads(self._client.blocking_key_value_get(key, 1000 * self._timeout_s)) for key in keys]
        self._addresses = {(host, port) for addresses in published for host, port in addresses}

    def _cpu_client(self) -> Any:
        """Creates a CPU backend: for the group, or for this process alone once it has left."""
        _, makers, make = jax_internals()
        if self._client is None:
            return make()
        host = LOOPBACK if self._address.startswith(_SOCKET) else own_address(self._address)
        return make(makers.make_gloo_tcp_collectives(distributed_client=self._client, hostname=host))

    def _configure_backend(self, index: int) -> None:
        """Configures JAX to create the next backend as process ``index``."""
        self._take_place(index)
        register_backend_factory("cpu", self._cpu_client, fail_quietly=False)

    def _take_place(self, index: int) -> None:
        """Sets JAX's distributed state as ``jax.distributed.initialize`` would for process ``index``."""
        state = self._state
        state.coordinator_address, state.process_id, state.num_processes = self._address, index, self._num_processes
        state.client = self._client

    def grid(self, num_ranks: int) -> np.ndarray:
        """Returns the devices of the group ``[rows, num_ranks]``, ordered by process index."""
        devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
        return np.array(devices).reshape(-1, num_ranks)

    def abort(self) -> None:
        """Makes ``join`` or a collective in which the main thread waits raise an error. Any thread may call this.

        Call it repeatedly until ``leave`` is called: gloo connects only when a program first needs a connection, so new
        ones may appear.
        """
        # Shut down only reading: gloo's own thread then sees the end of the connection, and everything that waits for
        # it fails. If a send failed first, gloo (in jax 0.10 and 0.12) would queue an operation that it has already
        # given up, and wait forever.
        with self._lock:
            if self._client is None or not self._is_connected:
                return
            if not self._is_aborted:
                self._is_aborted = True
                self._stop_waiting()
            for local, peer, connection in connections():
                if {local, peer} & self._addresses:
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_RD)

    def _stop_waiting(self) -> None:
        """Ends waits without a connection: for a peer to publish its data, and for a peer to connect."""
        published = dict[str, bytes]()
        with suppress(jax.errors.JaxRuntimeError):  # the service may be gone
            published |= self._client.key_value_dir_get_bytes(_GLOO)
        _connect_for_dead_peers(published, self._own)
        with suppress(jax.errors.JaxRuntimeError):
            self._client.shutdown()

    def leave(self) -> None:
        """Leaves the group and drops the backend with its arrays and loaded programs. May be called more than once."""
        with self._lock:
            client, self._client = self._client, None
        if client is None:
            return
        clear_backends()
        with suppress(jax.errors.JaxRuntimeError):  # the service may be gone
            client.shutdown()  # otherwise it keeps polling the service, and aborts the process when the service ends
        self._state.client = None
        self._state.process_id, self._state.num_processes = 0, 1
        gc.collect()  # a backend and its connections live as long as its last array


def _client(address: str, index: int, timeout_s: int) -> Any:
    """Returns a client of a coordination service, for the process with this index."""
    _, makers, _ = jax_internals()
    return makers.get_distributed_runtime_client(
        address,
        index,
        init_timeout=timeout_s,
        shutdown_timeout=1,
        heartbeat_timeout=_NO_HEARTBEAT_S,
        shutdown_on_destruction=False,
        use_compression=True,
    )


def _free_address(where: Path | str) -> str:
    """Returns an unused address: a Unix socket in a directory, or a port at an address of this machine."""
    if isinstance(where, Path):
        path = where / secrets.token_hex(4)
        if len(os.fsencode(path)) > _MAX_PATH:
            raise RunError(
                f"{path}: too long for the path of a socket (at most {_MAX_PATH} bytes); use a shorter TMPDIR"
            )
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(path))  # raises; JAX's service would crash the process instead (SIGSEGV, jax 0.10 to 0.12)
        path.unlink()
        return f"{_SOCKET}{path}"
    with socket.socket() as probe:
        probe.bind((where, 0))
        return f"{where}:{probe.getsockname()[1]}"


def is_aborted(error: BaseException) -> bool:
    """Returns whether an error only means that the generation is over: a peer is gone or late, or ``abort`` was called.

    Any other error was caused by this process itself.
    """
    # A broken collective raises one or the other, depending on whether the program was still being started.
    is_broken = isinstance(error, jax.errors.JaxRuntimeError | ValueError) and "Gloo" in str(error)
    return is_broken or isinstance(error, JaxGroupError)


class CompileOnlyGroup(JaxGroup):
    """A group for which to compile, although only this process exists; a context manager.

    No program can run on its devices, since collectives would wait forever. Arrays can be put on this process's own
    devices. A process can be in only one group at a time, of either kind.

    Args:
        num_processes: number of processes, each with as many devices as this one (``jax_num_cpu_devices``).
        sockets: directory that only its owner may enter.

    Raises:
        RunError: this version of JAX forms groups in a way in which one process cannot pose as all.
    """

    def __init__(self, num_processes: int, sockets: Path):
        self._service = CoordinationService(1, sockets)
        try:
            super().__init__(self._service.address, 0, num_processes)
            self.join()
        except RuntimeError as error:
            unlike = f"jax {jax.__version__} forms groups in a way in which one process cannot pose as all"
            raise RunError(f"{unlike}: {error}") from error

    def _make_backend(self) -> None:
        try:
            self._publish_others()
        except AttributeError as error:
            raise RuntimeError(f"it uses other names: {error}") from error
        self._configure_backend(0)
        num_devices = self._num_processes * jax.local_device_count()
        if len({device.id for device in jax.devices()}) != num_devices or jax.process_index() != 0:
            raise RuntimeError(f"{num_devices} devices expected, there are {jax.devices()}")

    def _publish_others(self) -> None:
        """Publishes devices in the name of every process but the first, which would wait minutes for missing ones."""
        config = jax.config
        usual = getattr(config, _TIMEOUT)
        config.update(_TIMEOUT, 0)  # the backends of the others must not wait for the first process
        try:
            for other in range(1, self._num_processes):
                self._configure_backend(other)
                _start_backend()
        finally:
            config.update(_TIMEOUT, usual)
        published = len(self._client.key_value_dir_get_bytes(_PUBLISHED))
        if published != self._num_processes - 1:
            raise RuntimeError(f"{published} of {self._num_processes - 1} processes have published their devices")

    def leave(self) -> None:
        """Drops the devices and the programs compiled for them."""
        super().leave()
        self._service.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


def _start_backend() -> None:
    """Starts a backend until it has published its devices, which is as far as it gets without the first process."""
    try:
        jax.devices()
    except RuntimeError:  # the expected outcome: the time-out of 0 is over, and the devices are published
        return
    finally:
        clear_backends()
    raise RuntimeError("its processes do not wait for the first")


def connections() -> Iterator[tuple[Address, Address, socket.socket]]:
    """Yields the TCP connections of this process, each as (own address, peer's address, socket)."""
    for sock in _sockets():
        with suppress(OSError):
            if not _listens(sock):
                yield sock.getsockname()[:2], sock.getpeername()[:2], sock


def listening_at() -> set[Address]:
    """Returns the addresses at which this process listens for TCP connections."""
    return {sock.getsockname()[:2] for sock in _sockets() if _listens(sock)}


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _sockets() -> Iterator[socket.socket]:
    """Yields the TCP sockets of this process, each as a duplicate that is closed when the next one is requested."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            # Another thread may close the original meanwhile, and its number be reused: inspect only the duplicate.
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6):
                    yield sock


def _connect_for_dead_peers(published: Mapping[str, bytes], addresses: Iterable[Address]) -> None:
    """Connects to this process in place of every peer, with every number that a peer could send.

    Args:
        published: data that gloo has published, by key.
        addresses: addresses at which this process listens.
    """
    most = max((largest_number(key, value) for key, value in published.items()), default=-1)
    for address in addresses:
        for number in range(1 + most):
            with suppress(OSError), socket.create_connection(address, _CONNECT_S) as connection:
                connection.sendall(_NUMBER.type(number).tobytes())


def largest_number(key: str, value: bytes) -> int:
    """Returns the largest connection number in a value that gloo has published, or -1 if the layout is unknown.

    The numbers are at the end of the value, one for each process that the key lists.
    """
    size = (key.count(",") + 1) * _NUMBER.itemsize
    number = int(np.frombuffer(value[-size:], _NUMBER).max()) if len(value) >= size else -1
    return number if number <= _MAX_NUMBER else -1
