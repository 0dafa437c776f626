"""An elastic run's machines, the platform of its processes, and the command lines that start them.

The supervisor must not create a backend on accelerators, which would take the devices from the workers. It starts
another process to determine which devices JAX can use.
"""

import ipaddress
import socket
import sys
from argparse import Namespace
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from swift.cli.node_options import listening_address, node_count, own_node
from swift.config.experiment import Experiment
from swift.deadlines import Deadlines
from swift.elastic.accelerators import Accelerator, MemberDevices
from swift.elastic.device_probe import JaxAnswer, ask_jax, tpu_chips
from swift.elastic.membership.messages import Member, Process
from swift.elastic.membership.status import Recovery
from swift.elastic.state.run_files import RunFiles
from swift.elastic.transport.children import MEMORY, Children, LocalChildren
from swift.elastic.transport.connections import Rendezvous, check_network
from swift.elastic.transport.nodes import MultiNodeChildren
from swift.errors import SettingError
from swift.mesh.process_group import LOOPBACK
from swift.typed import SourceText

_BACKLOG = 1024
"""``backlog`` of the listening socket: the number of connections that may wait to be accepted."""
_SILENCE = 3.0
"""Number of heartbeat limits of silence after which other nodes give up the first node, which allows them only one."""

_SEE = "see swift doctor --host"
_CONNECTING_S, _DYING_S = 150.0, 60.0
"""Time limits on accelerators: creating the backends, and terminating a process, take less than this."""


@dataclass(frozen=True)
class Nodes:
    """The machines of a run.

    Attributes:
        count: number of machines.
        own_node: 0-based index of this machine. Node 0 runs the supervisor and the shared services.
        host: address at which node 0 listens; other nodes find it through the run directory.
        port: port at which node 0 listens, or 0 for any free port.
    """

    count: int = 1
    own_node: int = 0
    host: str = LOOPBACK
    port: int = 0

    def node_of(self, index: int, num_processes: int) -> int:
        """Returns the node of a process. Consecutive processes share a node, which keeps pipelines together.

        >>> [Nodes(count=2).node_of(index, 6) for index in range(6)]
        [0, 0, 0, 1, 1, 1]
        """
        return index * self.count // num_processes

    def own_of(self, processes: Sequence[Process]) -> list[Process]:
        """Returns the processes that run on this machine, given all processes of the run."""
        return [
            process for index, process in enumerate(processes) if self.node_of(index, len(processes)) == self.own_node
        ]

    def position_of(self, index: int, num_processes: int) -> int:
        """Returns how many processes come before this one on the same node.

        >>> [Nodes(count=2).position_of(index, 6) for index in range(6)]
        [0, 1, 2, 0, 1, 2]
        """
        node = self.node_of(index, num_processes)
        return sum(self.node_of(before, num_processes) == node for before in range(index))


def nodes_of(options: Namespace, environment: Mapping[str, str]) -> Nodes:
    """Returns the nodes of a run from the command line, or else from Slurm or Kubernetes.

    Args:
        options: options ``nodes``, ``node``, ``listen``, ``insecure_network``, ``processes`` and ``run_dir``.
        environment: environment variables, in which ``srun`` or an indexed Kubernetes job gives this node's index.

    Raises:
        SettingError: options are missing or contradict each other, or the network is not declared trusted.
    """
    count = node_count(options, environment)
    if count > options.processes:
        raise SettingError("--nodes (or srun's tasks)", count, f"must be at most --processes = {options.processes}")
    if count == 1:
        return Nodes()
    if options.run_dir is None:
        raise SettingError("--run-dir", SourceText("(not set)"), "several nodes need a directory that all of them see")
    node = own_node(options, environment, count)
    if node > 0:
        return Nodes(count, node)
    host, port = listening_address(options.listen)
    check_network(host, is_trusted=options.insecure_network)
    if options.listen is None and ipaddress.ip_address(host).is_loopback:
        allowed = f"this machine's name stands for {host}, which no other can reach; see /etc/hosts, or say where"
        raise SettingError("--listen", SourceText("(not set)"), allowed)
    return Nodes(count, node, host, port)


