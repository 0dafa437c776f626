"""Pods by name: their chips, by the vendors' figures, and their interconnects.

Sources: the TPU's system architecture pages (cloud.google.com/tpu/docs), NVIDIA's data sheets of H100 SXM, H200 SXM and
B200. The memory of a TPU chip is the amount that its compiler allows a program.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from swift.errors import SettingError

_GB, _GIB = 10**9, 2**30


@dataclass(frozen=True)
class Chip:
    """Capabilities of one device.

    Attributes:
        platform: platform name, as in ``jax.Device.platform``.
        memory_bytes: memory available to programs; None if unknown.
        peak_flops: peak operations per second, by compute dtype; None if unknown.
        memory_bandwidth: memory bandwidth, bytes/s.
        link_bandwidth: bandwidth in one direction, bytes/s: of each TPU link, or of a GPU to the switch of its host.
        network_bandwidth: bandwidth of a GPU to other hosts in one direction, bytes/s.
        num_dims: dims of the torus or mesh that TPU chips form.
        closes_from: a dim whose size is a multiple of this number of chips is a ring; others are lines.
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


def _gpu(memory_gb: float, bfloat16: float, tfloat32: float, float64: float, memory: float, link: float) -> Chip:
    flops = {"bfloat16": bfloat16, "float32": tfloat32, "float64": float64}
    return Chip("gpu", int(memory_gb * _GB), flops, memory * _GB, link * _GB, network_bandwidth=50 * _GB)


CHIPS: Mapping[str, Chip] = {
    "v5e": _tpu(15.75, 197e12, 819, 45, 2, 16),
    "v5p": _tpu(95.74, 459e12, 2765, 90, 3, 4),
    "v6e": _tpu(31.25, 918e12, 1640, 90, 2, 16),
    "h100": _gpu(80, 989e12, 494e12, 67e12, 3350, 450),
    "h200": _gpu(141, 989e12, 494e12, 67e12, 4800, 450),
    "b200": _gpu(180, 2250e12, 1125e12, 37e12, 8000, 900),
    "cpu": Chip("cpu"),
}
"""Chips by generation."""
EXAMPLES = {"v5e": "v5e:4x4", "v5p": "v5p:4x4x4", "v6e": "v6e:4x4", "cpu": "cpu:8"}
"""Example names of pods by generation; those of GPUs are hosts x devices."""
EXTRAS = {"tpu": "tpu", "gpu": "cuda13"}
"""Extras of this package that install a platform's compiler."""
_MOST_DEVICES = 8192
_TPU_HOST = (2, 2, 1)
"""Chips of a host along each dim; a pod consists of whole hosts."""


@dataclass(frozen=True)
class Pod:
    """Connected devices of one generation: a mesh or torus of TPU chips, hosts x GPUs, or emulated CPU devices.

    Attributes:
        name: name, such as ``v5e:4x4``.
        generation: key of ``CHIPS``.
        shape: TPU chips along each dim; (hosts, GPUs of a host); (devices,).
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
        """Chip of the pod."""
        return CHIPS[self.generation]

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)


def _example(generation: str) -> str:
    return EXAMPLES.get(generation, f"{generation}:1x8")


def _examples() -> str:
    return ", ".join(map(_example, CHIPS))
