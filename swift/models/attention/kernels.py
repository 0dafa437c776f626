"""Kernels of attention: those of libraries, the package's own forms, and the choice between them.

Legend: B sequences, T positions, H heads, K heads of keys and values, G = H / K, C channels of a head.
"""

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from swift.errors import SettingError
from swift.models.attention.blockwise import blockwise_attention, tiled_attention
from swift.models.attention.plain import causal_attention, sees_before
from swift.models.config import ModelConfig

AttentionKernel: TypeAlias = Literal["plain", "blockwise", "tiled", "splash", "triton", "cudnn"]

Mix: TypeAlias = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]
"""(query_BTHC, key_BTKC, value_BTKC, document_BT or None) -> the values that each position sees, mixed [B, T, H, C]."""

_TILE = 128
"""Pallas kernels cut positions into multiples of this number."""
_GPU_BLOCK, _GPU_WARPS = 64, 4
"""Positions of a block, and warps that compute it: the backward pass takes 0.4 of the time of JAX's defaults (H200)."""
_GPUS = ("gpu", "cuda")
_NARROW = ("bfloat16", "float16")


def _plain(query: jax.Array, key: jax.Array, value: jax.Array, document: jax.Array | None) -> jax.Array:
    return causal_attention(query, key, value, None if document is None else sees_before(document))


def splash_attention(
    query_BTHC: Float[Array, "B T H C"],
    key_BTKC: Float[Array, "B T K C"],
    value_BTKC: Float[Array, "B T K C"],
    document_BT: Int[Array, "B T"] | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "B T H C"]:
    """JAX's Pallas kernel for TPUs; ``interpret`` runs it on any device."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    _, length, heads, channels = query_BTHC.shape
    block = next(size for size in (512, 256, _TILE) if length % size == 0)
    of_backward = {f"block_{name}": block for name in ("q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")}
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([splash.CausalMask((length, length))] * heads),
        block_sizes=splash.BlockSizes(block, block, block, **of_backward),  # type: ignore[arg-type]
        interpret=interpret,
    )

    def one(query: jax.Array, key: jax.Array, value: jax.Array, document: jax.Array | None) -> jax.Array:
        ids = None if document is None else splash.SegmentIds(document, document)
        return kernel(query, key, value, ids)

    scaled = query_BTHC * jnp.asarray(channels**-0.5, query_BTHC.dtype)
    query, key, value = (of.swapaxes(1, 2) for of in (scaled, key_BTKC, value_BTKC))
    return jax.vmap(one)(query, key, value, document_BT).swapaxes(1, 2)


def triton_attention(
    query_BTHC: Float[Array, "B T H C"],
    key_BTKC: Float[Array, "B T K C"],
    value_BTKC: Float[Array, "B T K C"],
    document_BT: Int[Array, "B T"] | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "B T H C"]:
    """JAX's Pallas kernel for GPUs, which has no groups of heads: keys and values are repeated for it."""
    from jax.experimental.pallas.ops.gpu import attention as gpu

    groups = query_BTHC.shape[2] // key_BTKC.shape[2]
    key, value = (jnp.repeat(of, groups, axis=2) if groups > 1 else of for of in (key_BTKC, value_BTKC))
    scale, sizes = query_BTHC.shape[-1] ** -0.5, gpu.BlockSizes(*[_GPU_BLOCK] * 6)
    options = {"causal": True, "block_sizes": sizes, "num_warps": _GPU_WARPS, "interpret": interpret}
    return gpu.mha(query_BTHC, key, value, document_BT, sm_scale=scale, **options)


def _cudnn(query: jax.Array, key: jax.Array, value: jax.Array, document: jax.Array | None) -> jax.Array:
    assert document is None
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")


KERNELS: Mapping[AttentionKernel, Mix] = {
    "plain": _plain,
    "blockwise": blockwise_attention,
    "tiled": tiled_attention,
    "splash": splash_attention,
    "triton": triton_attention,
    "cudnn": _cudnn,
}
"""``plain`` keeps T x T scores; ``tiled`` is for CPUs, ``splash`` for TPUs, ``triton`` and ``cudnn`` are for GPUs."""


def choose_kernel(
    asked: str, platform: str, dtype: DTypeLike, config: ModelConfig, *, separates: bool, is_here: bool = True
) -> AttentionKernel:
    """Chooses the kernel of attention.

    Args:
        asked: name of a kernel, or ``auto``.
        platform: platform of the devices.
        dtype: type of activations.
        config: shape of the model.
        separates: whether documents of a sequence are kept apart: no position sees another document.
        is_here: whether this process has such devices; False if it only traces or compiles for them.

    Raises:
        SettingError: the kernel asked for cannot do it.
    """
    kernels: tuple[AttentionKernel, ...] = get_args(AttentionKernel)
    if asked not in ("auto", *kernels):
        raise SettingError("choose_kernel.asked", asked, f"choose one of auto, {', '.join(kernels)}")
    failings = {name: _failing(name, platform, dtype, config, separates, is_here) for name in kernels}
    if asked != "auto":
        (kernel,) = (name for name in kernels if name == asked)
        if failings[kernel]:
            raise SettingError("choose_kernel.asked", asked, failings[kernel])
        return kernel
    if jnp.dtype(dtype) == jnp.float64:
        return "plain"
    if platform == "cpu":
        return "tiled"
    order: tuple[AttentionKernel, ...] = ("splash", "cudnn", "triton", "blockwise")
    return next(name for name in order if not failings[name])


def _failing(
    kernel: AttentionKernel, platform: str, dtype: DTypeLike, config: ModelConfig, separates: bool, is_here: bool
) -> str:
    """The reason why a kernel cannot be used; empty if it can."""
    length, channels, name = config.sequence_length, config.channels, jnp.dtype(dtype).name
    if kernel == "splash":
        failings = [
            (platform != "tpu", f"needs TPUs, and the devices are {platform}"),
            (name not in (*_NARROW, "float32"), f"needs narrower activations than {name}"),
            (length % _TILE > 0, f"needs ModelConfig.sequence_length = {length} to be a multiple of {_TILE}"),
        ]
    elif kernel in ("triton", "cudnn"):
        failings = [
            (platform not in _GPUS, f"needs GPUs, and the devices are {platform}"),
            (name not in _NARROW, f"needs activations in {' or '.join(_NARROW)}, not {name}"),
            (channels % 8 > 0 or channels > 128, f"needs heads of 8, 16, ... 128 channels, not {channels}"),
        ]
        if kernel == "triton":
            failings += [
                (length % _TILE > 0, f"needs ModelConfig.sequence_length = {length} to be a multiple of {_TILE}")
            ]
        else:
            failings += [
                (separates, "cannot separate documents; choose triton"),
                (not is_here, "can be traced only by a process that has GPUs; choose triton"),
            ]
    else:
        failings = []
    return next((why for fails, why in failings if fails), "")
