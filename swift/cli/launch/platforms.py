"""The platform of a run of processes, and what its options have to be there.

On accelerators the supervisor makes no backend, which would hold the devices: a process of its own asks JAX.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Self

from swift.deadlines import Deadlines
from swift.elastic.accelerators import Accelerator
from swift.elastic.membership.run_status import Recovery
from swift.errors import SettingError
from swift.tools.doctor.devices import JaxAnswer, ask_jax, tpu_chips
from swift.train.settings.experiment import Experiment

_SEE = "see swift doctor --host"
_CONNECTING_S, _DYING_S = 150.0, 60.0
"""Above what it takes until all processes have their backends, and what a driver takes to end a process."""


@dataclass(frozen=True)
class Platform:
    """The platform of a run, with the options that depend on it.

    Attributes:
        accelerator: kind of accelerators; None: the processes compute on CPUs.
        recovery: how the run recovers from a death.
        prepare: whether programs are prepared: ``next`` or ``none``.
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
        """Makes the platform of a run.

        Args:
            name: value of ``--platform``.
            experiment: settings of the run.
            recovery: value of ``--recovery``; None: not set.
            prepare: value of ``--prepare``; None: not set.

        Raises:
            SettingError: the run needs something that the platform does not have.
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
        if experiment.move_rule is not None:
            allowed = f"must be 'reroute' with --platform {name}: blocks move only between processes that continue"
            raise SettingError("Experiment.adapt", experiment.adapt, allowed)
        return cls(name, "restart", "none")

    @property
    def deadlines(self) -> Deadlines:
        """Time limits that a command line may change; accelerators take longer to be taken and to be given back."""
        return Deadlines() if self.accelerator is None else Deadlines(forming=_CONNECTING_S, dying=_DYING_S)

    def environment(self, of_user: Mapping[str, str], num_nodes: int) -> dict[str, str]:
        """Returns the environment of processes: NCCL uses the loopback device on one node unless told otherwise."""
        own = {"NCCL_SOCKET_IFNAME": "lo"} if self.accelerator == "gpu" and num_nodes == 1 else {}
        return own | dict(of_user)

    def check_node(
        self,
        num_here: int,
        devices_per_process: int,
        ask: Callable[[], JaxAnswer] = ask_jax,
        chips: Callable[[], tuple[str, ...]] = tpu_chips,
    ) -> None:
        """Raises SettingError if this node does not have the devices of its processes.

        Args:
            num_here: number of processes on this node.
            devices_per_process: number of devices that each of them holds.
            ask: function that asks JAX, in another process.
            chips: function that finds the TPU chips of this node. JAX would wait for the other hosts of the slice.
        """
        if self.accelerator == "tpu":
            if num_here != 1:
                allowed = f"needs a process for each host, which holds all its chips; here are {num_here}: see --nodes"
                raise SettingError("--platform", "tpu", allowed)
            there = len(chips())
            if not there:
                raise SettingError("--platform", "tpu", f"needs TPU chips, and there are none: {_SEE}")
            if devices_per_process not in (there, 2 * there):  # chips of TPU v2 and v3 are two devices
                allowed = f"needs as many expert ranks a process as its host has devices, and {there} chips are here"
                raise SettingError("Topology.num_expert_ranks", devices_per_process, allowed)
        if self.accelerator == "gpu":
            found = ask()
            if found.platform != "gpu":
                has = f"uses the {found.platform}" if found.platform else f"does not start ({found.error})"
                raise SettingError("--platform", "gpu", f"needs GPUs, and JAX {has} there: {_SEE}")
            if found.count < num_here * devices_per_process:
                needs = f"needs {num_here * devices_per_process} on this machine, one for each expert rank"
                allowed = f"{needs}, and JAX has {found.count} x {found.kind} there"
                raise SettingError("--platform", "gpu", allowed)
