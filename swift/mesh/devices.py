"""Emulated CPU devices, the vendors' figures for chips, and the memory that compiled programs need.

Emulated devices are CPU devices of one process, so that every parallel program runs on a laptop. The performance of
chips is taken from their vendors; for this host's CPU, the speed of matmuls is measured. Compiled programs are cached
on disk, so that the next run, or a restart, need not compile them again. They also report the memory that they need.

Sources: Google's pages on the TPU system architecture (cloud.google.com/tpu/docs), and NVIDIA's data sheets for H100
and H200 (SXM, PCIe, NVL) and for B200. The memory of a TPU chip is the amount that its compiler allows a program to
use.
"""

import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.stages import Compiled
from jax.typing import DTypeLike

from swift.machine import cores_allowed, cores_limit
from swift.variables import cache_directory

# Emulated devices share the host's cores, so a thread may wait long for its turn in a collective; XLA's default
# time-outs (20 s and 40 s) would abort the process.
PATIENCE_FLAGS = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
)

_GB, _GIB = 10**9, 2**30
_MATMUL_DIM, _MATMULS = 1024, 5
"""Size of each dimension, and number of repetitions, of the matmul that measures a host's speed."""
_KINDS = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
}
"""Chip generations by ``jax.Device.device_kind``, for a GPU the product name; the GPUs listed are SXM modules."""
_MAX_BYTES = 4 * _GIB
"""Size limit of the compilation cache, in bytes."""
_LEAST_S = 0.2
"""Minimum compile time of a program to be cached, in seconds; JAX's default, 1 s, would exclude much of a small run."""


class EmulationError(RuntimeError):
    """Emulated devices were requested after JAX had started with fewer."""


def emulate_devices(num_devices: int) -> None:
    """Makes JAX run on ``num_devices`` emulated CPU devices; call this function before any other use of JAX.

    Later calls for no more devices than the first do nothing.

    Args:
        num_devices: minimum number of devices that ``jax.devices()`` will list.

    Raises:
        EmulationError: JAX has already started, on another platform or with fewer devices.
    """
    present = os.environ.get("XLA_FLAGS", "")
    added = [flag for flag in PATIENCE_FLAGS if flag.split("=")[0] not in present]
    os.environ["XLA_FLAGS"] = " ".join([present, *added]).strip()
    try:
        jax.config.update("jax_num_cpu_devices", max(num_devices, _devices_set()))
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError:
        devices = jax.devices()
        if devices[0].platform != "cpu" or len(devices) < num_devices:
            raise EmulationError(
                f"cannot emulate {num_devices} devices: JAX has already started with {len(devices)} "
                f"{devices[0].platform} device(s); call emulate_devices before anything else uses JAX"
            ) from None


def _devices_set() -> int:
    return jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Chip:
    """Capabilities of one device.

    Attributes:
        platform: platform name, as in ``jax.Device.platform``.
        memory_bytes: memory available to programs; None if unknown.
        peak_flops: peak floating-point operations per second, by compute dtype; None if unknown.
        memory_bandwidth: memory bandwidth, bytes/s.
        link_bandwidth: bandwidth in each direction of a TPU link, or between a GPU and its host's switch, bytes/s.
        network_bandwidth: bandwidth in each direction between a GPU and other hosts, bytes/s.
        num_dims: number of dimensions of the torus or mesh that TPU chips form.
        closes_from: number of chips; a torus dimension is a ring if its size is a multiple of this number, otherwise a
            line.
    """

    platform: str
    memory_bytes: int | None = None
    peak_flops: Mapping[str, float] | None = None
    memory_bandwidth: float | None = None
    link_bandwidth: float | None = None
    network_bandwidth: float | None = None
    num_dims: int = 0
    closes_from: int = 0


def _tpu(memory_gib: float, peak: float, memory: float, link: float, num_dims: int, closes_from: int) -> Chip:
    # float32 matmuls run in bfloat16 unless another precision is requested.
    flops = {"bfloat16": peak, "float32": peak}
    return Chip("tpu", int(memory_gib * _GIB), flops, memory * _GB, link * _GB, None, num_dims, closes_from)


def _gpu_flops(bfloat16: float, tfloat32: float, float64: float) -> dict[str, float]:
    return {"bfloat16": bfloat16, "float32": tfloat32, "float64": float64}


def _gpu(memory_gb: float, flops: Mapping[str, float], memory: float, link: float) -> Chip:
    return Chip("gpu", int(memory_gb * _GB), flops, memory * _GB, link * _GB, network_bandwidth=50 * _GB)