@dataclass(frozen=True, kw_only=True)
class ProcessCommands:
    """The command lines that start a run's processes, and the node of each process.

    Attributes:
        scratch: files that the processes share.
        processes: all processes of the run.
        nodes: machines of the run.
        by_rank: whether each expert rank is a process of its own, rather than each worker.
        memory_checkpoint_every: iterations between in-memory copies of the state for restarted processes; 0 for none.
        forming_s: the run's ``Deadlines.forming``, in seconds.
        platform: type of accelerator, or None if processes compute on CPUs.
        devices_per_process: number of devices of each process.
        init_from: directory of a run or model that provides the initial weights, or None for random weights.
        init_config: gin file with the user's own classes that the run or model in ``init_from`` needs, or None if this
            run's file defines them.
    """

    scratch: RunFiles
    processes: Sequence[Process]
    nodes: Nodes
    by_rank: bool
    memory_checkpoint_every: int
    forming_s: float
    platform: Accelerator | None = None
    devices_per_process: int = 1
    init_from: Path | None = None
    init_config: Path | None = None

    def node(self, child: Hashable) -> int:
        """Returns the node for a process or one of its incarnations; 0 for services, which run on the first node."""
        process = child.process if isinstance(child, Member) else child
        if process not in self.processes:
            return 0
        return self.nodes.node_of(self.processes.index(process), len(self.processes))

    def worker(self, process: Process) -> list[str]:
        """Returns the command line that starts a worker process."""
        options = [f"--memory-checkpoint-every={self.memory_checkpoint_every}", f"--forming={self.forming_s}"]
        if self.platform is not None:
            position = self.nodes.position_of(self.processes.index(process), len(self.processes))
            numbers = MemberDevices.at(self.platform, position, self.devices_per_process).numbers
            options += [f"--platform={self.platform}", *(f"--device={number}" for number in numbers)]
        return self._command("worker", *options, *map(str, (*process.worker, process.rank)))

    def checkpoint_service(self, run_dir: Path) -> list[str]:
        """Returns the command line that starts the checkpoint service."""
        named = {"--init-from": self.init_from, "--init-config": self.init_config}
        origin = [f"{option}={path}" for option, path in named.items() if path is not None]
        return self._command("checkpoint-service", *origin, str(run_dir))

    def compile_service(self) -> list[str]:
        """Returns the command line that starts the compile service."""
        return self._command("compile-service")

    def _command(self, name: str, *more: str) -> list[str]:
        arguments = [str(self.scratch.path), MEMORY, *["--by-rank"] * self.by_rank]
        return [sys.executable, "-m", "swift", name, *arguments, *more]


