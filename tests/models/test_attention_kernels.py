"""Kernels of libraries: against the plain form, chosen by platform, and sizes as compiled for devices not there."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from swift.errors import SettingError
from swift.models import attention_kernels
from swift.models.attention_kernels import KERNELS, choose_kernel
from swift.models.config import ModelConfig
from swift.pod_compile.pods import Pod, described_devices
from tests.models.test_attention import drawn, with_gradients

LENGTHS = (4096, 16_384, 65_536)
HEADS, CHANNELS = 2, 128


def compiled_bytes(kernel, length, devices):
    """Temporary bytes of attention and its gradient."""
    where = NamedSharding(Mesh(devices[:1], ("rank",)), PartitionSpec())
    shape = jax.ShapeDtypeStruct((1, length, HEADS, CHANNELS), jnp.bfloat16, sharding=where)

    def f(query, key, value, dy):
        return jax.vjp(lambda *inputs: KERNELS[kernel](*inputs, None), query, key, value)[1](dy)

    return jax.jit(f).lower(*[shape] * 4).compile().memory_analysis().temp_size_in_bytes


def needs(module):
    is_there = importlib.util.find_spec(module) is not None
    return pytest.mark.skipif(not is_there, reason=f"{module} is not installed")


@pytest.mark.usefixtures("no_cache")
@pytest.mark.parametrize(
    ("pod", "kernel"),
    [
        (None, "blockwise"),
        (None, "tiled"),
        pytest.param("v5p:2x2x1", "splash", marks=[pytest.mark.slow, needs("libtpu")]),
        pytest.param("v5p:2x2x1", "blockwise", marks=[pytest.mark.slow, needs("libtpu")]),
        pytest.param("h100:1x1", "triton", marks=[pytest.mark.slow, needs("jax_cuda13_plugin")]),
        pytest.param("h100:1x1", "blockwise", marks=[pytest.mark.slow, needs("jax_cuda13_plugin")]),
    ],
)
def test_memory_grows_with_the_positions(pod, kernel):
    """Four times as many positions need about four times the memory; all scores need sixteen times."""
    devices = jax.devices("cpu") if pod is None else described_devices(Pod.parse(pod))
    sizes = [compiled_bytes(kernel, length, devices) for length in LENGTHS]
    activations = HEADS * CHANNELS * 4
    assert all(size < 20 * activations * length for size, length in zip(sizes, LENGTHS, strict=True))
    assert sizes[2] < 5.5 * sizes[1]
    assert compiled_bytes("plain", LENGTHS[0], devices) > HEADS * 2 * LENGTHS[0] ** 2


@pytest.mark.parametrize("separates", [False, True])
@pytest.mark.parametrize("name", ["splash", "triton"])
def test_kernels_of_pallas_are_the_plain_form(name, separates):
    """The same program as on the device, interpreted."""
    arrays, documents = drawn(256, 2, 1, 64, jnp.float32)
    documents = documents if separates else None
    kernel = functools.partial(getattr(attention_kernels, f"{name}_attention"), interpret=True)
    found = with_gradients(kernel, arrays, documents)
    for ours, plain in zip(found, with_gradients(KERNELS["plain"], arrays, documents), strict=True):
        np.testing.assert_allclose(ours, plain, atol=2e-5)


@pytest.mark.parametrize(
    ("platform", "dtype", "shape", "separates", "kernel"),
    [
        ("cpu", "float32", {}, False, "tiled"),
        ("cpu", "float64", {}, False, "plain"),
        ("tpu", "float64", {}, False, "plain"),
        ("tpu", "bfloat16", {}, True, "splash"),
        ("tpu", "float32", {"sequence_length": 100}, False, "blockwise"),
        ("gpu", "bfloat16", {}, False, "cudnn"),
        ("gpu", "bfloat16", {}, True, "triton"),
        ("gpu", "bfloat16", {"head_dim": 256}, True, "blockwise"),
        ("gpu", "float32", {}, False, "blockwise"),
    ],
)
def test_the_platform_chooses_the_kernel(platform, dtype, shape, separates, kernel):
    config = ModelConfig(**{"sequence_length": 512, "head_dim": 64} | shape)
    assert choose_kernel("auto", platform, dtype, config, separates=separates) == kernel


@pytest.mark.parametrize(
    ("asked", "platform", "separates", "line"),
    [
        ("flash", "cpu", False, "choose one of auto, plain, blockwise, tiled, splash, triton, cudnn"),
        ("splash", "cpu", False, "needs TPUs, and the devices are cpu"),
        ("triton", "tpu", False, "needs GPUs, and the devices are tpu"),
        ("cudnn", "gpu", True, "cannot separate documents"),
    ],
)
def test_a_kernel_that_cannot_is_refused(asked, platform, separates, line):
    with pytest.raises(SettingError, match=line):
        choose_kernel(asked, platform, "bfloat16", ModelConfig(), separates=separates)
