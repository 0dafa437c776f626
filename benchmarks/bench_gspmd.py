"""Comparison with plain GSPMD: the same model, optimizer and batch under ``jit`` with sharded arrays.

Parameters and moments are sharded over all devices (FSDP, ZeRO-3), experts along E, the batch by sequence;
XLA places the collectives. Tokens reach experts by GShard's one-hot einsums (arXiv 2006.16668) with the capacity of
a static placement, so the first loss is the same. Figures are CPU-seconds and wall time of an iteration on 8 emulated
devices, in turns:

- ``expert parallel``: 8 ranks, ``static`` and ``symi``, over GSPMD; with the demo's and the paper's tokens per rank;
- ``pipeline``: 2 x 2 x 2, dense and with experts, over GSPMD on the same devices and the same global batch. A pipeline
  idles in its bubbles and GSPMD does not, so it loses in wall time where links are fast. CPU-seconds exclude bubbles.
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
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from measure import Trainee, cost_of, demo, median, publish, ratio, turns
from pipeline_steps import Stepped, draw_batch, experiment

from swift.config.experiment import Experiment
from swift.data.windows import Batch
from swift.experts.config import SlotCapacity
from swift.experts.layer import Load
from swift.experts.placement.policy import Static
from swift.experts.placement.symi import Symi
from swift.experts.routing import balance_loss, count_choices, route
from swift.mesh.devices import emulate_devices
from swift.pipeline.step.spec import StepSpec
from swift.train.build import make_engine, make_loader

DEVICES = 8
AXIS = "devices"
LIMITS = {
    ("expert_parallel_demo", "symi"): 1.35,
    ("expert_parallel_paper", "symi"): 0.7,
    ("pipeline_dense", "pipeline"): 1.0,
    ("pipeline_experts", "pipeline"): 1.1,
}
"""Limits of the ratio of CPU-seconds to GSPMD's, with a margin for other machines."""
DEMO_SEQUENCES, PAPER_SEQUENCES = 16, 128


