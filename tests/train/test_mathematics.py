"""The law: a parallel iteration is the plain single-device model's iteration, whatever the placement and the ranks."""

import itertools
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.config.experiment import Experiment
from swift.data.windows import Batch
from swift.experts.config import Capacity, ExactCapacity, ExpertConfig, RankCapacity, SlotCapacity
from swift.experts.optimizer import OptimizerConfig
from swift.experts.placement.flexmoe import FlexMoE
from swift.experts.placement.packed import MinMax
from swift.experts.placement.policy import Static
from swift.mesh.per_rank import RANKED, SHARED
from swift.models.config import ModelConfig
from swift.models.reference_model import plain_sums
from swift.pipeline.state import TrainState
from swift.pipeline.step.single_worker import put_batch, single_worker_gradients, single_worker_step
from swift.pipeline.step.spec import materialize_all
from swift.topology import Topology
from swift.train.build import make_step_spec
from tests.case_tiers import tiered

pytestmark = pytest.mark.usefixtures("x64")

NUM_CLASSES = 4
MODEL = ModelConfig(num_layers=2, model_dim=16, num_heads=2, ffn_dim=24, sequence_length=6, moe_pattern=(False, True))
VOCAB = 256


@dataclass(frozen=True)
class Shuffled:
    """A policy of a user's own: a random, unsorted placement every iteration, whatever the popularity."""

    name = "shuffled"

    def init(self, num_layers, num_classes, num_ranks, slots_per_rank):
        placement, _ = Static().init(num_layers, num_classes, num_ranks, slots_per_rank)
        return placement, jnp.zeros((), jnp.uint32)

    def __call__(self, popularity_LE, placement_LNS, state):
        num_layers, num_classes = popularity_LE.shape
        key = jax.random.fold_in(jax.random.key(1), state)
        slots = placement_LNS[0].size
        extra = jax.random.randint(key, (num_layers, slots - num_classes), 0, num_classes, jnp.int32)
        all_classes = jnp.broadcast_to(jnp.arange(num_classes, dtype=jnp.int32), (num_layers, num_classes))
        flat = jnp.concatenate([all_classes, extra], axis=1)
        shuffled = jax.random.permutation(jax.random.fold_in(key, 1), flat, axis=1, independent=True)
        return shuffled.reshape(placement_LNS.shape), state + jnp.uint32(1)


class Case(NamedTuple):
    """Programs that are compiled once and run on many inputs."""

    ranks: int = 2
    top_k: int = 1
    capacity: Capacity = SlotCapacity()
    microbatches: int = 1
    slots: int = 4
    kind: str = "emulated"
    layout: str = "decoupled"
    policy: object = Shuffled()
    sequences: int = 8
    embedding: str = "replicated"
    head: str = "replicated"
    weighs: bool = False


CASES = {
    "one rank": Case(ranks=1, capacity=SlotCapacity(None)),
    "one rank, drops": Case(ranks=1, top_k=2, capacity=SlotCapacity(0.7), microbatches=2),
    "two ranks": Case(ranks=2, microbatches=2),
    "two ranks, no drops": Case(ranks=2, top_k=2, capacity=SlotCapacity(None)),
    "eight ranks, drops": Case(ranks=8, top_k=2, capacity=SlotCapacity(0.6), slots=2),
    "eight ranks, three slots": Case(ranks=8, microbatches=2, slots=3),
    "eight virtual ranks": Case(ranks=8, top_k=2, microbatches=2, slots=2, kind="virtual"),
    "three virtual ranks": Case(ranks=3, slots=2, kind="virtual", sequences=6),
    "capacity by rank": Case(ranks=4, top_k=2, capacity=RankCapacity(0.9), microbatches=2, slots=2),
    "capacity by rank, eight ranks": Case(ranks=8, slots=3, capacity=RankCapacity()),
    "capacity by rank, no drops": Case(ranks=3, top_k=2, capacity=RankCapacity(None), slots=2, sequences=6),
    "capacity by rank, virtual ranks": Case(ranks=4, top_k=2, slots=2, kind="virtual", capacity=RankCapacity()),
    "exact capacity": Case(ranks=4, top_k=2, microbatches=2, slots=2, capacity=ExactCapacity()),
    "tokens that go to a rank once": Case(
        ranks=2, top_k=3, microbatches=2, slots=3, kind="virtual", capacity=ExactCapacity()
    ),
    "exact capacity, virtual ranks": Case(ranks=3, slots=2, kind="virtual", sequences=6, capacity=ExactCapacity()),
    "a sharded head": Case(ranks=3, slots=2, kind="virtual", sequences=6, microbatches=2, head="sharded"),
    "a sharded embedding": Case(ranks=8, slots=2, microbatches=2, embedding="sharded"),
    "a sharded embedding and head": Case(
        ranks=3, slots=2, kind="virtual", sequences=6, microbatches=2, embedding="sharded", head="sharded"
    ),
    "weights": Case(ranks=3, slots=2, sequences=6, microbatches=2, weighs=True),
}


