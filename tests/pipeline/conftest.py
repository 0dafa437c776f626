"""A pipeline and the plain single-device model of the same experiment, side by side.

Legend: K iterations of the window, R rows, P stages, L MoE layers of a stage, E classes, N expert ranks, S slots,
B sequences, T positions.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from swift.data import Batch, DataConfig
from swift.experts import ExpertConfig
from swift.experts.optimizer_config import OptimizerConfig
from swift.experts.placement import Static
from swift.mesh import RANKED, REPLICATED, SHARED, live_mesh
from swift.models import Chunks, ModelConfig, plain_sums
from swift.pipeline import Configurator, PlanSettings, batch_of_rows, by_iteration, table_arrays, window_step
from swift.schedules import Costs
from swift.topology import Topology
from swift.train import Experiment

NUM_CLASSES = 4


def documented_block():
    """The block of the guide."""
    guide = (Path(__file__).parents[2] / "docs" / "guide.md").read_text()
    (code,) = re.findall(r"```python\n# my_block.py\n(.*?)```", guide, re.DOTALL)
    names: dict[str, Any] = {"__name__": "my_block"}
    exec(code.replace("import gin\n", "").replace("@gin.configurable\n", ""), names)
    return names["Averaging"]()


_MODERN = {"norm": "rmsnorm", "positions": "rope", "activation": "swiglu"}
DECODERS = {
    "": ({}, {}),
    "shared": (
        _MODERN | {"num_shared_experts": 2, "expert_dim": 6, "num_kv_heads": 1, "qk_norm": "head"},
        {"normalize_gates": False},
    ),
    "sigmoid": (
        _MODERN | {"head_dim": 6, "qk_norm": "projection"},
        {"scores": "sigmoid", "normalize_gates": True, "gate_scale": 2.5},
    ),
    "tied": ({"tied_embeddings": True}, {}),
    "documented": (
        {"block": documented_block(), "router_bias": True},
        {"scores": "sigmoid", "z_loss_coefficient": 0.1, "bias_update_rate": 0.05},
    ),
}
"""Settings of the model and of its experts, beside those of GPT-2's shape."""


@dataclass(frozen=True)
class Scattered:
    """A policy of a user's own: any unsorted placement, another one for every other count of any class.

    Peers that counted differently would not place alike, and so their gradients would be wrong in the next iteration.
    """

    name = "scattered"

    def init(self, num_layers, num_classes, num_ranks, slots_per_rank):
        placement, _ = Static().init(num_layers, num_classes, num_ranks, slots_per_rank)
        return placement, jnp.zeros((), jnp.uint32)

    def __call__(self, popularity_LE, placement_LNS, state):
        def mixed(numbers):
            numbers = numbers.astype(jnp.uint32) * jnp.uint32(2654435761)
            return numbers ^ (numbers >> 13)

        def place(popularity_E):
            seed = state + jnp.sum(mixed(popularity_E * 8 + jnp.arange(NUM_CLASSES)), dtype=jnp.uint32)
            order = jnp.argsort(mixed(mixed(seed) + mixed(jnp.arange(placement_LNS[0].size))))
            return ((order + seed) % NUM_CLASSES).astype(jnp.int32)

        return jax.vmap(place)(popularity_LE).reshape(placement_LNS.shape), state + jnp.uint32(1)


class Case(NamedTuple):
    """A plan and its programs, compiled once and run on many inputs."""

    topology: tuple[int, int, int] = (2, 2, 1)
    failed: frozenset = frozenset()
    planner: str = "lockstep"
    microbatches: int = 2
    window: int = 2
    pattern: tuple[bool, ...] = (True,)
    top_k: int = 1
    capacity: float | None = 0.7
    remat: bool | str = False
    move_roles: bool = False
    clip_norm: float | None = None
    dtype: str = "float64"
    by: str = "slot"
    decoder: str = ""  # one of DECODERS
    cut: Any = None  # of a model with the pattern's layers, which otherwise is that of a stage
    counts: tuple[int, ...] | None = None  # micro-batches of each pipeline
    attention: str = "auto"
    embedding: str = "whole"
    head: str = "whole"
    separates: bool = False
    held_by: tuple[tuple[int, ...], ...] | None = None  # stage of each chunk, by pipeline; the cut is then of chunks


