"""The spec of a training step; the training state, its layout on a live mesh, and its initialization.

Every leaf has a leading ``worker`` dim: a row holds the state of the stage that its worker serves. Master weights,
moments and slots are RANKED ``[worker, row, rank, ...]``; the iteration, the placement and the policy's own state are
SHARED ``[worker, ...]``. Embedding and head are in every row, so that all rows have one shape; only the first and the
last stage use them. For the same reason a stage with fewer blocks than another has rows of zeros, which are padding:
their gradients are zero, and nothing reads them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from swift.experts import ExpertConfig, Layout
from swift.experts.placement import PlacementPolicy
from swift.mesh import RANKED, SHARED, LiveMesh, PeerSum, how_unequal
from swift.models import GPT, Cut, make_cut

EMBEDDING_AND_HEAD = ("embedding", "head")
"""The groups that only the first and the last stage use."""

DeviceBatch: TypeAlias = Any
"""A ``Batch`` of ``jax.Array``."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that an iteration reads and writes, or a tree of specs of the same structure."""

    step: Any  # int32[worker], iterations done
    master: Any  # {group: master weights, at least float32 [worker, row, rank, ...]}
    moments: Any  # the optimizer's state over master; its counters are [worker]
    slots: Any  # {group: compute type [worker, row, rank, slot, size]}, made from master and placement
    placement: Any  # int32[worker, MoE row of the stage, rank, slot], the expert in every slot
    policy: Any  # the placement policy's state


