"""Pods by name."""

import pytest

from swift.errors import SettingError
from swift.mesh.devices import CHIPS
from swift.pod_compile.pods import Pod


@pytest.mark.parametrize(
    ("name", "shape", "num_devices", "platform"),
    [
        ("v5e:4x4", (4, 4), 16, "tpu"),
        ("v5p:4x4x4", (4, 4, 4), 64, "tpu"),
        ("v6e:16x16", (16, 16), 256, "tpu"),
        ("h100:1x8", (1, 8), 8, "gpu"),
        ("b200:4x8", (4, 8), 32, "gpu"),
        ("cpu:8", (8,), 8, "cpu"),
    ],
)
def test_a_name_is_a_shape(name, shape, num_devices, platform):
    pod = Pod.parse(name)
    assert (pod.shape, pod.num_devices, pod.chip.platform) == (shape, num_devices, platform)


def test_an_unknown_generation_lists_those_that_there_are():
    with pytest.raises(SettingError) as told:
        Pod.parse("v7x:4x4")
    assert all(generation in str(told.value) for generation in CHIPS)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("v5e", "is named like v5e:4x4"),
        ("v5e:4x4x4", "is named like v5e:4x4"),
        ("v5p:4x4", "is named like v5p:4x4x4"),
        ("h100:8", "is named like h100:1x8"),
        ("cpu:0", "is named like cpu:8"),
        ("cpu:-8", "is named like cpu:8"),
        ("v5e:3x4", "whole hosts, which have 2x2 chips"),
        ("v5p:2x3x1", "whole hosts, which have 2x2x1 chips"),
        ("h100:9999x8", "has 79,992 devices; at most 8,192"),
    ],
)
def test_a_shape_that_cannot_be(name, reason):
    with pytest.raises(SettingError, match=reason):
        Pod.parse(name)
