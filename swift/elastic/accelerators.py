"""Process groups on GPUs or TPU chips: everything in ``swift launch`` that is specific to accelerators.

Given the client of a coordination service, JAX creates the backend of a group by itself. ``jax.distributed.initialize``
would provide that client, but it also hosts the service in one of the processes, any of which may die. The devices
communicate through the platform's own collectives. A process that waits in such a collective for a dead peer cannot be
interrupted, so each process joins only one group in its life: after a death, the supervisor kills all processes and
starts new ones (``--recovery restart``).

This module was run with one process on one GPU; otherwise, it was tested with CPU backends in place of accelerators.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np

from swift.elastic.jax_group import JaxGroup
from swift.errors import RunError

Accelerator = Literal["gpu", "tpu"]
"""Platform of the devices, as ``jax.default_backend`` names it."""
_BACKENDS = {"gpu": "cuda", "tpu": "tpu"}
"""Name of the backend in ``jax_platforms``; "gpu" would also request other vendors' backends, and fail."""
_DEATHS_FOUND_S = 30
"""Seconds within which the supervisor detects the death of a process. This includes the cleanup of the driver, which
takes several seconds."""
_INDEX = "swift/process_index/{}"


@dataclass(frozen=True)
class MemberDevices:
    """The accelerators of one member.

    Attributes:
        platform: ``gpu`` or ``tpu``.
        numbers: device numbers, among the devices that are visible on the node (``CUDA_VISIBLE_DEVICES`` may hide
            some). On TPU, a process holds all chips of its host, and only the count matters.
    """

    platform: Accelerator
    numbers: tuple[int, ...]

    @classmethod
    def at(cls, platform: Accelerator, position: int, count: int) -> "MemberDevices":
        """Returns the devices of a member from its position on the node, where each member has ``count`` devices.

        >>> MemberDevices.at("gpu", 2, 2)
        MemberDevices(platform='gpu', numbers=(4, 5))
        """
        return cls(platform, tuple(range(position * count, (position + 1) * count)))

    def configure(self) -> None:
        """Configures JAX to create its next backend on these devices."""
        jax.config.update("jax_platforms", _BACKENDS[self.platform])
        if self.platform == "gpu":  # as ``jax.distributed.initialize(local_device_ids=...)`` does
            jax.config.update("jax_cuda_visible_devices", ",".join(map(str, self.numbers)))


def await_deaths(error: Exception) -> None:
    """Waits before a runtime error ends this process, long enough for the supervisor to detect the death of a peer.

    Collectives report the death of a peer as an error. If a peer has died, the supervisor restarts all processes: it
    kills this one while it waits, and does not blame it. Otherwise, this process itself caused the error.
    """
    if isinstance(error, jax.errors.JaxRuntimeError):
        time.sleep(_DEATHS_FOUND_S)


class AcceleratorGroup(JaxGroup):
    """A process group on accelerators, as seen by one process, which joins once and never leaves.

    Args:
        devices: devices of this process.
        address: address of the generation's coordination service.
        index: index of this process, from 0.
        num_processes: number of processes in the generation.
        timeout_s: time limit for all processes to connect and to create their backends, in seconds.
    """

    def __init__(self, devices: MemberDevices, address: str, index: int, num_processes: int, timeout_s: int):
        super().__init__(address, index, num_processes, timeout_s)
        self._devices = devices
        self._process_indices: Sequence[int] = ()

    def join(self) -> None:
        """Connects to the other processes and creates the backend; must be called only once.

        Raises:
            RuntimeError: not all processes connected in time, or the devices cannot be used. Either ends the process,
                and the death counts, since a new generation would fail in the same way.
            RunError: the number of devices or of connected processes is not what the run needs.
        """
        self._client.connect()
        self._make_backend()

    def _make_backend(self) -> None:
        self._devices.configure()
        self._take_place(self._index)
        num_local, num_needed = jax.local_device_count(), len(self._devices.numbers)
        if num_local != num_needed:
            raise RunError(f"this process has {num_local} devices, and needs {num_needed}: one for each expert rank")
        # On TPU the hardware numbers the processes, so JAX's process index may differ from the index in the generation.
        self._client.key_value_set(_INDEX.format(self._index), str(jax.process_index()))
        keys = [_INDEX.format(other) for other in range(self._num_processes)]
        self._process_indices = [int(self._client.blocking_key_value_get(key, 1000 * self._timeout_s)) for key in keys]
        if sorted(self._process_indices) != list(range(jax.process_count())):
            connected = f"devices of {jax.process_count()} processes are connected"
            raise RunError(f"{connected}, and those of {self._num_processes} form a generation")

    def grid(self, num_ranks: int) -> np.ndarray:
        """Returns the group's devices ``[rows, num_ranks]``, ordered by the index of the process."""
        index_of = {process_index: index for index, process_index in enumerate(self._process_indices)}
        devices = sorted(jax.devices(), key=lambda device: (index_of[device.process_index], device.id))
        return np.array(devices).reshape(-1, num_ranks)

    def abort(self) -> None:
        """Does nothing, since only the end of the process can end a wait in an accelerator's collective."""
