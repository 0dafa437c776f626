"""Attention kernels: wrappers for library kernels, Swift's own implementations, and the choice between them.

``causal_attention`` follows the definition, with all scores in memory. ``blockwise_attention`` computes a block of
scores at a time, so that its memory is linear in the number of positions (arXiv 2205.14135): one loop runs over all
pairs of a query block and a key block that it sees. The softmax is renormalized from block to block. The backward pass
recomputes the softmax from queries, keys and one value per row that the forward pass saves: the logarithm of the
softmax's denominator. The loop skips fully masked pairs, which saves half of the plain kernel's work.

Legend: B sequences, T positions of queries (of a block), S positions of keys, H heads, K heads of keys and values,
G = H / K query heads per key head, C channels of a head, N blocks.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from swift.errors import SettingError
from swift.models.config import AttentionKernel, ModelConfig
from swift.models.modules import at_least_float32

_Mix: TypeAlias = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]
"""Function (query_BTHC, key_BTKC, value_BTKC, document_BT or None) -> mixed values [B, T, H, C]."""

BLOCK = 512
"""Number of positions of a block by default."""
SMALLEST_TILE, TILE_SCORES = 64, 2**18
"""Minimum positions of a tile, and maximum scores of a tile over all sequences and heads: 1 MiB in float32."""

_TILE = 128
"""Pallas kernels need a number of positions that is a multiple of this."""
_GPU_BLOCK, _GPU_WARPS = 64, 4
"""Positions and warps per block: the backward pass takes 0.4 times as long as with JAX's defaults (on an H200)."""
_GPUS = ("gpu", "cuda")
_NARROW = ("bfloat16", "float16")


def causal_attention(
    query_BTHC: Float[Array, "B T H C"],
    key_BSKC: Float[Array, "B S K C"],
    value_BSKC: Float[Array, "B S K C"],
    sees_BTS: Bool[Array, "#B T S"] | None = None,
) -> Float[Array, "B T H C"]:
    """Computes attention from the definition; query head h reads key and value head h // G.

    ``jax.nn.dot_product_attention`` computes the same, but its softmax is in float32 even for float64 inputs, and the
    parallel model is tested against the reference model in float64.

    Args:
        query_BTHC: queries.
        key_BSKC: keys.
        value_BSKC: values.
        sees_BTS: whether position t sees position s; None if each position sees itself and all earlier ones.
    """
    num_sequences, length, heads, channels = query_BTHC.shape
    groups = heads // key_BSKC.shape[2]
    wide, scale = at_least_float32(query_BTHC.dtype), channels**-0.5
    if sees_BTS is None:
        sees_BTS = _before(length)[None]
    if groups == 1:
        scores = jnp.einsum("bthc,bshc->bhts", query_BTHC, key_BSKC, preferred_element_type=wide) * scale
        probs = jax.nn.softmax(jnp.where(sees_BTS[:, None], scores, jnp.finfo(wide).min), axis=-1)
        return jnp.einsum("bhts,bshc->bthc", probs.astype(value_BSKC.dtype), value_BSKC)
    query = query_BTHC.reshape(num_sequences, length, -1, groups, channels)
    scores = jnp.einsum("btkgc,bskc->bkgts", query, key_BSKC, preferred_element_type=wide) * scale
    probs = jax.nn.softmax(jnp.where(sees_BTS[:, None, None], scores, jnp.finfo(wide).min), axis=-1)
    mixed = jnp.einsum("bkgts,bskc->btkgc", probs.astype(value_BSKC.dtype), value_BSKC)
    return mixed.reshape(query_BTHC.shape)


