"""Prints the relative errors of kernels on the first GPU as a JSON document; it is a program, to have the GPU alone."""

import json

import jax
import jax.numpy as jnp
import numpy as np

from swift.experts.grouped_matmul import Groups, block_rows, grouped_matmul, padded_rows
from swift.models.attention_kernels import KERNELS

SIZES = {
    "even": [300, 300, 300, 300],
    "uneven": [1024, 0, 3, 173],
    "few": [0, 5, 0, 2],
}
DIMS = {"powers of two": (256, 128), "others": (192, 80), "too narrow for tiles": (40, 24)}


def error(found, expected):
    """Norm of the difference over that of what is expected; NaN is infinite."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    ratio = np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30)
    return float(ratio) if np.isfinite(ratio) else 1e30


def grouped(sizes, dims, dtype, *, mapped):
    """The largest error of a grouped matmul and its two gradients; of two virtual ranks if ``mapped``."""
    random = np.random.default_rng(0)
    num_rows, num_slots = sum(sizes), len(sizes)
    block, padded = block_rows(num_rows, num_slots), padded_rows(num_rows, num_slots)
    size_S = -(-np.array(sizes) // block) * block
    start_S = np.cumsum(size_S) - size_S
    used_P = np.zeros(padded, bool)
    slot_P = np.zeros(padded, int)
    for slot, (start, size) in enumerate(zip(start_S, sizes, strict=True)):
        used_P[start : start + size], slot_P[start : start + size] = True, slot
    x, dy = (jnp.asarray(used_P[:, None] * random.standard_normal((padded, dim)), dtype) for dim in dims)
    weights = jnp.asarray(random.standard_normal((num_slots, *dims)), dtype)

    def run(x, weights, dy, start_S, size_S):
        y, pull_back = jax.vjp(lambda x, w: grouped_matmul(x, w, Groups(start_S, size_S), block), x, weights)
        return y, *pull_back(dy)

    arguments = (x, weights, dy, jnp.asarray(start_S, jnp.int32), jnp.asarray(size_S, jnp.int32))
    if mapped:
        stacked = jax.jit(jax.vmap(run))(*(jnp.stack([of, of]) for of in arguments))
        found = [of[1] for of in stacked]
    else:
        found = jax.jit(run)(*arguments)
    x, weights, dy = (np.asarray(of, np.float64) for of in (x, weights, dy))
    expected = [
        np.stack([row @ weights[slot] for row, slot in zip(x, slot_P, strict=True)]),
        np.stack([row @ weights[slot].T for row, slot in zip(dy, slot_P, strict=True)]),
        np.stack([x[used_P & (slot_P == s)].T @ dy[used_P & (slot_P == s)] for s in range(num_slots)]),
    ]
    return max(error(*pair) for pair in zip(found, expected, strict=True))


def attention(kernel, document_BT):
    """Errors of what is mixed and of three gradients, by name; the plain form in float32 with factors as they are."""
    random = np.random.default_rng(0)
    shapes = [(2, 512, heads, 64) for heads in (4, 2, 2, 4)]
    arrays = [jnp.asarray(random.standard_normal(shape), jnp.bfloat16) for shape in shapes]

    def run(name, arrays):
        *inputs, dy = arrays
        y, pull_back = jax.vjp(jax.jit(lambda *inputs: KERNELS[name](*inputs, document_BT)), *inputs)
        return y, *pull_back(dy)

    with jax.default_matmul_precision("highest"):
        expected = run("plain", [of.astype(jnp.float32) for of in arrays])
    names = ("mixed", "queries", "keys", "values")
    return {name: error(*pair) for name, *pair in zip(names, run(kernel, arrays), expected, strict=True)}


def main():
    assert jax.default_backend() == "gpu", "JAX does not use the GPU"
    found = {}
    for name, sizes in SIZES.items():
        for dims in DIMS:
            for dtype in ("bfloat16", "float32"):
                for mapped in (False, True):
                    where = "virtual ranks" if mapped else "one rank"
                    found[f"grouped {name}, {dims}, {where}, {dtype}"] = grouped(
                        sizes, DIMS[dims], dtype, mapped=mapped
                    )
    document_BT = jnp.asarray(np.sort(np.random.default_rng(1).integers(0, 4, (2, 512)), axis=1), jnp.int32)
    for kernel, documents in (("triton", document_BT), ("blockwise", document_BT), ("triton", None), ("cudnn", None)):
        where = "whole" if documents is None else "documents"
        found |= {f"attention {kernel}, {where}, {name}": of for name, of in attention(kernel, documents).items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
