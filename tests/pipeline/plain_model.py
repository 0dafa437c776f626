"""Training of the plain single-device model of an experiment, and whether another's is the same.

Legend: P stages, L MoE layers, C and E classes, N expert ranks, S slots, W parameters.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from swift.experts.layer import Load
from swift.experts.routers import TopK
from swift.models.reference_model import plain_sums
from swift.train.build import make_step_spec
from tests.pipeline.cases import NUM_CLASSES, Case, experiment_of


class Plain(NamedTuple):
    """An iteration of the plain model."""

    loss: Any
    aux: Any
    popularity: Any  # [all MoE layers, E]
    dropped: Any
    overflowed: Any
    numbers: Any  # sums by name, over all tokens
    norm: Any
    gradients: Any


@cache
def plain_training(case: Case) -> tuple[Callable, Callable]:
    """(an iteration of AdamW on whole classes: (state, batch) -> (state, Plain), the state before the first)."""
    setup = experiment_of(case)
    spec = make_step_spec(setup)
    policy, num_stages, rows_PL = spec.policy, spec.num_stages, spec.cut.model_index(is_moe=True)
    is_row_PL = rows_PL >= 0

    def objective(params, placement_PLNS, batch):
        weights, placement_LNS = spec.gpt.unpack(params), placement_PLNS[is_row_PL]

        def add(sums, microbatch):
            *losses, loads = plain_sums(
                replace(spec.gpt, kernel="plain"), spec.experts, weights, placement_LNS, *microbatch
            )
            load = jax.tree.map(lambda *rows: jnp.stack(rows), *loads) if loads else Load(*(no_load,) * 3)
            return jax.tree.map(jnp.add, sums, (*losses, *load)), None

        no_load = jnp.zeros((len(placement_LNS), NUM_CLASSES), jnp.int32)
        no_numbers = jax.tree.map(lambda leaf: jnp.zeros((len(placement_LNS), *leaf.shape)), spec.number_shapes)
        (loss, aux, *load), _ = lax.scan(add, (jnp.zeros(()), jnp.zeros(()), *(no_load,) * 3, no_numbers), batch)
        loss, aux = loss / (batch.valid if batch.weights is None else batch.weights).sum(), aux / len(batch.valid)
        return loss + spec.experts.auxiliary_weight * aux, (loss, aux, *load)

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # to compile is most of what it takes
    def iterate(state, batch):
        params, moments, placement_PLNS, policy_P = state
        (_, (loss, aux, popularity, *drops)), raw = jax.value_and_grad(objective, has_aux=True)(
            params, placement_PLNS, batch
        )
        norm = optax.tree.norm(raw)
        scale = 1.0 if case.clip_norm is None else jnp.minimum(1, case.clip_norm / norm)
        updates, moments = spec.optimizer.update(jax.tree.map(lambda g: g * scale, raw), moments, params)
        if popularity.size:
            by_stage = jnp.where(is_row_PL[..., None], popularity[rows_PL], 0)
            placement_PLNS, policy_P = jax.vmap(policy)(by_stage, placement_PLNS, policy_P)
        updated = optax.apply_updates(params, updates)
        if setup.experts.router.init_state(NUM_CLASSES):
            updated["router"] = balanced(updated["router"], params["router"], popularity)
        after = updated, moments, placement_PLNS, policy_P
        return after, Plain(loss, aux, popularity, *drops, norm, raw)

    def balanced(router_LCW, before_LCW, popularity_LE):
        """Routers with the states that follow from the load.

        Biases have moved by the rate, up where an expert had less than its share of the tokens.
        """
        group, router = spec.gpt.groups["router"], setup.experts.router
        if not isinstance(router, TopK):
            weights, before = group.unpack(router_LCW[:, 0]), group.unpack(before_LCW[:, 0])
            old = {name: before[name].get_value() for name in router.init_state(NUM_CLASSES)}
            for layer, popularity_E in enumerate(popularity_LE):
                new = router.update_state({name: value[layer] for name, value in old.items()}, popularity_E)
                old = {name: value.at[layer].set(new[name]) for name, value in old.items()}
            for name, value in old.items():
                weights[name].set_value(value)
            return group.pack(weights)[:, None]
        rate = router.bias_update_rate
        lacks_LE = popularity_LE * NUM_CLASSES < popularity_LE.sum(axis=1, keepdims=True)
        exceeds_LE = popularity_LE * NUM_CLASSES > popularity_LE.sum(axis=1, keepdims=True)
        weights, before = group.unpack(router_LCW[:, 0]), group.unpack(before_LCW[:, 0])
        moved = before["bias_E"].get_value() + rate * (1.0 * lacks_LE - exceeds_LE)
        weights["bias_E"].set_value(moved)
        return group.pack(weights)[:, None]

    def first(params, placement_PLNS):
        params = jax.tree.map(jnp.asarray, params)
        return params, spec.optimizer.init(params), placement_PLNS, np.zeros(num_stages, np.uint32)

    return iterate, first


def assert_metrics(found: dict[str, np.ndarray], expected: Plain) -> None:
    """Checks the metrics of an iteration against the plain model."""
    np.testing.assert_allclose(found["loss"], expected.loss, rtol=1e-10)
    np.testing.assert_allclose(found["aux_loss"], expected.aux, rtol=1e-10)
    np.testing.assert_allclose(found["grad_norm"], expected.norm, rtol=1e-10)
    np.testing.assert_array_equal(found["popularity"], expected.popularity)
    np.testing.assert_array_equal(found["dropped"], expected.dropped)
    np.testing.assert_array_equal(found["overflowed"], expected.overflowed)
    assert found.get("numbers", {}).keys() == dict(expected.numbers).keys()
    for name, (total, weight) in dict(expected.numbers).items():
        value = total if weight is None else total / weight[:, None]
        np.testing.assert_allclose(found["numbers"][name], value, rtol=1e-10)


def assert_close(spec, name: str, found, wanted, tolerance: float) -> None:
    """Rows of a group, parameter by parameter and layer by layer, relative to the largest; none may be all zeros."""
    unpack = spec.gpt.groups[name].unpack
    pairs = zip(jax.tree.leaves(unpack(np.asarray(found))), jax.tree.leaves(unpack(np.asarray(wanted))), strict=True)
    for leaf, (ours, plain) in enumerate(pairs):
        axes = tuple(range(1, plain.ndim))
        largest = np.abs(plain).max(axis=axes)
        if is_bias(spec, name, leaf) and not plain.any():  # the gradient of what has none
            assert not ours.any()
            continue
        assert (largest > 0).all(), (name, leaf)
        errors = np.abs(ours - plain).max(axis=axes) / largest
        assert (errors < tolerance).all(), (name, leaf, errors)


def is_bias(spec, group: str, leaf: int) -> bool:
    """Whether a parameter is a router's state, such as the biases by which experts are chosen."""
    names = spec.gpt.router.init_state(NUM_CLASSES)
    sizes = list(itertools.accumulate(spec.gpt.groups["router"].sizes, initial=0))
    return group == "router" and sizes[leaf] in [spec.gpt.groups["router"].span(name)[0] for name in names]
