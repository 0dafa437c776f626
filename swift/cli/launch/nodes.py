"""The machines of a run, and the processes of each."""

import ipaddress
import socket
import sys
from argparse import Namespace
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from swift.cli.options.kinds import Written
from swift.cli.options.nodes import listening_address, node_count, own_node
from swift.deadlines import Deadlines
from swift.elastic.accelerators import Accelerator, MemberDevices
from swift.elastic.membership.members import Member, Process
from swift.elastic.state.run_files import RunFiles
from swift.elastic.transport.child_processes import MEMORY, Children, LocalChildren
from swift.elastic.transport.multi_node_children import MultiNodeChildren
from swift.elastic.transport.rendezvous import Rendezvous, check_network
from swift.errors import SettingError
from swift.mesh.process_group import LOOPBACK

_BACKLOG = 1024
"""Connections that may wait to be accepted."""
_SILENCE = 3.0
"""Heartbeats without a sign of life after which the others give up the first node; it gives them up sooner."""


@dataclass(frozen=True)
class Nodes:
    """The machines of a run.

    Attributes:
        count: number of machines.
        own: number of this one, from 0; the first decides, and hosts shared services.
        host: address on which the first listens; the others find it through the run directory.
        port: port on which it listens; 0: any.
    """

    count: int = 1
    own: int = 0
    host: str = LOOPBACK
    port: int = 0

    def node_of(self, index: int, num_processes: int) -> int:
        """Returns the node of a process; consecutive processes share one, so that pipelines stay together.

        >>> [Nodes(count=2).node_of(index, 6) for index in range(6)]
        [0, 0, 0, 1, 1, 1]
        """
        return index * self.count // num_processes

    def own_of(self, processes: Sequence[Process]) -> list[Process]:
        """Returns those of a run's processes that are on this machine."""
        return [one for index, one in enumerate(processes) if self.node_of(index, len(processes)) == self.own]

    def position_of(self, index: int, num_processes: int) -> int:
        """Returns the number of processes before this one on its node.

        >>> [Nodes(count=2).position_of(index, 6) for index in range(6)]
        [0, 1, 2, 0, 1, 2]
        """
        own = self.node_of(index, num_processes)
        return sum(self.node_of(before, num_processes) == own for before in range(index))


def nodes_of(options: Namespace, environment: Mapping[str, str]) -> Nodes:
    """Returns the nodes given by the command line, or else by Slurm or Kubernetes.

    Args:
        options: options ``nodes``, ``node``, ``listen``, ``insecure_network``, ``processes`` and ``run_dir``.
        environment: environment variables; ``srun`` numbers its tasks there, an indexed Kubernetes job its pods.

    Raises:
        SettingError: they contradict each other, or the network would be used without permission.
    """
    count = node_count(options, environment)
    if count > options.processes:
        raise SettingError("--nodes (or srun's tasks)", count, f"must be at most --processes = {options.processes}")
    if count == 1:
        return Nodes()
    if options.run_dir is None:
        raise SettingError("--run-dir", Written("(not set)"), "several nodes need a directory that all of them see")
    own = own_node(options, environment, count)
    if own > 0:
        return Nodes(count, own)
    host, port = listening_address(options.listen)
    check_network(host, is_trusted=options.insecure_network)
    if options.listen is None and ipaddress.ip_address(host).is_loopback:
        allowed = f"this machine's name stands for {host}, which no other can reach; see /etc/hosts, or say where"
        raise SettingError("--listen", Written("(not set)"), allowed)
    return Nodes(count, own, host, port)


