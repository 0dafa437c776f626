"""Training steps to compare on one global batch: interpreted, on a single worker, and without this library."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from swift.config.experiment import Experiment
from swift.data.windows import Batch
from swift.experts.config import ExpertConfig
from swift.experts.layer import expert_parallel_moe
from swift.experts.optimizer import OptimizerConfig
from swift.mesh.per_rank import RANKED, REPLICATED, SHARED
from swift.models.config import Remat, model_size
from swift.pipeline.reconfigure.configuration import batch_of_rows
from swift.pipeline.reconfigure.engine import Engine
from swift.pipeline.step.single_worker import put_batch, single_worker_step
from swift.pipeline.step.spec import StepSpec
from swift.pipeline.step.tick_arrays import table_arrays
from swift.pipeline.step.train_step import barrier_step
from swift.schedules.lowering.tick_table import TickTable
from swift.topology import Topology, Worker
from swift.train.build import make_engine, make_step_spec

SEQUENCES = 4  # of a micro-batch


def experiment(shape: tuple[int, int, int], num_microbatches: int, *, moe: bool, remat: Remat = "none") -> Experiment:
    """Builds the demo's experiment with pipeline parallelism; 8 experts, each with at least one slot."""
    topology = Topology(*shape)
    return Experiment(
        model=replace(model_size("demo"), moe_pattern=(moe,)),
        experts=ExpertConfig(num_classes=8, slots_per_rank=8 // topology.num_expert_ranks),
        topology=topology,
        optimizer=OptimizerConfig(clip_norm=None),
        num_microbatches=num_microbatches,
        sequences_per_microbatch=SEQUENCES,
        remat=remat,
    )


class Pipelined:
    """An iteration run by the tick interpreter, even with only one worker."""

    def __init__(self, setup: Experiment, failed: frozenset[Worker], batch: Batch):
        engine = make_engine(setup, failed, "none")
        self.spec, self.plan, self.table = engine.spec, engine.configuration, engine.configuration.plans[1].table
        live = self.spec.live
        self.rows = live.put(batch_of_rows([batch], self.table, self.plan.pipeline_D, live.num_ranks), RANKED)
        self.run, self.compile_s = self.compiled(self.table)
        self.state = self.spec.init(jax.random.key(0))

    def compiled(self, table: TickTable) -> tuple[Callable[..., Any], float]:
        """Compiles the program of a table, and measures the seconds."""
        live, (common, columns) = self.spec.live, table_arrays(table)
        arrays = live.put(common, REPLICATED), live.put(columns, SHARED)
        started = time.perf_counter()
        lowered = barrier_step(self.spec, table).lower(self.spec.abstract(with_slots=True), *arrays, self.rows)
        call = lowered.compile()
        return lambda state, rows: call(state, *arrays, rows), time.perf_counter() - started

    def __call__(self) -> Any:
        """One iteration; its loss."""
        self.state, metrics = self.run(self.state, self.rows)
        return metrics["loss"]


class Plain:
    """The same model, optimizer and batch on one device, in plain JAX and optax."""

    def __init__(self, setup: Experiment, batch: Batch):
        spec = single_worker_program(setup, batch)
        gpt, optimizer = spec.gpt, spec.optimizer
        classes = jnp.arange(8, dtype=jnp.int32)
        placement_LNS = jnp.broadcast_to(classes, (spec.num_moe_layers, 1, 8))
        aux_weight = setup.experts.aux_loss_coefficient * batch.valid.sum() / len(batch.inputs)

        def moe(row: int, logits_TE: Any, x_TD: Any, valid_T: Any, state: Any) -> Any:
            apply = gpt.groups["expert"].module(state)
            return expert_parallel_moe(spec.experts, logits_TE, x_TD, valid_T, placement_LNS[row], apply)

        def objective(weights: Any, microbatch: Any) -> tuple[jax.Array, jax.Array]:
            x, valid = gpt.embed(weights, microbatch.inputs), microbatch.valid
            y, aux, _ = gpt.stage(weights, gpt.config.moe_layers, x, valid, moe)
            loss = gpt.head_loss(weights, y, microbatch.labels, valid)
            return loss + aux_weight * aux, loss

        def iterate(weights: Any, moments: Any, batch: Any) -> Any:
            def accumulate(total: Any, microbatch: Any) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, total, jax.grad(objective, has_aux=True)(weights, microbatch)), None

            none = jax.tree.map(jnp.zeros_like, (weights, jnp.zeros(())))
            (gradients, loss), _ = jax.lax.scan(accumulate, none, batch)
            tokens = batch.valid.sum()
            updates, moments = optimizer.update(jax.tree.map(lambda g: g / tokens, gradients), moments, weights)
            return optax.apply_updates(weights, updates), moments, loss / tokens

        everywhere = PartitionSpec()
        on_one_rank = jax.shard_map(
            iterate, mesh=spec.live.mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
        )
        self.weights = jax.jit(lambda key: gpt.unpack(gpt.init(key)))(jax.random.key(0))
        self.moments, self.batch = optimizer.init(self.weights), jax.device_put(batch)
        self.iterate = jax.jit(on_one_rank, donate_argnums=(0, 1))

    def __call__(self) -> Any:
        """One iteration; its loss."""
        self.weights, self.moments, loss = self.iterate(self.weights, self.moments, self.batch)
        return loss


class Lone:
    """The library's step for a single worker, which does not split the backward pass."""

    def __init__(self, setup: Experiment, batch: Batch):
        spec = single_worker_program(setup, batch)
        self.step, self.rows = single_worker_step(spec), put_batch(batch, spec.live)
        self.state = spec.init(jax.random.key(0))

    def __call__(self) -> Any:
        """One iteration; its loss."""
        self.state, metrics = self.step(self.state, self.rows)
        return metrics["loss"]


def single_worker_program(setup: Experiment, batch: Batch) -> StepSpec:
    """Builds the step that computes the whole global batch on one rank, which has a slot for every expert."""
    alone = replace(setup, topology=Topology(), experts=replace(setup.experts, slots_per_rank=8))
    return replace(make_step_spec(alone), num_microbatches=len(batch.inputs))


def draw_batch(setup: Experiment) -> Batch:
    """Draws a global batch of random bytes."""
    shape = (setup.topology.num_pipelines * setup.num_microbatches, SEQUENCES, setup.model.sequence_length + 1)
    tokens = np.random.default_rng(0).integers(0, 256, shape, dtype=np.int32)
    return Batch(tokens[..., :-1], tokens[..., 1:], np.ones((*shape[:2], shape[2] - 1), bool))


class Stepped:
    """An engine that trains on the same batches repeatedly."""

    def __init__(self, engine: Engine, batches: list[Batch]):
        self.engine, self.batches = engine, batches
        self.state = engine.spec.init(jax.random.key(0))

    def __call__(self) -> Any:
        """Runs a window, or as many single iterations, and returns the last loss."""
        outcome = self.engine.start(self.state, self.batches, self.engine.put(self.batches))()
        assert not outcome.was_discarded
        self.state = outcome.state
        return outcome.metrics[-1]["loss"]
