"""DeepSpeed's gates: what is kept and lost, gates, auxiliary loss, against numpy written from its published rules."""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swift.errors import SettingError
from swift.experts.config import ExpertConfig, SlotCapacity
from swift.experts.layer import expert_parallel_moe
from swift.experts.placement.policy import Static
from swift.experts.reference import reference_moe
from swift.experts.routers import NoisyTopK, TopK
from swift.mesh.per_rank import EXPERT_AXIS

CASES = [  # choices, experts, ranks, slots of a rank, tokens of a rank, capacity factor, least capacity
    (1, 4, 2, 2, 12, 1.0, 4),
    (1, 6, 2, 3, 17, 0.5, 0),
    (1, 3, 3, 2, 9, 1.25, 1),
    (2, 4, 2, 2, 12, 1.0, 4),
    (2, 5, 5, 2, 11, 0.6, 2),
    (2, 4, 4, 4, 16, None, 4),
]


def deepspeed(logits_TE, top_k, factor, least):
    """The gates [T, E] of the kept choices, zero elsewhere, the auxiliary loss, and the choices by expert of one rank.

    As in its top1gating and top2gating without random choices: what finds an expert full, first choices first, is lost.
    """
    num_tokens, num_classes = logits_TE.shape
    weights_TE = np.exp(logits_TE - logits_TE.max(axis=1, keepdims=True))
    gates_TE = weights_TE / weights_TE.sum(axis=1, keepdims=True)
    room = num_tokens
    if factor is not None:
        room = max(math.ceil(num_tokens / num_classes * factor * top_k - 1e-9), least)
    first_T = gates_TE.argmax(axis=1)
    second_T = np.where(np.arange(num_classes) == first_T[:, None], -np.inf, logits_TE).argmax(axis=1)
    taken_E, kept_TE = np.zeros(num_classes, int), np.zeros_like(gates_TE)
    for choice_T in (first_T, second_T)[:top_k]:
        for token, expert in enumerate(choice_T):
            if taken_E[expert] < room:
                kept_TE[token, expert] = gates_TE[token, expert]
            taken_E[expert] += 1
    if top_k == 2:
        kept_TE /= np.maximum(kept_TE.sum(axis=1, keepdims=True), np.finfo(np.float32).eps)
    chosen_E = np.bincount(first_T, minlength=num_classes) / num_tokens
    return kept_TE, num_classes * np.sum(chosen_E * gates_TE.mean(axis=0)), taken_E


@cache
def layer(case):
    """The layer on all ranks, whose outputs are the gates, each in the column of its expert; and the reference."""
    top_k, classes, ranks, slots, _, factor, least = case
    config = ExpertConfig(classes, slots, top_k, SlotCapacity(factor, "deepspeed", least))
    placement_NS = Static().init(1, classes, ranks, slots)[0][0]
    weights_EDE = jnp.broadcast_to(jnp.eye(classes)[:, None] / classes, (classes,) * 3)

    def of_rank(logits_TE):
        x_TD, valid_T = jnp.ones((len(logits_TE), classes)), jnp.ones(len(logits_TE), bool)
        mine_S = placement_NS[jax.lax.axis_index(EXPERT_AXIS)]
        apply = lambda rows, matmul: matmul(rows, weights_EDE[mine_S])  # noqa: E731
        return expert_parallel_moe(config, logits_TE, x_TD, valid_T, placement_NS, apply)

    def plain(logits_NTE):
        logits_TE = logits_NTE.reshape(-1, classes)
        x_TD, valid_T = jnp.ones((len(logits_TE), classes)), jnp.ones(len(logits_TE), bool)
        apply = lambda x_TD: jnp.einsum("td,edf->etf", x_TD, weights_EDE)  # noqa: E731
        return reference_moe(config, logits_TE, x_TD, valid_T, placement_NS, ranks, apply)

    return jax.jit(jax.vmap(of_rank, axis_name=EXPERT_AXIS)), jax.jit(plain)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_kept_and_lost_is_what_deepspeed_keeps_and_loses(case):
    """50 cases of random logits for each, even and skewed."""
    top_k, classes, ranks, _, tokens, factor, least = case
    parallel, plain = layer(case)
    has_lost = False
    for seed in range(50):
        random = np.random.default_rng(seed)
        logits_NTE = random.standard_normal((ranks, tokens, classes)) + random.choice([0, 2]) * np.arange(classes)
        logits_NTE = logits_NTE.astype(np.float32)
        y_NTE, aux_N, load = jax.device_get(parallel(logits_NTE))
        expected = [deepspeed(logits_TE.astype(float), top_k, factor, least) for logits_TE in logits_NTE]
        kept_NTE = np.stack([kept for kept, *_ in expected])
        np.testing.assert_array_equal(y_NTE > 0, kept_NTE > 0)
        np.testing.assert_allclose(y_NTE, kept_NTE, rtol=2e-5, atol=1e-7)
        np.testing.assert_allclose(aux_N.sum(), np.mean([aux for _, aux, _ in expected]), rtol=1e-5)
        np.testing.assert_array_equal(load.popularity_E, [counts_E for *_, counts_E in expected])
        np.testing.assert_array_equal(
            load.popularity_E - load.dropped_E, [(kept > 0).sum(axis=0) for kept, *_ in expected]
        )
        has_lost |= bool(load.dropped_E.any())
        y_TE, aux, total = jax.device_get(plain(logits_NTE))
        np.testing.assert_allclose(y_TE, kept_NTE.reshape(-1, classes), rtol=2e-5, atol=1e-7)
        np.testing.assert_allclose(aux, aux_N.sum(), rtol=1e-5)
        np.testing.assert_array_equal(total.dropped_E, load.dropped_E.sum(axis=0))
    assert has_lost or factor is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rules": "gshard"}, r"SlotCapacity\.rules = 'gshard': must be one of swift, deepspeed"),
        ({"rules": "deepspeed", "min_capacity": -1}, r"SlotCapacity\.min_capacity = -1: must be a whole number of at"),
    ],
)
def test_rules_that_cannot_work(settings, message):
    with pytest.raises(SettingError, match=message):
        SlotCapacity(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_k": 3}, r"ExpertConfig\.top_k = 3: must be 1 or 2 with SlotCapacity\.rules = 'deepspeed'"),
        ({"router": TopK("sigmoid")}, r"TopK\.scores = 'sigmoid': must be 'softmax' with SlotCapacity\.rules"),
        ({"router": TopK(gate_scale=2.5)}, r"TopK\.gate_scale = 2\.5: must be 1\.0 with SlotCapacity\.rules"),
        ({"router": NoisyTopK()}, r"ExpertConfig\.router = .*: must be @TopK\(\) with SlotCapacity\.rules"),
    ],
)
def test_routers_that_deepspeed_does_not_have(settings, message):
    with pytest.raises(SettingError, match=message):
        ExpertConfig(capacity=SlotCapacity(rules="deepspeed"), **settings)