@dataclass(frozen=True, kw_only=True)
class ProcessCommands:
    """Commands that start the processes of a run, and the node of each.

    Attributes:
        scratch: files that the processes share.
        processes: all processes of the run.
        nodes: machines of the run.
        by_rank: whether each expert rank is a process.
        copy_every: iterations between copies of states for the incarnations that follow; 0: none are made.
        forming_s: the run's ``Deadlines.forming``, in seconds.
        platform: accelerators that the processes hold; None: they compute on CPUs.
        devices_per_process: number of devices of each process.
        init_from: directory of the run whose weights this one begins with; None: it draws its own.
        init_config: gin file that has the classes of the user's own which that run has; None: this run's has them.
    """

    scratch: RunFiles
    processes: Sequence[Process]
    nodes: Nodes
    by_rank: bool
    copy_every: int
    forming_s: float
    platform: Accelerator | None = None
    devices_per_process: int = 1
    init_from: Path | None = None
    init_config: Path | None = None

    def node(self, child: Hashable) -> int:
        """Returns the node of a process or of one of its incarnations; all others are on the first."""
        process = child.process if isinstance(child, Member) else child
        if process not in self.processes:
            return 0
        return self.nodes.node_of(self.processes.index(process), len(self.processes))

    def member(self, process: Process) -> list[str]:
        """Returns the command that starts a worker process."""
        options = [f"--copy-every={self.copy_every}", f"--forming={self.forming_s}"]
        if self.platform is not None:
            position = self.nodes.position_of(self.processes.index(process), len(self.processes))
            numbers = MemberDevices.at(self.platform, position, self.devices_per_process).numbers
            options += [f"--platform={self.platform}", *(f"--device={number}" for number in numbers)]
        return self._command("member", *options, *map(str, (*process.worker, process.rank)))

    def checkpoint_service(self, run_dir: Path) -> list[str]:
        """Returns the command that starts the checkpoint service."""
        named = {"--init-from": self.init_from, "--init-config": self.init_config}
        origin = [f"{option}={path}" for option, path in named.items() if path is not None]
        return self._command("keeper", *origin, str(run_dir))

    def compile_service(self) -> list[str]:
        """Returns the command that starts the compile service."""
        return self._command("preparer")

    def _command(self, name: str, *more: str) -> list[str]:
        own = [str(self.scratch.path), MEMORY, *["--by-rank"] * self.by_rank]
        return [sys.executable, "-m", "swift", name, *own, *more]


class Entrance:
    """The listener for the other nodes; a run on one node has none.

    Args:
        nodes: nodes of the run.
        listener: socket on which they connect; None on a single node.
    """

    def __init__(self, nodes: Nodes, listener: socket.socket | None):
        self._nodes, self._listener = nodes, listener

    @classmethod
    @contextmanager
    def of(cls, nodes: Nodes) -> Iterator[Self]:
        """Opens the listener for the block; raises SettingError if that fails."""
        if nodes.count == 1:
            yield cls(nodes, None)
            return
        try:
            listener = socket.create_server((nodes.host, nodes.port), backlog=_BACKLOG)
        except OSError as error:
            where = f"{nodes.host}:{nodes.port}"
            raise SettingError("--listen", where, f"cannot be listened on: {error.strerror}") from error
        with listener:
            yield cls(nodes, listener)

    @contextmanager
    def children(
        self,
        run_dir: Path,
        scratch: RunFiles,
        node_of: Callable[[Hashable], int],
        deadlines: Deadlines,
        environment: Mapping[str, str],
    ) -> Iterator[Children]:
        """Starts and ends processes on all nodes of the run during the block, once all nodes have joined.

        Args:
            run_dir: run directory, through which the others find this node.
            scratch: files that all processes share.
            node_of: function that returns the node of a process.
            deadlines: time limits of the run.
            environment: environment variables of processes on this node.
        """
        if self._listener is None:
            with LocalChildren(environment, scratch.memory) as children:
                yield children
            return
        rendezvous = Rendezvous.of(self._listener, scratch.path, _SILENCE * deadlines.heartbeat)

        def is_first() -> bool:
            return Rendezvous.find(run_dir) in (rendezvous, None)

        with (
            rendezvous.announced(run_dir),
            MultiNodeChildren(
                LocalChildren(environment, scratch.memory),
                node_of=node_of,
                num_nodes=self._nodes.count,
                listener=self._listener,
                key=rendezvous.key,
                is_first=is_first,
                silence_s=deadlines.heartbeat,
            ) as on_all_nodes,
        ):
            yield on_all_nodes