class Drawn(NamedTuple):
    """The inputs of one window."""

    params: dict[str, np.ndarray]  # whole classes by group
    placement_PLNS: np.ndarray
    batches: list[Batch]  # [D * M, B, T], of every iteration


class Plain(NamedTuple):
    """An iteration of the plain model."""

    loss: Any
    aux: Any
    popularity: Any  # [all MoE layers, E]
    dropped: Any
    overflowed: Any
    norm: Any
    gradients: Any


class Rig:
    """One case: its plan, its program and its plain model."""

    def __init__(self, case: Case):
        D, P, N = case.topology
        self.case, self.num_stages, self.num_ranks = case, P, N
        self.experiment = Experiment(
            model=ModelConfig(
                len(case.pattern) * (1 if case.cut else P),
                8,
                2,
                12,
                sequence_length=5,
                moe_pattern=case.pattern,
                **DECODERS[case.decoder][0],
            ),
            experts=ExpertConfig(
                NUM_CLASSES,
                NUM_CLASSES // N + 1,
                case.top_k,
                case.capacity,
                0.05,
                case.by,
                **DECODERS[case.decoder][1],
            ),
            placement=Scattered(),
            topology=Topology(D, P, N),
            data=DataConfig(),
            optimizer=OptimizerConfig(peak_learning_rate=1e-2, warmup_steps=2, clip_norm=case.clip_norm),
            compute_dtype=case.dtype,
            attention=case.attention,
            embedding=case.embedding,
            head=case.head,
            separate_documents=case.separates,
            num_steps=40,
            num_microbatches=case.microbatches,
            microbatches=case.counts,
            window=case.window,
            planner=case.planner,
            remat=case.remat,
            cut=None if case.held_by else case.cut,
            move_roles=case.move_roles,
            sequences_per_microbatch=2 * N,
        )
        problem = self.experiment.problem(Costs())
        if case.held_by:
            problem = replace(problem, stage_of_chunk=case.held_by)
        settings = PlanSettings(problem, case.planner, move_roles=case.move_roles)
        self.configuration = Configurator(settings).configure(case.failed)
        live = live_mesh(self.experiment.topology, "emulated", case.failed, self.configuration.rows)
        self.spec = self.experiment.step_spec(live)
        if case.held_by:
            chunks = Chunks(self.spec.cut.moe_layers, case.cut, case.held_by)
            self.spec = replace(self.spec, chunks=chunks, worker_shapes=None)

    @property
    def table(self):
        """The tick table of a window."""
        return self.configuration.plans[self.case.window].table

    @cached_property
    def step(self):
        """The jitted window, which gives its gradients, too."""
        return window_step(self.spec, self.table, self.case.window, keep_gradients=True)

    def draw(self, seed: int, num_batches: int | None = None, scale: float = 0.3) -> Drawn:
        """Inputs that end early, or have no token at all; parameters away from where training starts.

        A router's two best logits are nearer to each other than errors of rounding once in 1e10 tokens or so.
        """
        random = np.random.default_rng(seed)
        groups = self.spec.gpt.groups.items()
        params = {name: scale * random.standard_normal((g.num_layers, g.num_classes, g.size)) for name, g in groups}
        experts, rows = self.experiment.experts, self.spec.cut.stack_size(is_moe=True)
        more = self.num_ranks * experts.slots_per_rank - NUM_CLASSES
        placements = [
            random.permutation([*range(NUM_CLASSES), *random.integers(0, NUM_CLASSES, more)])
            for _ in range(self.num_stages * rows)
        ]
        placement_PLNS = np.array(placements, np.int32).reshape(
            self.num_stages, rows, self.num_ranks, experts.slots_per_rank
        )
        return Drawn(params, placement_PLNS, [self._draw_batch(random) for _ in range(num_batches or self.case.window)])

    def _draw_batch(self, random: np.random.Generator) -> Batch:
        setup, length = self.experiment, self.experiment.model.sequence_length
        shape = (self.spec.num_microbatches, setup.sequences_per_microbatch)
        tokens = random.integers(0, setup.data.vocab_size, (*shape, length + 1), dtype=np.int32)
        if self.case.separates:
            tokens %= 3  # documents are short
        if self.case.embedding == "shares":
            tokens[..., ::2] %= 7  # some tokens are frequent
        valid = np.arange(length) < random.integers(0, length + 1, shape)[..., None]
        valid[0, 0] = True  # gradients of no token at all are zeros
        return Batch(tokens[..., :-1], tokens[..., 1:], valid)

    @cached_property
    def _begin(self):
        def begin(params, placement_R):
            return self.spec.fill_slots(replace(self.spec.adopt(params), placement=placement_R))

        return jax.jit(begin, out_shardings=self.spec.live.shardings(self.spec.specs))

    def start(self, drawn: Drawn):
        """The state before the first iteration."""
        # Emulated devices share few threads: no other program with collectives is to be under way.
        by_layer = drawn.placement_PLNS[self.spec.cut.locations(is_moe=True)]
        rows = self.spec.chunks.model_index(is_moe=True)[self.spec.holding_R]
        return jax.block_until_ready(self._begin(drawn.params, by_layer[rows]))

    def put_table(self, table):
        """Its arrays on the devices."""
        common, columns = table_arrays(table)
        return self.spec.live.put(common, REPLICATED), self.spec.live.put(columns, SHARED)

    def put_batches(self, batches: list[Batch], table):
        """The batches of a window on the devices of the rows that meet them."""
        counts = self.experiment.problem(Costs()).microbatches
        rows = batch_of_rows(batches, table, self.configuration.pipeline_D, self.num_ranks, counts)
        return self.spec.live.put(rows, RANKED)

    def run(self, drawn: Drawn, step=None, table=None):
        """(state, metrics, ok, gradients) of a window."""
        table = table or self.table
        inputs = self.start(drawn), *self.put_table(table), self.put_batches(drawn.batches, table)
        return (step or self.step)(*inputs)

    def plain(self, drawn: Drawn) -> tuple[list[Plain], dict[str, np.ndarray], np.ndarray]:
        """Every iteration of the plain model, and the parameters and the placement after them."""
        alike = {"planner": "lockstep", "window": 1, "remat": False, "move_roles": False}
        train = self.case._replace(failed=frozenset(), embedding="whole", head="whole", **alike)
        iterate, first = plain_training(train)
        state, iterations = first(drawn.params, drawn.placement_PLNS), []
        for batch in drawn.batches:
            state, iteration = iterate(state, batch)
            iterations.append(jax.device_get(iteration))
        return iterations, *jax.device_get((state[0], state[2]))

    def check(self, drawn: Drawn, step=None, table=None) -> None:
        """The law: loss, auxiliary loss, loads and all gradients of all iterations are those of the plain model."""
        _, metrics, ok, gradients = self.run(drawn, step, table)
        found, (in_rows, ok, gradients) = by_iteration(metrics), jax.device_get((metrics, ok, gradients))
        assert ok.all()
        for value in in_rows.values():
            np.testing.assert_array_equal(value, np.broadcast_to(value[:1], value.shape))
        for k, expected in enumerate(self.plain(drawn)[0]):
            assert_metrics(found[k], expected)
            for row, holding in enumerate(self.spec.holding_R):
                self._check_gradients({name: g[row, k] for name, g in gradients.items()}, expected, holding)

    def _check_gradients(self, found, expected: Plain, holding: int) -> None:
        """Those of a row ``[rank, row, ...]``, of the groups that its stage uses; those of padding are zero."""
        spec, mine = self.spec, self.spec.chunks.holdings[holding]
        ends = {"embedding": 0, "head": len(spec.chunks.sizes) - 1}
        for name, per_rank in found.items():
            if ends.get(name, mine[0]) in mine:
                rows = spec.model_index[name][holding]
                classes = spec.layouts[name].classes(np.swapaxes(per_rank, 0, 1), None)
                assert not classes[rows < 0].any()
                if (rows >= 0).any():
                    assert_close(spec, name, classes[rows >= 0], expected.gradients[name][rows[rows >= 0]], 1e-10)

    def check_metrics(self, metrics, expected: list[Plain]) -> None:
        """The metrics of iterations are those of the plain model."""
        for found, iteration in zip(by_iteration(metrics), expected, strict=True):
            assert_metrics(found, iteration)

    def check_params(self, state, expected: dict[str, np.ndarray], tolerance: float) -> None:
        """The master weights of a state are those of the plain model."""
        for name, classes in self.spec.whole_classes(state).items():
            assert_close(self.spec, name, classes, expected[name], tolerance)


