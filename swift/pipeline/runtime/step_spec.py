"""The spec of a training step, and the initialization of its state."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from swift.errors import SettingError
from swift.experts.config import ExpertConfig
from swift.experts.placement.policy import PlacementPolicy
from swift.experts.state_layouts import Decoupled, Layout
from swift.mesh.live import LiveMesh
from swift.mesh.per_rank import RANKED, SHARED, is_spec
from swift.models.cuts.chunks import Chunks
from swift.models.cuts.cut import Cut, make_cut
from swift.pipeline.layers_in_turn import are_by_group
from swift.pipeline.runtime.worker_chunks import WorkerChunks
from swift.pipeline.train_state import EMBEDDING_AND_HEAD, TrainState

Remat: TypeAlias = Literal["none", "attention", "block"]
SliceMemory: TypeAlias = Literal["device", "pinned_host"]


@dataclass(frozen=True, kw_only=True)
class StepSpec(WorkerChunks):
    """The static description of an iteration: everything but arrays.

    Attributes, beside the model, the mesh and the chunks of ``WorkerChunks``:
        experts: settings of the expert layers.
        policy: placement policy.
        optimizer: elementwise optax transformation, without clipping.
        learning_rate: learning rate by iteration, for the record.
        clip_norm: largest global gradient norm, or None.
        layouts: layout of the master weights, by group.
        compute_dtype: dtype of slots and activations.
        num_microbatches: micro-batches of an iteration, of all pipelines together.
        num_hot_rows: rows of an embedding in shares that a rank may have copies of in an iteration, H.
        decays_matrices_only: whether weight decay leaves out embeddings, norms and biases.
        remat: what keeps only its input for the backward pass and is computed again: nothing, attention, or a block.
        memory: where master weights and moments are between updates.
        cut: blocks of every stage in the first pipeline, and in checkpoints; None: equally many.
        chunks: what every worker holds; None: pipelines are cut alike, and a chunk is a stage.
        worker_shapes: shapes of a worker's state; found by tracing unless given.
    """

    experts: ExpertConfig
    policy: PlacementPolicy
    optimizer: optax.GradientTransformation
    learning_rate: optax.Schedule
    clip_norm: float | None
    layouts: Mapping[str, Layout]
    compute_dtype: DTypeLike
    num_microbatches: int
    num_hot_rows: int = 0
    decays_matrices_only: bool = False
    remat: Remat = "none"
    memory: SliceMemory = "device"
    cut: Cut = None  # type: ignore[assignment]
    chunks: Chunks = None  # type: ignore[assignment]
    worker_shapes: TrainState = field(default=None, repr=False)  # type: ignore[assignment]
    specs: TrainState = field(init=False)

    def __post_init__(self) -> None:
        if self.cut is None:
            moe_layers = self.gpt.config.moe_layers
            object.__setattr__(self, "cut", make_cut(moe_layers, self.num_stages, None, "StepSpec.cut"))
        if self.chunks is None:
            stages = (tuple(range(self.num_stages)),) * self.live.topology.num_pipelines
            object.__setattr__(self, "chunks", Chunks(self.cut.moe_layers, self.cut.sizes, stages))
        self._check_policy()
        if self.worker_shapes is None:
            object.__setattr__(self, "worker_shapes", self._find_worker_shapes())
        moments = self.worker_shapes.moments
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
        if self.memory != "device":
            self._check_memory()

    def _check_memory(self) -> None:
        kinds = self.live.memory_kinds
        if self.memory not in kinds:
            allowed = f"is not a memory of these devices, which have {', '.join(sorted(kinds))}: use device"
            raise SettingError("StepSpec.memory", self.memory, allowed)
        if not are_by_group(self.worker_shapes.moments, self.worker_shapes.master):
            allowed = "needs an optimizer whose arrays are in trees like that of the parameters: use device"
            raise SettingError("StepSpec.memory", self.memory, allowed)

    def _check_policy(self) -> None:
        if self.chunks.are_single or not self.num_moe_layers:
            return
        sizes = self.experts.num_classes, self.live.num_ranks, self.experts.slots_per_rank
        one, two = (jax.eval_shape(partial(self.policy.init, number, *sizes))[1] for number in (1, 2))
        if one != two:
            allowed = "must have no state for each layer, where a worker holds layers that others hold apart"
            raise SettingError("StepSpec.policy", self.policy, allowed)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of a worker's state."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.worker_shapes))

    @property
    def is_single_worker(self) -> bool:
        """Whether there is only one worker: no pipeline, and no peers."""
        return len(self.live.topology.workers) == 1

    @property
    def accumulate_dtype(self) -> DTypeLike:
        """Type of master weights, moments and sums of gradients."""
        return jnp.promote_types(self.compute_dtype, jnp.float32)

    @property
    def row_wire_dtype(self) -> DTypeLike:
        """Type on the wire of gradients of the embedding's rows, where ranks share these."""
        layout = self.layouts["embedding"]
        assert isinstance(layout, Decoupled)
        return layout.wire_dtype

    def stages_mesh(self) -> LiveMesh:
        """The live mesh of one worker for each stage, which a checkpoint's state is on."""
        return self.live.with_rows(tuple(self.live.rows[index] for index in self.live.first_rows))

    @cached_property
    def stored(self) -> "StepSpec":
        """The spec of the state in a checkpoint: a worker for each stage, as the first pipeline is cut."""
        on_stages = self.at(self.stages_mesh())
        return on_stages if self.chunks.are_stages else replace(on_stages, chunks=None, worker_shapes=None)  # type: ignore[arg-type]

    def at(self, live: LiveMesh) -> "StepSpec":
        """The same spec on another live mesh of the same topology."""
        return replace(self, live=live)

    @cached_property
    def embedding_and_head_bytes(self) -> int:
        """Bytes of embedding and head on a worker: every rank's copy or share, master weights and moments once."""
        ends = {jax.tree_util.DictKey(name) for name in EMBEDDING_AND_HEAD}
        state = self.worker_shapes
        leaves = jax.tree_util.tree_leaves_with_path((state.master, state.moments))
        shared = sum(leaf.size * leaf.dtype.itemsize for path, leaf in leaves if ends & set(path))
        copies = self.live.num_ranks * sum(self.gpt.slot_groups[end.key].size for end in ends)
        return shared + copies * jnp.dtype(self.compute_dtype).itemsize

    def placements(
        self, experts_LNS: Int[Array, "L N S"], stacks: Mapping[str, Any] | None = None
    ) -> dict[str, jax.Array]:
        """The placement of each group; a dense group is one class with a slot on every rank.

        Args:
            experts_LNS: placement of the experts.
            stacks: an array ``[layer, ...]`` for each group, which says how many layers it has; None: a worker's.
        """
        num_layers = self.num_layers if stacks is None else {name: len(leaf) for name, leaf in stacks.items()}
        return {
            name: experts_LNS if group.is_expert else jnp.zeros((num_layers[name], self.live.num_ranks, 1), jnp.int32)
            for name, group in self.gpt.groups.items()
        }

    def init(self, key: jax.Array) -> TrainState:
        """The state before the first iteration; it depends on ``key`` and not on the number of ranks or stages."""
        # Drawn on one device: a program on the whole mesh draws everything on each of its devices.
        return self.adopt(jax.jit(self.gpt.init)(key))

    def adopt(self, params: Mapping[str, jax.Array]) -> TrainState:
        """The state before the first iteration with given parameters, ``[layer, class, size]`` by group."""
        return self.fill_slots(self.lay_out(params))

    def lay_out(self, params: Mapping[str, jax.Array]) -> TrainState:
        """The same without slots."""
        return jax.jit(self._lay_out, out_shardings=replace(self.shardings, slots={}))(dict(params))

    def fill_slots(self, state: TrainState) -> TrainState:
        """Fills the slots from the master weights and the placement, as after a restore."""
        filled = replace(state, slots=self._make_slots(self.in_device_memory(state).master, state.placement))
        return self.at_rest(filled)

    @property
    def shardings(self) -> TrainState:
        """Shardings of a state between iterations, a prefix tree of it."""
        shardings = self.live.shardings(self.specs)
        if self.memory == "device":
            return shardings

        def slices(spec: PartitionSpec, sharding: NamedSharding) -> NamedSharding:
            return sharding.with_memory_kind(self.memory) if spec == RANKED else sharding

        pairs = ((of.master, of.moments) for of in (self.specs, shardings))
        master, moments = jax.tree.map(slices, *pairs, is_leaf=is_spec)
        return replace(shardings, master=master, moments=moments)

    def shardings_of(self, specs: Any) -> Any:
        """Maps a tree of specs to shardings; those of a state are where it is between iterations."""

        def is_state(node: Any) -> bool:
            return node is self.specs

        def sharding(node: Any) -> Any:
            return self.shardings if is_state(node) else self.live.shardings(node)

        return jax.tree.map(sharding, specs, is_leaf=lambda node: is_state(node) or is_spec(node))

    def at_rest(self, state: TrainState) -> TrainState:
        """Puts master weights and moments where they are between iterations."""
        return state if self.memory == "device" else jax.device_put(state, self.shardings)

    def in_device_memory(self, state: TrainState) -> TrainState:
        """Puts everything in device memory, as programs other than iterations take it."""
        return state if self.memory == "device" else jax.device_put(state, self.live.shardings(self.specs))

    def abstract(self, *, with_slots: bool = False) -> TrainState:
        """Shapes, dtypes and shardings of a state; without slots, of what a checkpoint holds."""
        shardings, state, num_live = self.shardings, self.worker_shapes, self.live.num_live
        if not with_slots:
            shardings, state = replace(shardings, slots={}), replace(state, slots={})
        return jax.tree.map(
            lambda sharding, sub: jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct((num_live, *leaf.shape), leaf.dtype, sharding=sharding), sub
            ),
            shardings,
            state,
        )

    def whole_classes(self, state: TrainState) -> dict[str, np.ndarray]:
        """The master weights ``[layer, class, size]`` by group, as a plain model has them; on the host."""
        # Each op on sharded arrays would be a program with collectives of its own, and emulated devices can deadlock
        # when many of those run at once; and no device need have room for the weights of all experts.
        master, placement = jax.device_get((state.master, state.placement))

        def classes(name: str) -> np.ndarray:
            worker_L, index_L = self.locations(name)
            found = {}
            for worker in set(worker_L.tolist()):
                stacks = {name: leaf[worker] for name, leaf in master.items()}
                placements = self.placements(placement[worker], stacks)
                found[worker] = self.layouts[name].classes(stacks[name], placements[name])
            return np.stack(
                [found[worker][index] for worker, index in zip(worker_L.tolist(), index_L.tolist(), strict=True)]
            )

        return {name: classes(name) for name in self.gpt.groups}

    @cached_property
    def _make_slots(self) -> Callable[[dict[str, jax.Array], jax.Array], dict[str, jax.Array]]:
        def make(master: dict[str, jax.Array], placement_LNS: jax.Array) -> dict[str, jax.Array]:
            return materialize_all(self, master, placement_LNS)

        return jax.jit(self.live.per_rank(make, (RANKED, SHARED), RANKED))

    def _find_worker_shapes(self) -> TrainState:
        state = jax.eval_shape(self._lay_out, self.gpt.parameter_shapes)
        state = replace(state, slots=jax.eval_shape(self._make_slots, state.master, state.placement))
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), state)

    def _lay_out(self, params: Mapping[str, jax.Array]) -> TrainState:
        def by_holding(name: str, classes: jax.Array) -> jax.Array:
            index = self.model_index[name]
            is_block = jnp.asarray(index >= 0)[(..., *[None] * (classes.ndim - 1))]
            return jnp.where(is_block, classes[index], jnp.zeros((), classes.dtype))

        holdings = jax.vmap(self._lay_out_holding, axis_size=len(self.chunks.holdings))(
            {name: by_holding(name, classes.astype(self.accumulate_dtype)) for name, classes in params.items()}
        )
        return jax.tree.map(lambda leaf: leaf[self.holding_R], holdings)

    def _lay_out_holding(self, params: Mapping[str, jax.Array]) -> TrainState:
        config, ranks = self.experts, self.live.num_ranks
        placement, policy = self.policy.init(self.num_moe_layers, config.num_classes, ranks, config.slots_per_rank)
        placements = self.placements(placement, params)
        master = {name: self.layouts[name].init(classes, placements[name]) for name, classes in params.items()}
        state = TrainState(jnp.zeros((), jnp.int32), master, self.optimizer.init(master), {}, placement, policy)
        return jax.tree.map(jnp.asarray, state)


def materialize_all(
    spec: StepSpec, master: Mapping[str, jax.Array], placement_LNS: Int[Array, "L N S"]
) -> dict[str, jax.Array]:
    """Per rank: the slots of every group, from master weights and the placement int32 ``[L, N, S]``."""
    placements = spec.placements(placement_LNS, master)
    return {name: spec.layouts[name].materialize(master[name], placements[name]) for name in master}
