"""A group of which only this process exists, to compile for: what it compiles, the real group can run.

The program of a group is bound to the ids of its devices, and those depend on the places of its processes only (see
``swift.elastic.jax_group``). When a backend of several processes starts, each leaves word of its devices with the
coordination service, and the first gathers them. Here one process takes all the places, one after the other, to leave
that word, and stays at the first.

JAX can compile for devices that are not there (``jax.experimental.topologies``), on TPU and GPU and not yet on CPU.
"""

from pathlib import Path
from types import TracebackType
from typing import Self

import jax
from jax.extend.backend import clear_backends

from swift.elastic.jax_group import CoordinationService, Link
from swift.errors import RunError

_TIMEOUT = "jax_cpu_get_global_topology_timeout_minutes"
_WORDS = "cpu:local_topology/"


class CompileOnlyGroup(Link):
    """A group that can be compiled for; a context manager. One follows the other, in a process without another link.

    Nothing can be run over its devices: the collectives would wait for ever. Arrays can be put on this process's own.

    Args:
        num_processes: of the group, each with as many devices as this process (``jax_num_cpu_devices``).
        sockets: a directory that only its owner may enter.

    Raises:
        RunError: this JAX forms its groups in another way.
    """

    def __init__(self, num_processes: int, sockets: Path):
        self._service = CoordinationService(1, sockets)
        try:
            super().__init__(self._service.address, 0, num_processes)
            self.join()
        except RuntimeError as error:
            unlike = f"jax {jax.__version__} does not form groups in a way that one process can rehearse"
            raise RunError(f"{unlike}: {error}") from error

    def _make_backend(self) -> None:
        try:
            self._leave_words()
        except AttributeError as error:
            raise RuntimeError(f"it has other names: {error}") from error
        self._take_place(0)
        num_devices = self._num_processes * jax.local_device_count()
        if len({device.id for device in jax.devices()}) != num_devices or jax.process_index() != 0:
            raise RuntimeError(f"{num_devices} devices expected, there are {jax.devices()}")

    def _leave_words(self) -> None:
        """In the place of each process but the first, which would wait for minutes for a word that is not there."""
        config = jax.config
        usual = getattr(config, _TIMEOUT)
        config.update(_TIMEOUT, 0)  # the others are not to wait for the first
        try:
            for other in range(1, self._num_processes):
                self._take_place(other)
                _start_backend()
        finally:
            config.update(_TIMEOUT, usual)
        words = len(self._client.key_value_dir_get_bytes(_WORDS))
        if words != self._num_processes - 1:
            raise RuntimeError(f"{words} of {self._num_processes - 1} processes left word of their devices")

    def leave(self) -> None:
        """Drops the devices; programs that were compiled for them are of no use here after."""
        super().leave()
        self._service.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.leave()


def _start_backend() -> None:
    """As far as it gets without the first process."""
    try:
        jax.devices()
    except RuntimeError:
        return
    finally:
        clear_backends()
    raise RuntimeError("a process does not wait for the first")