def assert_metrics(found: dict[str, np.ndarray], expected: Plain) -> None:
    """Checks the metrics of an iteration against the plain model."""
    np.testing.assert_allclose(found["loss"], expected.loss, rtol=1e-10)
    np.testing.assert_allclose(found["aux_loss"], expected.aux, rtol=1e-10)
    np.testing.assert_allclose(found["grad_norm"], expected.norm, rtol=1e-10)
    np.testing.assert_array_equal(found["popularity"], expected.popularity)
    np.testing.assert_array_equal(found["dropped"], expected.dropped)
    np.testing.assert_array_equal(found["overflowed"], expected.overflowed)


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
    """Whether a parameter is the biases by which experts are chosen."""
    return group == "router" and spec.gpt.config.router_bias and leaf == 0


@cache
def plain_training(case: Case) -> tuple[Callable, Callable]:
    """(an iteration of AdamW on whole classes: (state, batch) -> (state, Plain), the state before the first)."""
    setup = Rig(case).experiment
    spec = setup.step_spec()
    policy, num_stages, rows_PL = spec.policy, spec.num_stages, spec.cut.model_index(is_moe=True)
    is_row_PL = rows_PL >= 0

    def objective(params, placement_PLNS, batch):
        weights, placement_LNS = spec.gpt.unpack(params), placement_PLNS[is_row_PL]

        def add(sums, microbatch):
            *losses, loads = plain_sums(
                replace(spec.gpt, kernel="plain"), spec.experts, weights, placement_LNS, *microbatch
            )
            load = jax.tree.map(lambda *rows: jnp.stack(rows), *loads) if loads else (no_load,) * 3
            return jax.tree.map(jnp.add, sums, (*losses, *load)), None

        no_load = jnp.zeros((len(placement_LNS), NUM_CLASSES), jnp.int32)
        (loss, aux, *load), _ = lax.scan(add, (jnp.zeros(()), jnp.zeros(()), *(no_load,) * 3), batch)
        loss, aux = loss / batch.valid.sum(), aux / len(batch.valid)
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
        if setup.model.router_bias:
            updated["router"] = balanced(updated["router"], params["router"], popularity)
        after = updated, moments, placement_PLNS, policy_P
        return after, Plain(loss, aux, popularity, *drops, norm, raw)

    def balanced(router_LCW, before_LCW, popularity_LE):
        """Routers whose biases have moved by the rate, up where an expert had less than its share of the tokens."""
        group, rate = spec.gpt.groups["router"], setup.experts.bias_update_rate
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


@cache
def _rig(case: Case) -> Rig:
    return Rig(case)


@pytest.fixture(scope="session", name="rig")
def make_rig() -> Callable[..., Rig]:
    """The rig of a case, given the fields of ``Case`` that are not as usual; the same one for the same case."""
    return lambda **fields: _rig(Case(**fields | {"failed": frozenset(fields.get("failed", ()))}))