QUICK = ("eight ranks, drops", "capacity by rank", "weights")
LONG = ("tokens that go to a rank once", "exact capacity, virtual ranks")


def experiment(case):
    return Experiment(
        model=MODEL,
        experts=ExpertConfig(NUM_CLASSES, case.slots, case.top_k, case.capacity, 0.05),
        placement=case.policy,
        topology=Topology(num_expert_ranks=case.ranks),
        ranks=case.kind,
        optimizer=OptimizerConfig(warmup_steps=2, clip_norm=0.5, layout=case.layout),
        compute_dtype="float64",
        embedding=case.embedding,
        head=case.head,
        num_steps=40,
        num_microbatches=case.microbatches,
        sequences_per_microbatch=case.sequences,
    )


@cache
def compiled(case):
    """(program, gradients of the parallel model, objective and gradients of the plain one)."""
    spec = replace(make_step_spec(experiment(case)), weighs_tokens=case.weighs)

    def gradients(master, placement_LNS, batch):
        slots = materialize_all(spec, master, placement_LNS)
        return single_worker_gradients(spec, TrainState(None, None, None, slots, placement_LNS, None), batch)

    parallel = jax.jit(spec.live.per_rank(gradients, (RANKED, SHARED, RANKED), (RANKED, SHARED)))
    return spec, parallel, jax.jit(plain_gradients(spec))


def plain_gradients(spec):
    def objective(params, placement_LNS, batch):
        weights, gpt = spec.gpt.unpack(params), replace(spec.gpt, head_ranks=1, embedding_ranks=1)
        weight = (batch.valid if batch.weights is None else batch.weights).sum()
        loss, aux, loads = jnp.zeros(()), jnp.zeros(()), []
        for m in range(batch.inputs.shape[0]):
            microbatch = jax.tree.map(lambda leaf: leaf[m], batch)  # noqa: B023 - used at once
            one_loss, one_aux, load = plain_sums(gpt, spec.experts, weights, placement_LNS, *microbatch)
            loss, aux = loss + one_loss, aux + one_aux
            loads.append(jax.tree.map(lambda *rows: jnp.stack(rows), *load))
        weight = jnp.maximum(weight, 1)
        aux = aux / batch.inputs.shape[0]
        total = jax.tree.map(lambda *parts: sum(parts), *loads)
        return loss / weight + spec.experts.aux_loss_coefficient * aux, (loss / weight, aux, total)

    return jax.value_and_grad(objective, has_aux=True)


def draw_batch(case, seed, padding=True):
    random = np.random.default_rng(seed)
    shape = (case.microbatches, case.sequences, MODEL.sequence_length)
    tokens = random.integers(0, VOCAB, (*shape[:2], shape[2] + 1), dtype=np.int32)
    valid = np.ones(shape, bool)
    if padding:
        lengths = random.integers(0, shape[2] + 1, shape[:2])
        valid = np.arange(shape[2]) < lengths[..., None]
    weights = (random.integers(0, 3, valid.shape) / 2 * valid).astype(np.float32) if case.weighs else None
    return Batch(tokens[..., :-1], tokens[..., 1:], valid, weights=weights)


def draw_placement(case, seed):
    random = np.random.default_rng(seed)
    slots = case.ranks * case.slots
    classes = np.concatenate([np.arange(NUM_CLASSES), random.integers(0, NUM_CLASSES, slots - NUM_CLASSES)])
    return random.permutation(classes).astype(np.int32).reshape(1, case.ranks, case.slots)


def draw_params(spec, seed):
    """Whole classes away from where training starts, where norms are all ones and their biases all zeros."""
    random = np.random.default_rng(seed)
    groups = spec.gpt.groups.items()
    return {name: 0.3 * random.standard_normal((g.num_layers, g.num_classes, g.size)) for name, g in groups}


def assert_close(spec, actual, expected, tolerance):
    """Parameter by parameter, relative to its largest magnitude; none may be all zeros."""
    actual, expected = jax.device_get((actual, expected))  # emulated devices may deadlock on many small programs
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(spec.gpt.unpack(expected)),
        jax.tree.leaves(spec.gpt.unpack(actual)),
        strict=True,
    )
    for (name, wanted), found in pairs:
        assert np.abs(wanted).max() > 0, jax.tree_util.keystr(name)
        error = np.abs(wanted - found).max() / np.abs(wanted).max()
        assert error < tolerance, (jax.tree_util.keystr(name), error)


