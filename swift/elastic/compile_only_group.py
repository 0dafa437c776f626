"""A group of which only this process exists: the real group can run what it compiles.

The program of a group is bound to the ids of its devices, which depend on the indices of its processes only (see
``swift.elastic.jax_group``). When a backend of several processes starts, each process publishes its devices at the
coordination service, and the first one collects them. Here one process publishes devices as each of the processes in
turn, and continues as the first.

JAX can compile for devices that do not exist (``jax.experimental.topologies``), on TPU and GPU and not yet on CPU.
"""

from pathlib import Path
from typing import Self

import jax
from jax.extend.backend import clear_backends

from swift.elastic.jax_group import CoordinationService, JaxGroup
from swift.errors import RunError

_TIMEOUT = "jax_cpu_get_global_topology_timeout_minutes"
_PUBLISHED = "cpu:local_topology/"


class CompileOnlyGroup(JaxGroup):
    """A group to compile for; a context manager. A process can have one at a time, and no other group meanwhile.

    Nothing can run on its devices: collectives would wait forever. Arrays can be put on this process's own devices.

    Args:
        num_processes: number of processes, each with as many devices as this one (``jax_num_cpu_devices``).
        sockets: directory that only its owner may enter.

    Raises:
        RunError: this version of JAX forms groups in another way.
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
        """Publishes devices as every process except the first, which would wait for minutes for missing ones."""
        config = jax.config
        usual = getattr(config, _TIMEOUT)
        config.update(_TIMEOUT, 0)  # the others must not wait for the first
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
        """Drops the devices, with the programs compiled for them."""
        super().leave()
        self._service.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


def _start_backend() -> None:
    """Starts a backend as far as that is possible without the first process."""
    try:
        jax.devices()
    except RuntimeError:
        return
    finally:
        clear_backends()
    raise RuntimeError("its processes do not wait for the first")