@dataclass(frozen=True)
class StepSpec:
    """The static part of an iteration: everything but arrays.

    Attributes:
        gpt: model architecture.
        experts: settings of the expert layers.
        policy: placement policy.
        live: mesh of the live workers.
        optimizer: elementwise optax transformation, without clipping.
        learning_rate: learning rate by iteration, for the record.
        clip_norm: largest global gradient norm, or None.
        layouts: layout of the master weights, by group.
        compute_dtype: dtype of slots and activations.
        num_microbatches: micro-batches of an iteration, of all pipelines together.
        decays_matrices_only: whether weight decay leaves out embeddings, norms and biases.
        remat: whether a block keeps only its input for the backward pass and recomputes the rest.
        cut: blocks of every stage; None: equally many.
        row_shapes: shapes of a worker's state, ``[row, ...]``; found by tracing unless given.
    """

    gpt: GPT
    experts: ExpertConfig
    policy: PlacementPolicy
    live: LiveMesh
    optimizer: optax.GradientTransformation
    learning_rate: optax.Schedule
    clip_norm: float | None
    layouts: Mapping[str, Layout]
    compute_dtype: DTypeLike
    num_microbatches: int
    decays_matrices_only: bool = False
    remat: bool = False
    cut: Cut = None  # type: ignore[assignment]
    row_shapes: TrainState = field(default=None, repr=False)  # type: ignore[assignment]
    specs: TrainState = field(init=False)

    def __post_init__(self) -> None:
        if self.cut is None:
            moe_layers = self.gpt.config.moe_layers
            object.__setattr__(self, "cut", make_cut(moe_layers, self.num_stages, None, "StepSpec.cut"))
        if self.row_shapes is None:
            object.__setattr__(self, "row_shapes", self._find_row_shapes())
        moments = self.row_shapes.moments
        # A scalar is a counter of the worker; arrays as large as the master weights are RANKED like them.
        specs = TrainState(
            step=SHARED,
            master=RANKED,
            moments=jax.tree.map(lambda leaf: SHARED if leaf.ndim == 0 else RANKED, moments),
            slots=RANKED,
            placement=SHARED,
            policy=SHARED,
        )
        object.__setattr__(self, "specs", specs)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of a worker's state."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.row_shapes))

    @property
    def is_single_worker(self) -> bool:
        """Whether there is only one worker: no pipeline, and no peers."""
        return len(self.live.topology.workers) == 1

    @property
    def num_stages(self) -> int:
        """P."""
        return self.live.topology.num_stages

    @cached_property
    def num_moe_layers(self) -> int:
        """L, rows for layers with experts in a stage: those of the stage that has most."""
        return self.cut.num_rows(True)

    @property
    def accumulate_dtype(self) -> DTypeLike:
        """Type of master weights, moments and sums of gradients."""
        return jnp.promote_types(self.compute_dtype, jnp.float32)

    @cached_property
    def model_rows(self) -> dict[str, np.ndarray]:
        """Position in the model of each row of each stage, int64[P, rows] by group; negative: padding."""
        kinds = {"attention": None, "mlp": False, "router": True, "expert": True}
        return {
            name: np.zeros((self.num_stages, 1), int)
            if name in EMBEDDING_AND_HEAD
            else self.cut.model_rows(kinds[name])
            for name in self.gpt.groups
        }

    @cached_property
    def num_layers(self) -> dict[str, int]:
        """Rows of a stage, by group."""
        return {name: rows.shape[1] for name, rows in self.model_rows.items()}

    @cached_property
    def peer_sum(self) -> PeerSum:
        """The sum over the workers of a stage."""
        return PeerSum(self.live.peers, how_unequal(self.live.mesh.devices.flat[0].platform))

    def stages_mesh(self) -> LiveMesh:
        """The live mesh of one worker for each stage, which a checkpoint's state is on."""
        return self.live.with_places(tuple(self.live.places[row] for row in self.live.first_rows))

    def at(self, live: LiveMesh) -> "StepSpec":
        """The same spec on another live mesh of the same topology."""
        return replace(self, live=live)

    @cached_property
    def embedding_and_head_bytes(self) -> int:
        """Bytes of embedding and head on a worker: a copy on every rank, master weights and moments once."""
        ends = {jax.tree_util.DictKey(name) for name in EMBEDDING_AND_HEAD}
        state = self.row_shapes
        leaves = jax.tree_util.tree_leaves_with_path((state.master, state.moments))
        shared = sum(leaf.size * leaf.dtype.itemsize for path, leaf in leaves if ends & set(path))
        copies = self.live.num_ranks * sum(self.gpt.groups[end.key].size for end in ends)
        return shared + copies * jnp.dtype(self.compute_dtype).itemsize

    def placements(self, experts_LNS: Int[Array, "L N S"]) -> dict[str, jax.Array]:
        """The placement of each group; a dense group is one class with a slot on every rank."""
        return {
            name: experts_LNS if group.is_expert else jnp.zeros((rows, self.live.num_ranks, 1), jnp.int32)
            for (name, group), rows in zip(self.gpt.groups.items(), self.num_layers.values(), strict=True)
        }

    def init(self, key: jax.Array) -> TrainState:
        """The state before the first iteration; it depends on ``key`` and not on the number of ranks or stages."""
        # Drawn on one device: a program on the whole mesh draws everything on each of its devices.
        return self.adopt(jax.jit(self.gpt.init)(key))

    def adopt(self, params: Mapping[str, jax.Array]) -> TrainState:
        """The state before the first iteration with given parameters, ``[row, class, size]`` by group."""
        return self.fill_slots(self.lay_out(params))

    def lay_out(self, params: Mapping[str, jax.Array]) -> TrainState:
        """The same without slots."""
        return jax.jit(self._lay_out, out_shardings=self._layout_shardings())(dict(params))

    def fill_slots(self, state: TrainState) -> TrainState:
        """Fills the slots from the master weights and the placement, as after a restore."""
        return replace(state, slots=self._make_slots(state.master, state.placement))

    def abstract(self, *, with_slots: bool = False) -> TrainState:
        """Shapes, dtypes and shardings of a state; without slots, of what a checkpoint holds."""
        shardings, state, num_live = self.live.shardings(self.specs), self.row_shapes, self.live.num_live
        if not with_slots:
            shardings, state = replace(shardings, slots={}), replace(state, slots={})
        return jax.tree.map(
            lambda sharding, sub: jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct((num_live, *leaf.shape), leaf.dtype, sharding=sharding), sub
            ),
            shardings,
            state,
        )

    def whole_classes(self, state: TrainState) -> dict[str, jax.Array]:
        """The master weights ``[row, class, size]`` by group, as a plain single-device model has them."""
        # On the host: each op on sharded arrays would be a program with collectives of its own, and emulated devices
        # can deadlock when many of those run at once.
        master, placement = jax.device_get((state.master, state.placement))
        rows = self.live.first_rows
        placements = {row: self.placements(placement[row]) for row in rows}

        def classes(name: str, of: Sequence[int]) -> jax.Array:
            layout = self.layouts[name]
            stages = [layout.classes(master[name][row], placements[row][name]) for row in of]
            if name in EMBEDDING_AND_HEAD:
                return stages[0]
            is_block = self.model_rows[name] >= 0
            return jnp.concatenate([stage[: mine.sum()] for stage, mine in zip(stages, is_block, strict=True)])

        ends = {"embedding": rows[:1], "head": rows[-1:]}
        return {name: classes(name, ends.get(name, rows)) for name in self.gpt.groups}

    @cached_property
    def _make_slots(self) -> Callable[[dict[str, jax.Array], jax.Array], dict[str, jax.Array]]:
        def make(master: dict[str, jax.Array], placement_LNS: jax.Array) -> dict[str, jax.Array]:
            return materialize_all(self, master, placement_LNS)

        return jax.jit(self.live.per_rank(make, (RANKED, SHARED), RANKED))

    def _layout_shardings(self) -> TrainState:
        return self.live.shardings(replace(self.specs, slots={}))

    def _find_row_shapes(self) -> TrainState:
        state = jax.eval_shape(lambda: self._lay_out(self.gpt.init(jax.random.key(0))))
        state = replace(state, slots=jax.eval_shape(self._make_slots, state.master, state.placement))
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), state)

    def _lay_out(self, params: Mapping[str, jax.Array]) -> TrainState:
        def by_stage(name: str, classes: jax.Array) -> jax.Array:
            rows = self.model_rows[name]
            is_block = jnp.asarray(rows >= 0)[(..., *[None] * (classes.ndim - 1))]
            return jnp.where(is_block, classes[rows], jnp.zeros((), classes.dtype))

        stages = jax.vmap(self._lay_out_stage, axis_size=self.num_stages)(
            {name: by_stage(name, classes.astype(self.accumulate_dtype)) for name, classes in params.items()}
        )
        return jax.tree.map(lambda leaf: leaf[self.live.stage_R], stages)

    def _lay_out_stage(self, params: Mapping[str, jax.Array]) -> TrainState:
        config, ranks = self.experts, self.live.num_ranks
        placement, policy = self.policy.init(self.num_moe_layers, config.num_classes, ranks, config.slots_per_rank)
        placements = self.placements(placement)
        master = {name: self.layouts[name].init(classes, placements[name]) for name, classes in params.items()}
        state = TrainState(jnp.zeros((), jnp.int32), master, self.optimizer.init(master), {}, placement, policy)
        return jax.tree.map(jnp.asarray, state)


def materialize_all(
    spec: StepSpec, master: Mapping[str, jax.Array], placement_LNS: Int[Array, "L N S"]
) -> dict[str, jax.Array]:
    """Per rank: the slots of every group, from master weights and the placement int32 ``[L, N, S]``."""
    placements = spec.placements(placement_LNS)
    return {name: spec.layouts[name].materialize(master[name], placements[name]) for name in master}