@pytest.mark.parametrize("case", tiered(CASES, QUICK, LONG))
@settings(max_examples=8, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**16))
def test_gradients_are_those_of_the_plain_model(case, seed):
    spec, parallel, plain = compiled(case)
    placement_LNS, batch = draw_placement(case, seed), draw_batch(case, seed)
    batch.valid[0, 0, 0] = True  # gradients of no token at all are zeros
    if batch.weights is not None:
        batch.weights[0, 0, 0] = 1
    params = draw_params(spec, seed)
    master = {name: spec.layouts[name].init(p, None)[None] for name, p in params.items()}
    inputs = spec.live.put((master, placement_LNS[None]), (RANKED, SHARED))

    gradients, sums = jax.device_get(parallel(*inputs, put_batch(batch, spec.live)))
    (_, (loss, aux, load)), expected = plain(params, placement_LNS, batch)

    whole = {name: spec.layouts[name].classes(g[0], None) for name, g in gradients.items()}
    assert_close(spec, whole, expected, 1e-10)
    weight = sums.tokens if sums.weight is None else sums.weight
    np.testing.assert_allclose(sums.loss[0] / weight[0], loss, rtol=1e-10)
    np.testing.assert_allclose(sums.aux[0] / case.microbatches, aux, rtol=1e-10)
    np.testing.assert_array_equal(sums.load.popularity_E[0], load.popularity_E)
    np.testing.assert_array_equal(sums.load.dropped_E[0], load.dropped_E)
    np.testing.assert_array_equal(sums.load.overflowed_E[0], load.overflowed_E)
    assert sums.load.popularity_E.sum() == sums.tokens[0] * case.top_k
    if isinstance(case.capacity, ExactCapacity) or case.capacity.factor is None:
        assert not sums.load.dropped_E.any()


def plain_training(spec, experiment, params, batches):
    """AdamW on whole classes, with the policy's placements: what a program without a mesh would do."""
    config, ranks = spec.experts, experiment.topology.num_expert_ranks
    placement, policy = spec.policy.init(1, config.num_classes, ranks, config.slots_per_rank)
    gradients_of, optimizer = plain_gradients(spec), spec.optimizer

    @jax.jit
    def iterate(params, moments, placement, policy, batch):
        (_, (_, _, load)), gradients = gradients_of(params, placement, batch)
        scale = jnp.minimum(1, spec.clip_norm / optax.tree.norm(gradients))
        gradients = jax.tree.map(lambda g: g * scale, gradients)
        updates, moments = optimizer.update(gradients, moments, params)
        placement, policy = spec.policy(load.popularity_E, placement, policy)
        return optax.apply_updates(params, updates), moments, placement, policy

    moments = optimizer.init(params)
    for batch in batches:
        params, moments, placement, policy = iterate(params, moments, placement, policy, batch)
    return params, placement


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(ranks=8, top_k=2, slots=2, microbatches=2), marks=pytest.mark.long),
        Case(ranks=8, slots=2, policy=FlexMoE(3), layout="coupled"),
        pytest.param(
            Case(ranks=8, slots=2, kind="virtual", policy=FlexMoE(2), layout="coupled"), marks=pytest.mark.slow
        ),
        pytest.param(Case(ranks=8, slots=2, policy=Static(), layout="coupled"), marks=pytest.mark.slow),
        pytest.param(Case(ranks=3, slots=4, policy=MinMax(), sequences=6), marks=pytest.mark.slow),
        pytest.param(Case(ranks=3, slots=4, sequences=6, head="sharded"), marks=pytest.mark.slow),
        pytest.param(Case(ranks=3, slots=4, sequences=6, embedding="sharded"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_twenty_steps_of_adamw_are_those_of_the_plain_model(case):
    setup = experiment(case)
    spec = make_step_spec(setup)
    params, step = draw_params(spec, 0), single_worker_step(spec)
    state = spec.state_from_params(params)
    batches = [draw_batch(case, seed) for seed in range(20)]
    placements = []
    for batch in batches:
        state, metrics = step(state, put_batch(batch, spec.live))
        metrics = jax.device_get(metrics)
        placements.append(np.asarray(state.placement)[0])
        kept = metrics["popularity"] - metrics["dropped"]
        assert (kept >= 0).all()
        assert metrics["popularity"].sum() == batch.valid.sum() * case.top_k
        np.testing.assert_array_equal(metrics["replicas"].sum(axis=-1), case.ranks * case.slots)

    expected, placement = plain_training(spec, setup, params, batches)
    assert_close(spec, spec.gather_master_weights(state), expected, 1e-8)
    np.testing.assert_array_equal(placements[-1], placement)
    moved = sum((a != b).any() for a, b in itertools.pairwise(placements))
    assert moved == 19 if isinstance(case.policy, Shuffled) else moved >= (0 if case.policy == Static() else 3)
    assert step._cache_size() == 1
    fresh = spec.fill_slots(state)
    chex.assert_trees_all_equal(*jax.device_get((fresh.slots, state.slots)))
