"""The model and its optimizer in numpy, written from the papers' formulas; nothing here comes from the package.

The plain model, which all parallel runs are held against, shares routing, the auxiliary loss, the head and the experts
with them: what is wrong in both is found only against a third. Everything is float64, and gradients are finite
differences, so that no derivation can share a mistake either.

Legend: T tokens, K choices, E classes, B sequences, D model dim, V vocabulary.
"""

import math

import numpy as np


def softmax(x):
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def layer_norm(x, scale, bias):
    """Layer normalization (Ba et al. 2016)."""
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-6) * scale + bias


def gelu(x):
    """GELU by its tanh (Hendrycks and Gimpel 2016, section 2)."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def feed_forward(x, up, down):
    return gelu(x @ up) @ down


def routing(logits_TE, top_k):
    """(classes, gates, probabilities): for one choice Switch's gate (eq. 2), for several GShard's part of their sum."""
    probs_TE = softmax(logits_TE)
    choices_TK = np.argsort(-logits_TE, axis=-1, kind="stable")[:, :top_k]
    gates_TK = np.take_along_axis(probs_TE, choices_TK, axis=-1)
    return choices_TK, gates_TK / gates_TK.sum(axis=-1, keepdims=True) if top_k > 1 else gates_TK, probs_TE


def balance_loss(choices_TK, probs_TE, valid_T):
    """Switch, eq. 4 to 6, without its coefficient: E * sum of f_e * P_e, over the tokens that are no padding."""
    num_classes = probs_TE.shape[1]
    if not valid_T.any():
        return 0.0
    wanted_E = np.bincount(choices_TK[valid_T].ravel(), minlength=num_classes)
    return float(num_classes * np.sum(wanted_E / wanted_E.sum() * probs_TE[valid_T].mean(axis=0)))


def kept_by_slot(choices_TK, valid_T, replicas_E, rows_per_slot):
    """The choices of a source rank's tokens that find room, in token order, then choice order."""
    used_E, kept_TK = np.zeros_like(replicas_E), np.zeros(choices_TK.shape, bool)
    for token, choices in enumerate(choices_TK):
        for nth, its_class in enumerate(choices):
            if valid_T[token]:
                kept_TK[token, nth] = used_E[its_class] < replicas_E[its_class] * rows_per_slot
                used_E[its_class] += 1
    return kept_TK


def mixture(x_TD, choices_TK, gates_TK, kept_TK, up_EDF, down_EFD):
    """Every token's kept experts, weighted by their gates."""
    y_TD = np.zeros_like(x_TD)
    for token, nth in np.argwhere(kept_TK):
        its_class = choices_TK[token, nth]
        y_TD[token] += gates_TK[token, nth] * feed_forward(x_TD[token], up_EDF[its_class], down_EFD[its_class])
    return y_TD


def causal_attention(x_BTD, qkv, out, num_heads):
    """Multi-head attention (Vaswani et al. 2017) of each position to itself and those before it."""
    batch, length, dim = x_BTD.shape
    heads = (x_BTD @ qkv).reshape(batch, length, 3, num_heads, dim // num_heads)
    mixed = np.zeros((batch, length, num_heads, dim // num_heads))
    for position in range(length):
        query, keys, values = heads[:, position, 0], heads[:, : position + 1, 1], heads[:, : position + 1, 2]
        weights = softmax(np.einsum("bhc,bshc->bhs", query, keys) / math.sqrt(dim // num_heads))
        mixed[:, position] = np.einsum("bhs,bshc->bhc", weights, values)
    return mixed.reshape(batch, length, dim) @ out


def head_loss(x_BTD, scale, bias, out_DV, labels_BT, valid_BT):
    """The sum of the valid tokens' cross-entropies, in nats."""
    probs_BTV = softmax(layer_norm(x_BTD, scale, bias) @ out_DV)
    return float(-np.log(np.take_along_axis(probs_BTV, labels_BT[..., None], axis=-1)[..., 0])[valid_BT].sum())


def learning_rate(step, peak, final, warmup_steps, num_steps):
    """The rate of the iteration ``step``, from 1: a line to the peak, then half a cosine (SGDR, eq. 5) to the end."""
    if step < warmup_steps:
        return peak * step / warmup_steps
    share = (step - warmup_steps) / (num_steps - warmup_steps)
    return final + (peak - final) * (1 + math.cos(math.pi * share)) / 2


def adamw(weights, gradients, rates, b1, b2, weight_decay, eps=1e-8):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2), after as many steps as there are gradients and rates."""
    first = second = np.zeros_like(weights)
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        first = b1 * first + (1 - b1) * gradient
        second = b2 * second + (1 - b2) * gradient**2
        adam = first / (1 - b1**step) / (np.sqrt(second / (1 - b2**step)) + eps)
        weights = weights - rate * (adam + weight_decay * weights)
    return weights


def slope(function, at, direction, step=1e-5):
    """The derivative of a function of one array along a direction, by central differences."""
    return (function(at + step * direction) - function(at - step * direction)) / (2 * step)
