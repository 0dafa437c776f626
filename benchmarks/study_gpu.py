"""Kernels on one NVIDIA GPU: the grouped matmul beside a dense one and XLA's ``ragged_dot``, and those of attention.

Sizes are those of OLMoE-1B-7B: 131,072 rows of 64 experts, 2,048 x 1,024 weights; 16 heads of 128 channels. XLA's form
is measured with an eighth of both, since it has a copy of the rows for each expert.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measure import publish

from swift.experts.grouped_matmul import (
    Groups,
    multiply_in_tiles,
    multiply_ragged,
    weight_gradient_in_tiles,
    weight_gradient_ragged,
)
from swift.models.attention_kernels import KERNELS
from swift.models.config import AttentionKernel

ROWS, SLOTS, DIMS, BLOCK = 131_072, 64, (2048, 1024), 128
HEADS, CHANNELS = 16, 128
SEQUENCES = ((4, 4096), (1, 16_384))
KINDS: tuple[tuple[AttentionKernel, bool], ...] = (
    ("cudnn", False),
    ("triton", False),
    ("triton", True),
    ("blockwise", True),
    ("tiled", True),
)
"""Kernels, and whether documents are separated."""


def seconds(run: Callable[..., Any], *arrays: jax.Array, calls: int = 8) -> float:
    """Measures a compiled function: the median of three rounds, over the calls of a round."""
    jax.block_until_ready(run(*arrays))
    rounds = []
    for _ in range(3):
        begun = time.perf_counter()
        for _ in range(calls):
            result = run(*arrays)
        jax.block_until_ready(result)
        rounds.append((time.perf_counter() - begun) / calls)
    return statistics.median(rounds)


def drawn(shape: tuple[int, ...], seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def uneven(num_rows: int, num_slots: int) -> tuple[Groups, int]:
    """Draws the row ranges of slots, and counts the rows that are in them."""
    random = np.random.default_rng(0)
    sizes = random.multinomial(num_rows - num_slots * BLOCK, random.dirichlet(np.full(num_slots, 5.0)))
    size_S = (-(-sizes // BLOCK) * BLOCK).astype(np.int32)
    return Groups(jnp.asarray(np.cumsum(size_S) - size_S, jnp.int32), jnp.asarray(size_S)), int(size_S.sum())


def matmuls() -> dict[str, float]:
    """Measures TFLOP/s of the dense matmul, of the kernels, and of XLA's form."""
    (depth, width), eighth = DIMS, (ROWS // 8, SLOTS // 8)
    groups, used = uneven(ROWS, SLOTS)
    few_groups, few_used = uneven(*eighth)
    x, dy, weights = drawn((ROWS, depth), 0), drawn((ROWS, width), 1), drawn((SLOTS, depth, width), 2)
    few = x[: eighth[0]], dy[: eighth[0]], weights[: eighth[1]]

    def rate(num_rows: int, run: Callable[..., Any], *arrays: Any) -> float:
        return round(2 * num_rows * depth * width / seconds(jax.jit(run), *arrays) / 1e12, 1)

    return {
        "dense": rate(ROWS // 2, jnp.matmul, x[: ROWS // 2], weights[0]),
        "outputs": rate(used, multiply_in_tiles, x, weights, groups),
        "gradients of rows": rate(
            used, lambda *arrays: multiply_in_tiles(*arrays, is_transposed=True), dy, weights, groups
        ),
        "gradients of weights": rate(used, weight_gradient_in_tiles, x, dy, groups),
        "outputs, ragged_dot of 8 experts": rate(few_used, multiply_ragged, few[0], few[2], few_groups),
        "gradients of weights, ragged_dot of 8 experts": rate(
            few_used, weight_gradient_ragged, few[0], few[1], few_groups
        ),
    }


def attention(num_sequences: int, length: int) -> dict[str, dict[str, float]]:
    """Measures milliseconds of each kernel, forward and with the backward pass."""
    *inputs, dy = (drawn((num_sequences, length, HEADS, CHANNELS), seed) for seed in range(4))
    random = np.random.default_rng(1)
    document_BT = jnp.asarray(np.sort(random.integers(0, 4, (num_sequences, length)), axis=1), jnp.int32)
    found = {}
    for kernel, separates in KINDS:

        def forward(*inputs: jax.Array, kernel: AttentionKernel = kernel, separates: bool = separates) -> jax.Array:
            return KERNELS[kernel](*inputs, document_BT if separates else None)

        def both(*arrays: jax.Array, forward: Callable[..., jax.Array] = forward) -> Any:
            return jax.vjp(forward, *arrays[:3])[1](arrays[3])

        found[kernel + (", documents" if separates else "")] = {
            "forward_ms": round(1000 * seconds(jax.jit(forward), *inputs, calls=5), 2),
            "both_ms": round(1000 * seconds(jax.jit(both), *inputs, dy, calls=5), 2),
        }
    return found


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    if jax.default_backend() != "gpu":
        print(f"needs an NVIDIA GPU, and JAX has {jax.default_backend()}", file=sys.stderr)
        return 2
    rates = matmuls()
    slowest = min(rates[name] for name in ("outputs", "gradients of rows", "gradients of weights"))
    figures = {
        "tflops_per_s": rates,
        "attention": {f"{number} x {length}": attention(number, length) for number, length in SEQUENCES},
    }
    return publish(
        "kernels on one GPU, OLMoE's sizes", figures, {"a dense matmul's rate over ours": (rates["dense"] / slowest, 2)}
    )


if __name__ == "__main__":
    sys.exit(main())
