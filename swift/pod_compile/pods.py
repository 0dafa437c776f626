"""Pods by name: their chips and shapes, and descriptions of their devices for which JAX can compile."""

import math
import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from swift.errors import SettingError
from swift.mesh.devices import CHIPS, Chip, emulate_devices

_EXAMPLES = {"v5e": "v5e:4x4", "v5p": "v5p:4x4x4", "v6e": "v6e:4x4", "cpu": "cpu:8"}
"""Example names of pods by generation; the name of a GPU pod gives hosts x GPUs per host."""
_EXTRAS = {"tpu": "tpu", "gpu": "cuda13"}
"""Extra of this package that installs the compiler of each platform."""
_MOST_DEVICES = 8192
_TPU_HOST = (2, 2, 1)
"""Number of chips in a host along each dimension; a pod consists of whole hosts."""

_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # avoids waiting for a metadata server of Google Cloud
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # avoids a lock that a process with real chips could need
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
_HOPPER, _BLACKWELL = (9, 0, 132, 1.98, 50), (10, 0, 148, 1.965, 126)
"""Compute capability (major, minor), number of multiprocessors, clock in GHz, level-2 cache in MB."""
_GPUS = {"h100": _HOPPER, "h200": _HOPPER, "b200": _BLACKWELL}


@dataclass(frozen=True)
class Pod:
    """Group of connected devices: TPU chips in a mesh or torus, hosts with GPUs, or emulated CPU devices.

    Attributes:
        name: name, such as ``v5e:4x4``.
        generation: key of ``CHIPS``.
        shape: numbers of TPU chips along each dimension, (hosts, GPUs per host), or (CPU devices,).
    """

    name: str
    generation: str
    shape: tuple[int, ...]

    @classmethod
    def parse(cls, name: str) -> "Pod":
        """Parses the name of a pod.

        Raises:
            SettingError: the generation or the shape does not exist.
        """
        generation, _, sizes = name.partition(":")
        if generation not in CHIPS:
            raise SettingError("--topology", name, f"must be such as {_examples()}")
        chip = CHIPS[generation]
        num_dims = {"tpu": chip.num_dims, "gpu": 2, "cpu": 1}[chip.platform]
        if not re.fullmatch(r"[1-9]\d{0,4}(x[1-9]\d{0,4})*", sizes, re.ASCII) or sizes.count("x") != num_dims - 1:
            raise SettingError("--topology", name, f"a {generation} pod is named like {_example(generation)}")
        shape = tuple(map(int, sizes.split("x")))
        if math.prod(shape) > _MOST_DEVICES:
            raise SettingError("--topology", name, f"has {math.prod(shape):,} devices; at most {_MOST_DEVICES:,}")
        if chip.platform == "tpu" and any(size % host for size, host in zip(shape, _TPU_HOST, strict=False)):
            hosts = "x".join(map(str, _TPU_HOST[:num_dims]))
            raise SettingError("--topology", name, f"must be made of whole hosts, which have {hosts} chips")
        return cls(name, generation, shape)

    @property
    def chip(self) -> Chip:
        """Capabilities of each device in the pod."""
        return CHIPS[self.generation]

    @property
    def num_devices(self) -> int:
        """Number of devices in the pod."""
        return math.prod(self.shape)


def _example(generation: str) -> str:
    return _EXAMPLES.get(generation, f"{generation}:1x8")


def _examples() -> str:
    return ", ".join(map(_example, CHIPS))


def settle_process(pod: Pod) -> None:
    """Prepares JAX in this process to compile for a pod; call it before any other use of JAX.

    The process then has only CPU devices, which hold constants: as many as the pod if it consists of CPU devices,
    otherwise one.
    """
    os.environ.update(_ENVIRONMENT)
    emulate_devices(pod.num_devices if pod.chip.platform == "cpu" else 1)


def described_devices(pod: Pod) -> Sequence[jax.Device]:
    """Returns descriptions of a pod's devices, host by host, for which JAX can compile.

    Raises:
        SettingError: the platform's compiler is not installed or does not know such a pod.
    """
    platform = pod.chip.platform
    if platform == "cpu":
        return jax.devices()[: pod.num_devices]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            described = _tpu(pod) if platform == "tpu" else _gpu(pod)
    except Exception as error:
        if _is_missing(error):
            allowed = f"needs the compiler for it: pip install 'swift-moe[{_EXTRAS[platform]}]'"
        else:
            allowed = f"its compiler knows no such pod: {' '.join(str(error).split())}"
        raise SettingError("--topology", pod.name, allowed) from error
    every: Sequence[Any] = described.devices
    devices = sorted(every, key=lambda device: (device.process_index, device.id))
    if len(devices) != pod.num_devices:
        raise SettingError("--topology", pod.name, f"its compiler makes {len(devices)} devices of it")
    return devices


def _is_missing(error: Exception) -> bool:
    """Whether an error means that the platform's package is not installed."""
    return "support not installed" in str(error) or isinstance(error, ImportError | KeyError | NotImplementedError)


def _tpu(pod: Pod) -> topologies.TopologyDescription:
    return topologies.get_topology_desc(platform="tpu", topology_name=pod.name)


def _gpu(pod: Pod) -> topologies.TopologyDescription:
    hosts, devices = pod.shape
    return topologies.get_topology_desc(
        platform="cuda", topology_name="", topology=f"1x{hosts}x{devices}", target_config=_gpu_text(pod)
    )


def _gpu_text(pod: Pod) -> str:
    """Returns XLA's description of a GPU, a ``GpuTargetConfigProto`` as text, from the vendor's public figures."""
    chip: Chip = pod.chip
    major, minor, cores, clock_ghz, cache_mb = _GPUS[pod.generation]
    assert chip.memory_bandwidth is not None
    return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {cores}
  clock_rate_ghz: {clock_ghz}
  l2_cache_size: {cache_mb << 20}
  memory_bandwidth: {int(chip.memory_bandwidth)}
  device_memory_size: {chip.memory_bytes}
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: {2**16 - 1}
  block_dim_limit_z: {2**16 - 1}
  registers_per_core_limit: {2**16}
  registers_per_block_limit: {2**16}
  shared_memory_per_block: {48 << 10}
  shared_memory_per_block_optin: {227 << 10}
  shared_memory_per_core: {228 << 10}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{pod.generation.upper()}"
"""