class Gspmd:
    """A training step in which only the shardings of arrays refer to several devices.

    Args:
        setup: experiment with the model and optimizer.
        spec: the step as this library runs it.
        batch: global batch with all micro-batches, the same for every step.
        num_groups: groups of tokens that share an expert's capacity, GShard's G.
    """

    def __init__(self, setup: Experiment, spec: StepSpec, batch: Batch, num_groups: int):
        self._experts, self._gpt, self._groups = setup.experts, spec.gpt, num_groups
        self._optimizer, self._pattern = spec.optimizer, setup.model.moe_layers
        self._mesh = Mesh(np.array(jax.devices()[:DEVICES]), (AXIS,))
        flat = jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), batch)
        self._batch = jax.device_put(flat, self._over(0, 2))
        weights = jax.jit(lambda key: self._gpt.unpack(self._gpt.init(key)))(jax.random.key(setup.seed))
        self._state = jax.tree.map(self._shard, (weights, self._optimizer.init(weights)))
        placed = jax.tree.map(lambda leaf: leaf.sharding, self._state)
        self._step = jax.jit(self._iterate, donate_argnums=0, out_shardings=(placed, None))

    def __call__(self) -> Any:
        """Runs one iteration and returns its loss."""
        self._state, loss = self._step(self._state, self._batch)
        return jax.block_until_ready(loss)

    def _over(self, dim: int, num_dims: int) -> NamedSharding:
        spec = [AXIS if index == dim else None for index in range(num_dims)]
        return NamedSharding(self._mesh, PartitionSpec(*spec))

    def _shard(self, leaf: jax.Array) -> jax.Array:
        """Shards an array along its first divisible dimension, which for expert weights is the expert dimension."""
        fitting = [dim for dim, size in enumerate(leaf.shape) if size % DEVICES == 0]
        return jax.device_put(leaf, self._over(fitting[0] if fitting else -1, leaf.ndim))

    def _iterate(self, state: Any, batch: Batch) -> Any:
        weights, moments = state
        gradients, loss = jax.grad(self._objective, has_aux=True)(weights, batch)
        updates, moments = self._optimizer.update(gradients, moments, weights)
        return (optax.apply_updates(weights, updates), moments), loss

    def _objective(self, weights: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        def moe(row: int, logits_TE: jax.Array, x_TD: jax.Array, valid_T: jax.Array, state: Any) -> Any:
            del row
            return self._mixture(logits_TE, x_TD, valid_T, state)

        x = self._gpt.embed(weights, batch.inputs)
        x, aux, _ = self._gpt.stage(weights, self._pattern, x, batch.valid, moe)
        loss = self._gpt.head_loss(weights, x, batch.labels, batch.valid) / batch.valid.sum()
        return loss + self._experts.aux_loss_coefficient * aux, loss

    def _mixture(self, logits_TE: jax.Array, x_TD: jax.Array, valid_T: jax.Array, state: Any) -> Any:
        """Computes GShard's layer. G: groups, T: tokens, E: experts, C: rows of an expert for a group, D: model dim."""
        config, groups = self._experts, self._groups
        assert config.top_k == 1, "one choice of a token has one place"
        assert isinstance(config.capacity, SlotCapacity)
        routing = route(logits_TE, config.gating)
        per_group = len(x_TD) // groups
        replicas = config.slots_per_rank * groups // config.num_classes
        rows = replicas * config.capacity.rows_per_slot(config, per_group, groups)
        is_class_GTE = jax.nn.one_hot(routing.choices_TK[:, 0].reshape(groups, -1), config.num_classes, dtype=jnp.int32)
        place_GT = jnp.sum((jnp.cumsum(is_class_GTE, axis=1) - 1) * is_class_GTE, axis=-1)
        is_row_GTC = jax.nn.one_hot(place_GT, rows, dtype=x_TD.dtype)  # zeros beyond the last row: dropped
        sends_GTEC = is_class_GTE.astype(x_TD.dtype)[..., None] * is_row_GTC[:, :, None]
        x_GTD = x_TD.reshape(groups, per_group, -1)
        rows_EGCD = jnp.einsum("gtec,gtd->egcd", sends_GTEC, x_GTD)
        rows_EGCD = jax.lax.with_sharding_constraint(rows_EGCD, self._over(0, 4))
        flat = rows_EGCD.reshape(config.num_classes, -1, x_TD.shape[1])
        out_EGCD = self._gpt.groups["expert"].module(state)(flat).reshape(rows_EGCD.shape)
        y_GTD = jnp.einsum("gtec,egcd->gtd", sends_GTEC, out_EGCD)
        y_TD = jax.lax.with_sharding_constraint(y_GTD, self._over(0, 3)).reshape(x_TD.shape) * routing.gates_TK
        popularity_E = count_choices(routing.choices_TK, valid_T[:, None], config.num_classes)
        aux = balance_loss(routing.probs_TE, valid_T, popularity_E, valid_T.sum(), config.top_k)
        return y_TD, aux, Load(popularity_E, popularity_E, popularity_E)


def in_turns(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Any]:
    """Measures CPU-seconds and milliseconds per iteration, in turns, and their ratios to GSPMD's."""
    cpu_s: dict[str, list[float]] = {name: [] for name in calls}
    wall_ms: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for call in calls.values():
        jax.block_until_ready(call())
    for name in turns(names, rounds):
        begun = time.perf_counter()
        cpu_s[name].append(cost_of(calls[name]))
        wall_ms[name].append(1000 * (time.perf_counter() - begun))
    return {
        "cpu_s": {name: median(values) for name, values in cpu_s.items()},
        "ms": {name: round(statistics.median(values), 1) for name, values in wall_ms.items()},
        "cpu_over_gspmd": {name: ratio(cpu_s, name, "gspmd") for name in names if name != "gspmd"},
        "ms_over_gspmd": {name: ratio(wall_ms, name, "gspmd") for name in names if name != "gspmd"},
    }


def expert_parallel(num_sequences: int, rounds: int) -> dict[str, Any]:
    """Compares eight ranks of the demo's model with GSPMD, after checking that they compute the same."""
    ours = {policy.name: Trainee(demo(policy, "decoupled", num_sequences)) for policy in (Static(), Symi())}
    setup = ours["static"].experiment
    batch = make_loader(setup, "train").batch(0)
    peer = Gspmd(setup, ours["static"].spec, batch, DEVICES)
    losses = float(np.ravel(jax.device_get(ours["static"]()["loss"]))[0]), float(peer())
    assert abs(losses[0] - losses[1]) < 1e-4, f"they compute different losses: {losses}"
    calls: dict[str, Callable[[], Any]] = {**ours, "gspmd": peer}
    return {"tokens_per_rank": setup.tokens_per_step // DEVICES, **in_turns(calls, rounds)}


def pipeline(rounds: int, *, moe: bool) -> dict[str, Any]:
    """Compares 2 pipelines of 2 stages of 2 expert ranks, 4 micro-batches each, with GSPMD on the same 8 devices."""
    setup = experiment((2, 2, 2), 4, moe=moe)
    batch = draw_batch(setup)
    with make_engine(setup, frozenset(), "none") as engine:
        ours = Stepped(engine, [batch])
        peer = Gspmd(setup, engine.spec, batch, len(batch.inputs) * 2)
        losses = float(np.ravel(jax.device_get(ours()))[0]), float(peer())
        assert abs(losses[0] - losses[1]) < 1e-4, f"they compute different losses: {losses}"
        return in_turns({"pipeline": ours, "gspmd": peer}, rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    emulate_devices(DEVICES)
    figures = {
        "expert_parallel_demo": expert_parallel(DEMO_SEQUENCES, rounds),
        "expert_parallel_paper": expert_parallel(PAPER_SEQUENCES, rounds),
        "pipeline_dense": pipeline(rounds, moe=False),
        "pipeline_experts": pipeline(rounds, moe=True),
    }
    headlines = {
        f"{name}: CPU-seconds of {ours} over GSPMD's": over["median"]
        for name, found in figures.items()
        for ours, over in found["cpu_over_gspmd"].items()
    }
    claims = {
        name: (headlines[f"{name}: CPU-seconds of {ours} over GSPMD's"], limit)
        for (name, ours), limit in LIMITS.items()
    }
    return publish("against GSPMD, 8 emulated devices", {**figures, "headlines": headlines}, claims)


if __name__ == "__main__":
    sys.exit(main())
