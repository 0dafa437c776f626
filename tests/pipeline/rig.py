"""A pipeline and the plain single-device model of the same experiment, side by side.

Legend: K iterations of the window, R rows, P stages, L MoE layers of a stage, E classes, N expert ranks, S slots,
B sequences, T positions.
"""

from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import jax
import numpy as np

from swift.config.cuts import planning_problem
from swift.data.windows import Batch
from swift.mesh.live import live_mesh
from swift.mesh.per_rank import RANKED, REPLICATED, SHARED
from swift.models.cuts import Chunks
from swift.pipeline.reconfigure.configuration import Configurator, PlanSettings, batch_of_rows
from swift.pipeline.step.metrics import by_iteration
from swift.pipeline.step.tick_arrays import table_arrays
from swift.pipeline.step.train_step import window_step
from swift.schedules.plans.normalize import moves_to_spread
from swift.schedules.problem import Costs
from swift.train.build import make_step_spec
from tests.pipeline.cases import NUM_CLASSES, Case, experiment_of
from tests.pipeline.plain_model import Plain, assert_close, assert_metrics, plain_training


class Drawn(NamedTuple):
    """The inputs of one window."""

    params: dict[str, np.ndarray]  # whole classes by group
    placement_PLNS: np.ndarray
    batches: list[Batch]  # [D * M, B, T], of every iteration


class Rig:
    """One case: its plan, its program and its plain model."""

    def __init__(self, case: Case):
        _, P, N = case.topology
        self.case, self.num_stages, self.num_ranks = case, P, N
        self.experiment = experiment_of(case)
        problem = planning_problem(self.experiment, Costs())
        if case.held_by:
            problem = replace(problem, stage_of_chunk=case.held_by)
        moves = moves_to_spread(replace(problem, failed=case.failed)) if case.move_roles else ()
        settings = PlanSettings(problem, case.planner, moves=moves)
        self.configuration = Configurator(settings).configure(case.failed)
        live = live_mesh(self.experiment.topology, "emulated", case.failed, self.configuration.rows)
        self.spec = replace(make_step_spec(self.experiment, live), weighs_tokens=case.weighs)
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
        if self.case.embedding == "sharded":
            tokens[..., ::2] %= 7  # some tokens are frequent
        valid = np.arange(length) < random.integers(0, length + 1, shape)[..., None]
        valid[0, 0] = True  # gradients of no token at all are zeros
        keys = random.integers(0, 2**32, (*shape, 2), dtype=np.uint32) if self.spec.draws_noise else None
        weights = (random.integers(0, 3, valid.shape) / 2 * valid).astype(np.float32) if self.case.weighs else None
        return Batch(tokens[..., :-1], tokens[..., 1:], valid, keys, weights)

    @cached_property
    def _begin(self):
        def begin(params, placement_R):
            return self.spec.fill_slots(replace(self.spec.state_from_params(params), placement=placement_R))

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
        counts = planning_problem(self.experiment, Costs()).microbatches
        rows = batch_of_rows(batches, table, self.configuration.pipeline_D, self.num_ranks, counts)
        return self.spec.live.put(rows, RANKED)

    def run(self, drawn: Drawn, step=None, table=None):
        """(state, metrics, ok, gradients) of a window."""
        table = table or self.table
        inputs = self.start(drawn), *self.put_table(table), self.put_batches(drawn.batches, table)
        return (step or self.step)(*inputs)

    def plain(self, drawn: Drawn) -> tuple[list[Plain], dict[str, np.ndarray], np.ndarray]:
        """Every iteration of the plain model, and the parameters and the placement after them."""
        alike = {"planner": "lockstep", "window": 1, "remat": "none"}
        train = self.case._replace(failed=frozenset(), embedding="replicated", head="replicated", **alike)
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
        for value in jax.tree.leaves(in_rows):
            np.testing.assert_array_equal(value, np.broadcast_to(value[:1], value.shape))
        for k, expected in enumerate(self.plain(drawn)[0]):
            assert_metrics(found[k], expected)
            for row, holding in enumerate(self.spec.holding_R):
                self._check_gradients({name: g[row, k] for name, g in gradients.items()}, expected, holding)

    def _check_gradients(self, found, expected: Plain, holding: int) -> None:
        """Those of a row ``[rank, row, ...]``, of the groups that its stage uses; those of padding are zero."""
        spec, mine = self.spec, self.spec.chunks.worker_chunks[holding]
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
        for name, classes in self.spec.gather_master_weights(state).items():
            assert_close(self.spec, name, classes, expected[name], tolerance)
