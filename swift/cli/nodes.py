"""The machines of a run: how many there are, which of them this is, and where the first is found."""

import ipaddress
import os
import socket
from argparse import Namespace
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from swift.cli.kinds import Written
from swift.errors import SettingError, check_count
from swift.launch.children import Children, OwnChildren
from swift.launch.fleet import Fleet
from swift.launch.meeting import Meeting, unreachable
from swift.mesh.distributed import LOOPBACK
from swift.mesh.epochs import Deadlines

_SILENCE = 3.0
"""So many heartbeats after it was last heard the first node is given up by the others: longer than the other way."""


@dataclass(frozen=True)
class Nodes:
    """The machines of a run.

    Attributes:
        count: of all.
        own: which this is, from 0; the first decides, and hosts what all need.
        host: where the first listens; the others find it by its run directory.
        port: on which it does; 0: any.
    """

    count: int = 1
    own: int = 0
    host: str = LOOPBACK
    port: int = 0

    def place(self, index: int, num_processes: int) -> int:
        """The node of a process; each has neighbours in the order of the processes, so pipelines stay together.

        >>> [Nodes(count=2).place(index, 6) for index in range(6)]
        [0, 0, 0, 1, 1, 1]
        """
        return index * self.count // num_processes


def nodes_of(options: Namespace, environment: Mapping[str, str]) -> Nodes:
    """What the command line says of nodes, and where it says nothing, Slurm or Kubernetes.

    Args:
        options: ``nodes``, ``node``, ``listen``, ``insecure_network``, ``processes``, ``run_dir``.
        environment: ``srun`` numbers its tasks there, an indexed job of Kubernetes its pods.

    Raises:
        SettingError: they do not fit together, or the network would be used without leave.
    """
    tasks = environment.get("SLURM_STEP_NUM_TASKS")
    count = options.nodes if options.nodes is not None else int(tasks or 1)
    check_count("--nodes", count, least=1)
    if count > options.processes:
        raise SettingError("--nodes", count, f"must be at most --processes = {options.processes}")
    if count == 1:
        for name in ("node", "listen"):
            if getattr(options, name):
                raise SettingError(f"--{name}", getattr(options, name), "is for several --nodes")
        return Nodes()
    if options.run_dir is None:
        raise SettingError("--run-dir", Written("(not set)"), "several nodes need a directory that all of them see")
    index = environment.get("SLURM_PROCID" if tasks else "JOB_COMPLETION_INDEX")
    own = options.node if options.node is not None else int(index) if index else None
    if own is None or not 0 <= own < count:
        raise SettingError("--node", Written("(not set)") if own is None else own, f"must be from 0 to {count - 1}")
    if own > 0:
        return Nodes(count, own)
    host, port = _listen(options.listen)
    if not ipaddress.ip_address(host).is_loopback and not options.insecure_network:
        allowed = "is a network, on which nothing is encrypted; add --insecure-network where that can be trusted"
        raise SettingError("--listen", host, allowed)
    reason = unreachable(host)
    if reason is not None:
        raise SettingError("--listen", host, reason)
    return Nodes(count, own, host, port)


class Entrance:
    """Where the other nodes come in; a context manager. One node has none.

    Args:
        nodes: of the run.
        listener: on which they call.
    """

    def __init__(self, nodes: Nodes, listener: socket.socket | None):
        self._nodes, self._listener = nodes, listener

    @classmethod
    @contextmanager
    def of(cls, nodes: Nodes) -> Iterator[Self]:
        """Opens it; raises SettingError where that cannot be."""
        if nodes.count == 1:
            yield cls(nodes, None)
            return
        try:
            listener = socket.create_server((nodes.host, nodes.port))
        except OSError as error:
            where = f"{nodes.host}:{nodes.port}"
            raise SettingError("--listen", where, f"cannot be listened at: {error.strerror}") from error
        with listener:
            yield cls(nodes, listener)

    @contextmanager
    def children(
        self, run_dir: Path, scratch: Path, node_of: Callable[[Hashable], int], deadlines: Deadlines
    ) -> Iterator[Children]:
        """The children of the run, on all its nodes, which have to come first.

        Args:
            run_dir: the run directory, in which the others look for this node.
            scratch: what all processes share.
            node_of: where a child has its place.
            deadlines: of the run.
        """
        if self._listener is None:
            with OwnChildren(os.environ) as children:
                yield children
            return
        meeting = Meeting.of(self._listener, scratch, _SILENCE * deadlines.heartbeat)
        fleet = Fleet(os.environ, node_of, self._nodes.count, self._listener, meeting.key, deadlines.heartbeat)
        with fleet:
            meeting.announce(run_dir)
            try:
                yield fleet
            finally:
                Meeting.close(run_dir)


def _listen(text: str | None) -> tuple[str, int]:
    host, _, port = (text or socket.gethostname()).partition(":")
    if port and not (port.isdecimal() and int(port) < 2**16):
        raise SettingError("--listen", text, "must be HOST or HOST:PORT, with a port below 65536")
    try:
        return socket.gethostbyname(host), int(port or 0)
    except OSError as error:
        raise SettingError("--listen", host, f"is no host that is known here: {error.strerror}") from error