class NodeListener:
    """The socket on which the first node accepts connections from the others; a single-node run has none.

    Args:
        nodes: nodes of the run.
        listener: listening socket, or None on a single node.
    """

    def __init__(self, nodes: Nodes, listener: socket.socket | None):
        self._nodes, self._listener = nodes, listener

    @classmethod
    @contextmanager
    def of(cls, nodes: Nodes) -> Iterator[Self]:
        """Opens the socket for the duration of the ``with`` block; raises SettingError if that fails."""
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
        """Yields the object that starts and terminates processes on all nodes; on exit, terminates all processes.

        Args:
            run_dir: run directory, through which the other nodes find this one.
            scratch: files that all processes share.
            node_of: returns the index of a process's node.
            deadlines: time limits of the run.
            environment: environment variables for processes on this node.
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


@dataclass(frozen=True)
class Platform:
    """The devices that a run computes on, with the options that depend on them.

    Attributes:
        accelerator: type of accelerator, or None if processes compute on CPUs.
        recovery: how the run recovers after a process dies, ``live`` or ``restart``.
        prepare: whether programs are compiled in advance: ``next`` or ``none``.
    """

    accelerator: Accelerator | None
    recovery: Recovery
    prepare: Literal["none", "next"]

    @classmethod
    def of(
        cls,
        name: Literal["cpu", "gpu", "tpu"],
        experiment: Experiment,
        recovery: Recovery | None,
        prepare: Literal["none", "next"] | None,
    ) -> Self:
        """Returns the platform of a run, with platform-specific defaults for options that are not set.

        Args:
            name: value of ``--platform``.
            experiment: settings of the run.
            recovery: value of ``--recovery``, or None if not set.
            prepare: value of ``--prepare``, or None if not set.

        Raises:
            SettingError: the platform does not support the experiment or an option.
        """
        if name == "cpu":
            if experiment.ranks != "emulated":
                allowed = "must be 'emulated' with --platform cpu; --platform gpu or tpu trains on accelerators"
                raise SettingError("Experiment.ranks", experiment.ranks, allowed)
            return cls(None, recovery or "live", prepare or "next")
        if experiment.ranks == "virtual":
            allowed = f"are ranks of one device; with --platform {name} each has a device of its own"
            raise SettingError("Experiment.ranks", "virtual", allowed)
        if recovery == "live":
            allowed = f"must be 'restart' with --platform {name}: a group of accelerators cannot be mended in place"
            raise SettingError("--recovery", "live", allowed)
        if prepare == "next":
            allowed = f"must be 'none' with --platform {name}: all accelerators belong to the processes that train"
            raise SettingError("--prepare", "next", allowed)
        if experiment.adapt != "reroute":
            allowed = f"must be 'reroute' with --platform {name}: blocks move only between processes that continue"
            raise SettingError("Experiment.adapt", experiment.adapt, allowed)
        return cls(name, "restart", "none")

    @property
    def deadlines(self) -> Deadlines:
        """Default time limits; longer on accelerators, whose drivers are slow to open and release devices."""
        return Deadlines() if self.accelerator is None else Deadlines(forming=_CONNECTING_S, dying=_DYING_S)

    def environment(self, user_environment: Mapping[str, str], num_nodes: int) -> dict[str, str]:
        """Returns the environment for processes; on a single node, NCCL uses the loopback interface by default.

        Args:
            user_environment: the user's environment variables, which take precedence.
            num_nodes: number of nodes of the run.
        """
        defaults = {"NCCL_SOCKET_IFNAME": "lo"} if self.accelerator == "gpu" and num_nodes == 1 else {}
        return defaults | dict(user_environment)

    def check_node(
        self,
        num_here: int,
        devices_per_process: int,
        ask: Callable[[], JaxAnswer] = ask_jax,
        chips: Callable[[], tuple[str, ...]] = tpu_chips,
    ) -> None:
        """Raises SettingError if this node does not have the devices that its processes need.

        Args:
            num_here: number of processes on this node.
            devices_per_process: number of devices of each process.
            ask: starts JAX in another process and describes its devices.
            chips: lists the TPU chips of this node. It does not use JAX, which would wait for the slice's other hosts.
        """
        if self.accelerator == "tpu":
            if num_here != 1:
                allowed = f"needs a process for each host, which holds all its chips; here are {num_here}: see --nodes"
                raise SettingError("--platform", "tpu", allowed)
            num_chips = len(chips())
            if not num_chips:
                raise SettingError("--platform", "tpu", f"needs TPU chips, and there are none: {_SEE}")
            if devices_per_process not in (num_chips, 2 * num_chips):  # chips of TPU v2 and v3 are two devices
                allowed = (
                    f"needs as many expert ranks a process as its host has devices, and {num_chips} chips are here"
                )
                raise SettingError("Topology.num_expert_ranks", devices_per_process, allowed)
        if self.accelerator == "gpu":
            answer = ask()
            if answer.platform != "gpu":
                has = f"uses the {answer.platform}" if answer.platform else f"does not start ({answer.error})"
                raise SettingError("--platform", "gpu", f"needs GPUs, and JAX {has} there: {_SEE}")
            if answer.count < num_here * devices_per_process:
                needs = f"needs {num_here * devices_per_process} on this machine, one for each expert rank"
                allowed = f"{needs}, and JAX has {answer.count} x {answer.kind} there"
                raise SettingError("--platform", "gpu", allowed)
