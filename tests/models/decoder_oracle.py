"""Today's decoders in numpy, from their papers' formulas, one token and one head at a time; nothing is the package's.

RMSNorm (arXiv 1910.07467), rotations as complex numbers (arXiv 2104.09864), grouped queries (arXiv 2305.13245), gated
linear units (arXiv 2002.05202), shared experts (arXiv 2401.06066), sigmoid scores and a factor (arXiv 2412.19437).
"""

import cmath
import math

import numpy as np


def rms_norm(x, scale, epsilon):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * scale


def swiglu(x, parts, prefix=""):
    gate, up = x @ parts[f"{prefix}gate.kernel"], x @ parts[f"{prefix}up.kernel"]
    return gate / (1 + np.exp(-gate)) * up @ parts[f"{prefix}down.kernel"]


def rotated(channels, position, theta):
    """Pairs of channels (c, c + C/2) as complex numbers, turned by position * theta ** (-2c / C)."""
    half = len(channels) // 2
    turned = [
        complex(channels[c], channels[c + half]) * cmath.exp(1j * position * theta ** (-2 * c / len(channels)))
        for c in range(half)
    ]
    return np.array([z.real for z in turned] + [z.imag for z in turned])


def attention(x_TD, parts, config):
    """A sequence through self-attention, with its norm."""
    heads, kv, size = config.num_heads, config.num_kv_heads, config.head_dim
    epsilon = config.norm_epsilon
    qkv = rms_norm(x_TD, parts["norm.scale"], epsilon) @ parts["qkv.kernel"]
    query, key, value = np.split(qkv, [heads * size, (heads + kv) * size], axis=-1)
    if config.qk_norm == "projection":
        query = rms_norm(query, parts["query_norm.scale"], epsilon)
        key = rms_norm(key, parts["key_norm.scale"], epsilon)
    query, key, value = (of.reshape(len(x_TD), -1, size) for of in (query, key, value))
    if config.qk_norm == "head":
        query = rms_norm(query, parts["query_norm.scale"], epsilon)
        key = rms_norm(key, parts["key_norm.scale"], epsilon)
    mixed = np.zeros((len(x_TD), heads, size))
    for head in range(heads):
        shared = head // (heads // kv)
        for here in range(len(x_TD)):
            asks = rotated(query[here, head], here, config.rope_theta)
            scores = [
                asks @ rotated(key[there, shared], there, config.rope_theta) / math.sqrt(size)
                for there in range(here + 1)
            ]
            weights = np.exp(np.array(scores) - max(scores))
            mixed[here, head] = (weights / weights.sum()) @ value[: here + 1, shared]
    return mixed.reshape(len(x_TD), -1) @ parts["out.kernel"]


def gates(logits_E, experts):
    """The experts of a token and their gates, {expert: gate}."""
    if experts.router.scores == "sigmoid":
        scores = 1 / (1 + np.exp(-logits_E))
    else:
        scores = np.exp(logits_E - logits_E.max())
        scores /= scores.sum()
    chosen = sorted(range(len(scores)), key=lambda expert: -logits_E[expert])[: experts.top_k]
    total = sum(scores[expert] for expert in chosen) if experts.router.normalize_gates else 1.0
    return {expert: experts.router.gate_scale * scores[expert] / total for expert in chosen}


def mixture(x_TD, router, expert, config, experts):
    """Tokens through all their experts and the shared ones, with the norm."""
    normed = rms_norm(x_TD, router["norm.scale"], config.norm_epsilon)
    y = np.stack(
        [
            sum(
                gate * swiglu(token, {name: leaf[which] for name, leaf in expert.items()})
                for which, gate in gates(token @ router["score.kernel"], experts).items()
            )
            for token in normed
        ]
    )
    return y + swiglu(normed, router, "shared.") if config.num_shared_experts else y


def logits(parts, config, experts, tokens_T):
    """A sequence's logits; ``parts`` are the parameters by group and row."""
    x, counts = parts["embedding"][0]["token_VD"][tokens_T], {True: 0, False: 0}
    for layer, of_layer in enumerate(parts["attention"]):
        x = x + attention(x, of_layer, config)
        is_moe = layer >= config.num_dense_layers
        row = counts[is_moe]
        counts[is_moe] += 1
        if is_moe:
            x = x + mixture(x, parts["router"][row], parts["expert"][row], config, experts)
        else:
            mlp = parts["mlp"][row]
            x = x + swiglu(rms_norm(x, mlp["norm.scale"], config.norm_epsilon), mlp, "ffn.")
    head = parts["head"][0]
    matrix = parts["embedding"][0]["token_VD"].T if config.tied_embeddings else head["out.kernel"]
    return rms_norm(x, head["norm.scale"], config.norm_epsilon) @ matrix