CHIPS: Mapping[str, Chip] = {
    "v5e": _tpu(15.75, 197e12, 819, 45, 2, 16),
    "v5p": _tpu(95.74, 459e12, 2765, 90, 3, 4),
    "v6e": _tpu(31.25, 918e12, 1640, 90, 2, 16),
    "h100": _gpu(80, _gpu_flops(989e12, 494e12, 67e12), 3350, 450),
    "h200": _gpu(141, _gpu_flops(989e12, 494e12, 67e12), 4800, 450),
    "b200": _gpu(180, _gpu_flops(2250e12, 1125e12, 37e12), 8000, 900),
    "cpu": Chip("cpu"),
}
"""Chips by generation."""
_CARDS = {
    "NVIDIA H100 PCIe": _gpu_flops(756e12, 378e12, 51e12),
    "NVIDIA H100 NVL": _gpu_flops(835e12, 417e12, 60e12),
    "NVIDIA H200 NVL": _gpu_flops(835e12, 417e12, 60e12),
}
"""Peak operations per second of the slower PCIe and NVL cards of these generations, by ``jax.Device.device_kind``."""


def peak_flops(device: jax.Device, dtype: DTypeLike) -> float | None:
    """Returns a device's peak floating-point operations per second by its vendor's figures, or None if unknown.

    It is unknown for other products with a known chip, and for partitions of a GPU (MIG).

    Args:
        device: device that runs the matmuls.
        dtype: dtype of the matmuls.
    """
    kind = device.device_kind
    flops = CHIPS[_KINDS[kind]].peak_flops if kind in _KINDS else _CARDS.get(kind)
    return (flops or {}).get(jnp.dtype(dtype).name)


def host_matmul_flops(dtype: DTypeLike) -> float:
    """Measures a matmul's operations per second on all this host's CPU cores; returns the best of several runs.

    This takes about 0.1 s. Other programs lengthen the matmul's wall time but hardly its CPU time. So the result is the
    higher of two rates, by wall time and by CPU time divided by the number of cores. Call this function before programs
    are compiled in the background, since their CPU time would be attributed to the matmul.

    Args:
        dtype: dtype of the matmul.
    """
    with jax.default_device(jax.devices("cpu")[0]):
        a = jnp.ones((_MATMUL_DIM, _MATMUL_DIM), dtype)
        multiply = jax.jit(jnp.matmul).lower(a, a).compile()
        cores, best_s = min(cores_allowed(), cores_limit() or math.inf), math.inf
        for _ in range(_MATMULS):
            start_s, used = time.perf_counter(), time.process_time()
            jax.block_until_ready(multiply(a, a))
            best_s = min(best_s, time.perf_counter() - start_s, (time.process_time() - used) / cores)
    return 2 * _MATMUL_DIM**3 / best_s


def enable_compilation_cache() -> None:
    """Caches compiled programs in the user's cache directory, unless JAX already has a cache directory configured.

    Cached programs are executed, so only the user may open the directory, by default ``~/.cache/swift/programs``. A
    user without a home directory has no cache.
    """
    cache = cache_directory()
    if jax.config.jax_compilation_cache_dir is not None or cache is None:  # type: ignore[attr-defined]
        return
    directory = cache / "programs"
    with suppress(OSError):  # if it cannot be created, JAX runs without the cache
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o700)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_compilation_cache_max_size", _MAX_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _LEAST_S)


@dataclass(frozen=True)
class ProgramMemory:
    """Bytes that a program needs on a device; results that reuse the buffers of arguments count once.

    Attributes:
        arguments: bytes of the arguments, such as the state.
        results: bytes of results that do not reuse arguments.
        temporary: bytes of temporary buffers while the program runs.
        code: bytes of the program itself.
        host: bytes of arguments, results and temporary buffers in host memory, which the other attributes exclude.
    """

    arguments: int
    results: int
    temporary: int
    code: int
    host: tuple[int, int, int] = (0, 0, 0)

    @classmethod
    def of(cls, compiled: Compiled) -> Self | None:
        """Reads the compiler's memory analysis of a program; returns None if the compiler provides none."""
        stats: Any = compiled.memory_analysis()
        if stats is None:
            return None
        return cls(
            stats.argument_size_in_bytes,
            stats.output_size_in_bytes - stats.alias_size_in_bytes,
            stats.temp_size_in_bytes,
            stats.generated_code_size_in_bytes,
            (
                stats.host_argument_size_in_bytes,
                stats.host_output_size_in_bytes - stats.host_alias_size_in_bytes,
                stats.host_temp_size_in_bytes,
            ),
        )

    @property
    def needed(self) -> int:
        """Total bytes of device memory."""
        return self.arguments + self.results + self.temporary + self.code
