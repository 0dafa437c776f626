"""Groups of processes that hold GPUs or TPU chips: everything of ``swift launch`` that is particular to them.

JAX makes such a backend by itself once it has a client of a coordination service, which is what
``jax.distributed.initialize`` gives it; that would also host the service in one of the processes, any of which may die.
The platform's own collectives connect the devices. A process that waits in them for a dead one cannot be freed, so a
process joins one group in its life: after a death the supervisor kills all, and others take their places (``--recovery
restart``).

It was run with one process on one GPU, otherwise with CPU backends in place of accelerators.
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
"""Kind of devices, as ``jax.default_backend`` names it."""
_BACKENDS = {"gpu": "cuda", "tpu": "tpu"}
"""Name of the backend in ``jax_platforms``; "gpu" would also ask for the backends of other makers, and fail."""
_DEATHS_FOUND_S = 30
"""Seconds in which the death of a process is found, including its driver's end of it, which takes seconds, too."""
_INDEX = "swift/process_index/{}"


@dataclass(frozen=True)
class MemberDevices:
    """The accelerators that a member holds.

    Attributes:
        platform: kind of devices.
        numbers: their numbers among those that processes of its node see (``CUDA_VISIBLE_DEVICES`` may hide some); on
            TPU, where a process holds all chips of its host, as many as it has devices.
    """

    platform: Accelerator
    numbers: tuple[int, ...]

    @classmethod
    def at(cls, platform: Accelerator, position: int, count: int) -> "MemberDevices":
        """Returns the devices of the member at a position on its node, of members with ``count`` devices each.

        >>> MemberDevices.at("gpu", 2, 2)
        MemberDevices(platform='gpu', numbers=(4, 5))
        """
        return cls(platform, tuple(range(position * count, (position + 1) * count)))

    def configure(self) -> None:
        """Configures JAX to make its next backend of these devices."""
        jax.config.update("jax_platforms", _BACKENDS[self.platform])
        if self.platform == "gpu":  # as ``jax.distributed.initialize(local_device_ids=...)`` does
            jax.config.update("jax_cuda_visible_devices", ",".join(map(str, self.numbers)))


def await_deaths(error: Exception) -> None:
    """Waits, before an error of the runtime ends this process, until another process's death would have been found.

    Collectives report the death of a peer as an error. The supervisor restarts all once it finds that death; so the
    process that reports it is killed here, and does not take the blame. If no other dies, the error is its own.
    """
    if isinstance(error, jax.errors.JaxRuntimeError):
        time.sleep(_DEATHS_FOUND_S)


class AcceleratorGroup(JaxGroup):
    """A group of accelerators, from the side of one of its processes, which joins it and never leaves.

    Args:
        devices: devices of this process.
        address: address of the generation's coordination service.
        index: index of this process, from 0.
        num_processes: number of processes of the generation.
        timeout_s: time limit for all of them to connect and to have their backends, in seconds.
    """

    def __init__(self, devices: MemberDevices, address: str, index: int, num_processes: int, timeout_s: int):
        super().__init__(address, index, num_processes, timeout_s)
        self._devices = devices
        self._process_indices: Sequence[int] = ()

    def join(self) -> None:
        """Connects to the others, and makes the backend; once.

        Raises:
            RuntimeError: not all have connected in time, or the devices cannot be used. Both end the process, whose
                death is counted: a new generation would fail in the same way.
            RunError: there are other devices than the run needs.
        """
        self._client.connect()
        self._make_backend()

    def _make_backend(self) -> None:
        self._devices.configure()
        self._take_place(self._index)
        num_local, num_needed = jax.local_device_count(), len(self._devices.numbers)
        if num_local != num_needed:
            raise RunError(f"this process has {num_local} devices, and needs {num_needed}: one for each expert rank")
        # On TPU the hardware numbers the processes.
        self._client.key_value_set(_INDEX.format(self._index), str(jax.process_index()))
        keys = [_INDEX.format(other) for other in range(self._num_processes)]
        self._process_indices = [int(self._client.blocking_key_value_get(key, 1000 * self._timeout_s)) for key in keys]
        if sorted(self._process_indices) != list(range(jax.process_count())):
            connected = f"devices of {jax.process_count()} processes are connected"
            raise RunError(f"{connected}, and those of {self._num_processes} form a generation")

    def grid(self, num_ranks: int) -> np.ndarray:
        """Returns the devices of the group ``[rows, num_ranks]``, in the order of the processes."""
        index_of = {process_index: index for index, process_index in enumerate(self._process_indices)}
        devices = sorted(jax.devices(), key=lambda device: (index_of[device.process_index], device.id))
        return np.array(devices).reshape(-1, num_ranks)

    def abort(self) -> None:
        """Does nothing: what waits in an accelerator's collective ends with its process."""
