"""Pods by name: their chips and their shapes."""

import math
import re
from dataclasses import dataclass

from swift.errors import SettingError
from swift.mesh.chips import CHIPS, Chip

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