def _causal_mask(document_BT: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
    """Returns whether each position sees each other: itself, and earlier positions of the same document."""
    return _before(document_BT.shape[1])[None] & (document_BT[:, :, None] == document_BT[:, None, :])


def _before(length: int) -> jax.Array:
    return jnp.tril(jnp.ones((length, length), bool))


def blockwise_attention(
    query_BTHC: Float[Array, "B T H C"],
    key_BTKC: Float[Array, "B T K C"],
    value_BTKC: Float[Array, "B T K C"],
    document_BT: Int[Array, "B T"] | None = None,
    block: int | None = None,
) -> Float[Array, "B T H C"]:
    """Computes causal attention one block pair at a time, in memory linear in the number of positions.

    A sequence that fits into a single block is passed to ``causal_attention``.

    Args:
        query_BTHC: queries.
        key_BTKC: keys.
        value_BTKC: values.
        document_BT: int32, document number of each position; positions see only their own document. None if the whole
            sequence is one document.
        block: number of positions of a block; None for ``BLOCK``.
    """
    num_sequences, length, num_heads, channels = query_BTHC.shape
    block = BLOCK if block is None else block
    if length <= block:
        sees = None if document_BT is None else _causal_mask(document_BT)
        return causal_attention(query_BTHC, key_BTKC, value_BTKC, sees)
    kv_heads, num_blocks = key_BTKC.shape[2], -(-length // block)

    def blocks(array: jax.Array) -> jax.Array:
        """Cuts ``[B, T, ...]`` into ``[N, B, T, ...]``; padded keys come after all queries, so no query sees them."""
        padded = jnp.pad(array, [(0, 0), (0, num_blocks * block - length), *[(0, 0)] * (array.ndim - 2)])
        return jnp.moveaxis(padded.reshape(num_sequences, num_blocks, block, *array.shape[2:]), 1, 0)

    query = blocks(query_BTHC).reshape(num_blocks, num_sequences, block, kv_heads, -1, channels)
    inputs = _Inputs(
        query.transpose(0, 1, 3, 4, 2, 5),
        blocks(key_BTKC).transpose(0, 1, 3, 2, 4),
        blocks(value_BTKC).transpose(0, 1, 3, 2, 4),
    )
    document = None if document_BT is None else blocks(document_BT)
    mixed = _mix(inputs, document).transpose(1, 0, 4, 2, 3, 5)
    return mixed.reshape(num_sequences, num_blocks * block, num_heads, channels)[:, :length]


def tiled_attention(
    query_BTHC: Float[Array, "B T H C"],
    key_BTKC: Float[Array, "B T K C"],
    value_BTKC: Float[Array, "B T K C"],
    document_BT: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T H C"]:
    """Computes ``blockwise_attention`` in blocks whose scores fit into a CPU's caches.

    With many sequences and heads, the scores of blocks of 512 positions, or all scores at once, would be read from and
    written to memory several times.
    """
    num_sequences, length, num_heads, _ = query_BTHC.shape
    tile = BLOCK
    while tile > SMALLEST_TILE and num_sequences * num_heads * tile**2 > TILE_SCORES:
        tile //= 2
    num_tiles = -(-length // tile)
    if num_tiles * (num_tiles + 1) // 2 * tile**2 >= length**2:  # padding outweighs the masked part
        tile = length
    return blockwise_attention(query_BTHC, key_BTKC, value_BTKC, document_BT, tile)


class _Inputs(NamedTuple):
    query_NBKGTC: jax.Array
    key_NBKSC: jax.Array
    value_NBKSC: jax.Array


def _pairs(num_blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Lists the (query block, key block) pairs: for each query block the diagonal pair, then earlier key blocks."""
    pairs = [(q, k) for q in range(num_blocks) for k in range(q, -1, -1)]
    return np.array([q for q, _ in pairs], np.int32), np.array([k for _, k in pairs], np.int32)


def _take(arrays: Any, index: jax.Array) -> Any:
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), arrays)


def _put(arrays: Any, index: jax.Array, rows: Any) -> Any:
    return jax.tree.map(lambda leaf, row: lax.dynamic_update_index_in_dim(leaf, row, index, 0), arrays, rows)


def _scores(inputs: _Inputs, document: jax.Array | None, query_block: jax.Array, key_block: jax.Array) -> jax.Array:
    """Computes the scores [B, K, G, T, S] for a pair of blocks; masked scores are the lowest float."""
    query, key = _take(inputs.query_NBKGTC, query_block), _take(inputs.key_NBKSC, key_block)
    wide, (length, channels) = at_least_float32(query.dtype), query.shape[-2:]
    scores = jnp.einsum("bkgtc,bksc->bkgts", query, key, preferred_element_type=wide) * channels**-0.5
    position = jnp.arange(length, dtype=jnp.int32)
    sees: Bool[Array, "#B 1 1 T S"] = (
        (query_block * length + position)[:, None] >= (key_block * length + position)[None, :]
    )[None, None, None]
    if document is not None:
        query_document, key_document = _take(document, query_block), _take(document, key_block)
        sees = sees & (query_document[:, :, None] == key_document[:, None, :])[:, None, None]
    return jnp.where(sees, scores, jnp.finfo(wide).min)


@jax.custom_vjp
def _mix(inputs: _Inputs, document: jax.Array | None) -> jax.Array:
    """Computes the attention output [N, B, K, G, T, C], in the dtype of the queries."""
    return _mix_forward(inputs, document)[0]


def _mix_forward(inputs: _Inputs, document: jax.Array | None) -> tuple[jax.Array, tuple]:
    query, wide = inputs.query_NBKGTC, at_least_float32(inputs.query_NBKGTC.dtype)
    lowest = jnp.full(query.shape[:-1], jnp.finfo(wide).min, wide)
    start = jnp.zeros(query.shape, wide), lowest, jnp.zeros_like(lowest)

    def step(totals: Any, pair: Any) -> tuple[Any, None]:
        query_block, key_block = pair
        mixed, highest, total = _take(totals, query_block)
        scores, value = _scores(inputs, document, query_block, key_block), _take(inputs.value_NBKSC, key_block)
        # Rescale the running sums to the new maximum, so that no exponential overflows.
        top = jnp.maximum(highest, jnp.max(scores, axis=-1))
        weights, fade = jnp.exp(scores - top[..., None]), jnp.exp(highest - top)
        more = jnp.einsum("bkgts,bksc->bkgtc", weights.astype(value.dtype), value, preferred_element_type=wide)
        rows = mixed * fade[..., None] + more, top, total * fade + jnp.sum(weights, axis=-1)
        return _put(totals, query_block, rows), None

    (mixed, highest, total), _ = lax.scan(step, start, _pairs(len(query)))
    mixed = (mixed / total[..., None]).astype(query.dtype)
    return mixed, (inputs, document, mixed, highest + jnp.log(total))


def _mix_backward(residuals: tuple, d_mixed: jax.Array) -> tuple[_Inputs, None]:
    inputs, document, mixed, log_total = residuals
    wide, channels = log_total.dtype, mixed.shape[-1]
    # The softmax's gradient subtracts the weighted mean of its cotangents, which equals the sum of mixed * d_mixed.
    mean = jnp.sum(mixed.astype(wide) * d_mixed.astype(wide), axis=-1)
    start = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, wide), inputs)

    def step(totals: Any, pair: Any) -> tuple[Any, None]:
        query_block, key_block = pair
        query, dy = _take((inputs.query_NBKGTC, d_mixed), query_block)
        key, value = _take((inputs.key_NBKSC, inputs.value_NBKSC), key_block)
        weights = jnp.exp(_scores(inputs, document, query_block, key_block) - _take(log_total, query_block)[..., None])
        d_weights = jnp.einsum("bkgtc,bksc->bkgts", dy, value, preferred_element_type=wide)
        d_scores = weights * (d_weights - _take(mean, query_block)[..., None]) * channels**-0.5
        narrow = d_scores.astype(query.dtype)
        d_query = jnp.einsum("bkgts,bksc->bkgtc", narrow, key, preferred_element_type=wide)
        d_key = jnp.einsum("bkgts,bkgtc->bksc", narrow, query, preferred_element_type=wide)
        d_value = jnp.einsum("bkgts,bkgtc->bksc", weights.astype(dy.dtype), dy, preferred_element_type=wide)
        blocks = _Inputs(query_block, key_block, key_block)
        before = [_take(total, at) for total, at in zip(totals, blocks, strict=True)]
        added = [old + more for old, more in zip(before, (d_query, d_key, d_value), strict=True)]
        return _Inputs(*(_put(*update) for update in zip(totals, blocks, added, strict=True))), None

    totals, _ = lax.scan(step, start, _pairs(len(d_mixed)))
    return jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), totals, inputs), None


_mix.defvjp(_mix_forward, _mix_backward)


def _plain(query: jax.Array, key: jax.Array, value: jax.Array, document: jax.Array | None) -> jax.Array:
    return causal_attention(query, key, value, None if document is None else _causal_mask(document))


def splash_attention(
    query_BTHC: Float[Array, "B T H C"],
    key_BTKC: Float[Array, "B T K C"],
    value_BTKC: Float[Array, "B T K C"],
    document_BT: Int[Array, "B T"] | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "B T H C"]:
    """Runs JAX's Pallas kernel for TPUs; ``interpret`` runs it on any device."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    _, length, heads, channels = query_BTHC.shape
    block = next(size for size in (512, 256, _TILE) if length % size == 0)
    backward_blocks = {f"block_{name}": block for name in ("q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")}
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([splash.CausalMask((length, length))] * heads),
        block_sizes=splash.BlockSizes(block, block, block, **backward_blocks),  # type: ignore[arg-type]
        interpret=interpret,
    )

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, document: jax.Array | None) -> jax.Array:
        ids = None if document is None else splash.SegmentIds(document, document)
        return kernel(query, key, value, ids)

    scaled = query_BTHC * jnp.asarray(channels**-0.5, query_BTHC.dtype)
    query, key, value = (array.swapaxes(1, 2) for array in (scaled, key_BTKC, value_BTKC))
    return jax.vmap(attend)(query, key, value, document_BT).swapaxes(1, 2)


def triton_attention(
    query_BTHC: Float[Array, "B T H C"],
    key_BTKC: Float[Array, "B T K C"],
    value_BTKC: Float[Array, "B T K C"],
    document_BT: Int[Array, "B T"] | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "B T H C"]:
    """Runs JAX's Pallas kernel for GPUs; ``interpret`` runs it on any device.

    The kernel does not support grouped heads, so keys and values are repeated.
    """
    from jax.experimental.pallas.ops.gpu import attention as gpu

    groups = query_BTHC.shape[2] // key_BTKC.shape[2]
    key, value = (jnp.repeat(array, groups, axis=2) if groups > 1 else array for array in (key_BTKC, value_BTKC))
    scale, sizes = query_BTHC.shape[-1] ** -0.5, gpu.BlockSizes(*[_GPU_BLOCK] * 6)
    options = {"causal": True, "block_sizes": sizes, "num_warps": _GPU_WARPS, "interpret": interpret}
    return gpu.mha(query_BTHC, key, value, document_BT, sm_scale=scale, **options)


def _cudnn(query: jax.Array, key: jax.Array, value: jax.Array, document: jax.Array | None) -> jax.Array:
    assert document is None
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")


KERNELS: Mapping[AttentionKernel, _Mix] = {
    "plain": _plain,
    "blockwise": blockwise_attention,
    "tiled": tiled_attention,
    "splash": splash_attention,
    "triton": triton_attention,
    "cudnn": _cudnn,
}
"""Kernels by name: ``plain`` keeps T x T scores; ``tiled`` is for CPUs, ``splash`` for TPUs, ``triton`` and ``cudnn``
for GPUs."""


def choose_kernel(
    asked: str, platform: str, dtype: DTypeLike, config: ModelConfig, *, separates: bool, is_here: bool = True
) -> AttentionKernel:
    """Chooses the attention kernel for a model on a platform.

    Args:
        asked: name of a kernel, or ``auto``.
        platform: platform of the devices.
        dtype: dtype of activations.
        config: shape of the model.
        separates: whether the documents of a sequence are separated, so that no position sees another document.
        is_here: whether this process has devices of the platform; False if it only traces or compiles for them.

    Raises:
        SettingError: the requested kernel does not support the model, dtype or devices.
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
    """Returns why a kernel cannot be used, or "" if it can."""
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
    return next((reason for fails, reason in failings if fails), "")
