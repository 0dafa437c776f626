"""The spec of a training step: everything static, from the model to each worker's chunks and their state's layout.

A ``StepSpec`` says which chunks every live worker holds, where their layers are in its stacks, and which workers are
peers. These determine the shapes and shardings of a state, and how a state is created from parameters. If workers hold
several chunks, the sums over the peers of each chunk are split into ``Rounds``, with at most one chunk per worker in
each round.

Legend: C chunks, H holdings, L layers of a group in the model, R mesh rows, T rounds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Wrapped
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from swift.errors import SettingError
from swift.experts.config import ExpertConfig
from swift.experts.placement.policy import PlacementPolicy
from swift.experts.routing import RouterTokens, TokenNoise
from swift.experts.state_layouts import Decoupled, Layout
from swift.mesh.live import LiveMesh
from swift.mesh.peer_sum import PeerAllReduce, Unequal, reduction_for_unequal_groups
from swift.mesh.per_rank import RANKED, SHARED, is_spec
from swift.models.config import Remat
from swift.models.cuts import Chunks, Cut, make_cut
from swift.models.gpt import GPT
from swift.pipeline import scopes
from swift.pipeline.state import EMBEDDING_AND_HEAD, KINDS, Index, TrainState
from swift.pipeline.step.offload import is_grouped_like_params

NONE = -1
"""Marks the absence of a chunk."""
_Tree = TypeVar("_Tree")


@dataclass(frozen=True)
class Rounds:
    """Schedule of the sums over each chunk's peers, in rounds in which every worker has at most one chunk.

    Attributes:
        chunk_HT: chunk of each holding in each round, int32; ``NONE`` for no chunk.
        round_C: round of each chunk, int32.
        sums: for each round, the sum over the workers that hold the same chunk.
    """

    chunk_HT: np.ndarray
    round_C: np.ndarray
    sums: tuple[PeerAllReduce, ...]

    @classmethod
    def of(cls, peers_C: Sequence[Sequence[int]], holds_HC: np.ndarray, unequal: Unequal) -> "Rounds":
        """Assigns every chunk to the first round in which none of its workers has another chunk.

        Args:
            peers_C: mesh rows whose workers hold each chunk.
            holds_HC: whether each holding holds each chunk.
            unequal: see ``PeerAllReduce``.
        """
        rounds: list[list[int]] = []
        for chunk, rows in enumerate(peers_C):
            free = (chunks for chunks in rounds if all(set(rows).isdisjoint(peers_C[chunk]) for chunk in chunks))
            round_chunks = next(free, None)
            if round_chunks is None:
                round_chunks = []
                rounds.append(round_chunks)
            round_chunks.append(chunk)
        round_C = np.zeros(len(peers_C), np.int32)
        chunk_HT = np.full((len(holds_HC), len(rounds)), NONE, np.int32)
        for round_index, chunks in enumerate(rounds):
            round_C[chunks] = round_index
            for chunk in chunks:
                chunk_HT[holds_HC[:, chunk], round_index] = chunk
        num_live = 1 + max(row for rows in peers_C for row in rows)
        groups = [[tuple(peers_C[chunk]) for chunk in chunks] for chunks in rounds]
        return cls(
            chunk_HT,
            round_C,
            tuple(PeerAllReduce(_covering(round_groups, num_live), unequal) for round_groups in groups),
        )

    def sum_of(self, chunk: Index) -> "PeerAllReduce | SumInRound":
        """Returns the sum over the workers that hold a chunk; the chunk's number may be traced."""
        return self.sums[0] if len(self.sums) == 1 else SumInRound(self.sums, jnp.asarray(self.round_C)[chunk])


@dataclass(frozen=True)
class SumInRound:
    """Sum in one of several rounds, each in its own branch; workers that hold the same chunk take the same branch."""

    sums: tuple[PeerAllReduce, ...]
    round_index: Index
    is_tree = False

    def __call__(self, tree: _Tree) -> _Tree:
        """Sums the arrays in ``tree`` over the workers of this worker's group."""
        for index, peer_sum in enumerate(self.sums):
            with jax.named_scope(f"{scopes.ROUND}{index}"):
                tree = lax.cond(self.round_index == index, peer_sum, lambda same: same, tree)
        return tree


def _covering(groups: Sequence[tuple[int, ...]], num_live: int) -> tuple[tuple[int, ...], ...]:
    """Returns the groups, plus every other mesh row as a group of its own."""
    lone_rows = set(range(num_live)).difference(*groups)
    return *groups, *((row,) for row in sorted(lone_rows))


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """Static description of an iteration: everything except arrays.

    Attributes:
        gpt: model architecture.
        live: mesh of the live workers.
        experts: settings of the expert layers.
        policy: placement policy.
        optimizer: elementwise optax transformation, without clipping.
        learning_rate: learning rate by iteration, as recorded in the metrics.
        clip_norm: largest global gradient norm, or None for no clipping.
        layouts: layout of the master weights, by group.
        compute_dtype: dtype of slots and activations.
        num_microbatches: micro-batches of an iteration, over all pipelines.
        num_hot_rows: rows of a sharded embedding that a rank may copy in an iteration, H.
        decays_matrices_only: whether weight decay excludes embeddings, norms and biases.
        remat: part of a block that is recomputed from its input in the backward pass: none, attention, or the block.
        weighs_tokens: whether batches have a weight for every token's loss, see ``Batch.weights``.
        memory: location of master weights and moments between updates.
        cut: blocks of every stage in the first pipeline and in checkpoints, or None for equally many in all stages.
        chunks: chunks that every worker holds, or None if all pipelines have the same cut and each chunk is a stage.
        worker_shapes: shapes of a worker's state, or None to find them by tracing.
    """

    gpt: GPT
    live: LiveMesh
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
    weighs_tokens: bool = False
    memory: Literal["device", "pinned_host"] = "device"
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
        # A scalar is a counter of the worker; other arrays are as large as the master weights, and RANKED like them.
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
        if not is_grouped_like_params(self.worker_shapes.moments, self.worker_shapes.master):
            allowed = "needs an optimizer whose arrays are in trees like that of the parameters: use device"
            raise SettingError("StepSpec.memory", self.memory, allowed)

    def _check_policy(self) -> None:
        if self.chunks.is_one_chunk_per_worker or not self.num_moe_layers:
            return
        sizes = self.experts.num_classes, self.live.num_ranks, self.experts.slots_per_rank
        one_layer, two_layers = (jax.eval_shape(partial(self.policy.init, number, *sizes))[1] for number in (1, 2))
        if one_layer != two_layers:
            allowed = "must have no state for each layer, where a worker holds layers that others hold apart"
            raise SettingError("StepSpec.policy", self.policy, allowed)

    @property
    def num_stages(self) -> int:
        """Number of stages, P."""
        return self.live.topology.num_stages

    @cached_property
    def num_moe_layers(self) -> int:
        """Number of MoE layers in a worker's stacks, L: the largest number that any worker has."""
        return self.chunks.stack_size(True)

    @cached_property
    def model_index(self) -> dict[str, np.ndarray]:
        """Index in the model of each holding's layers, int64[H, layers] by group; negative for padding.

        If all pipelines have the same cut and a chunk is a stage, the holdings are the stages.
        """
        ends = np.zeros((len(self.chunks.worker_chunks), 1), int)
        return {
            name: ends if name in EMBEDDING_AND_HEAD else self.chunks.model_index(KINDS[name])
            for name in self.gpt.groups
        }

    @cached_property
    def num_layers(self) -> dict[str, int]:
        """Number of layers in a worker's stack, by group."""
        return {name: index.shape[1] for name, index in self.model_index.items()}

    @cached_property
    def holding_R(self) -> np.ndarray:
        """Holding of each mesh row's worker, int32."""
        return np.array([self.chunks.holding(*row.role) for row in self.live.rows], np.int32)

    def has_same_chunks(self, other: "StepSpec") -> bool:
        """Whether every mesh row holds the same chunks under both specs, so that no state has to move."""
        return self.chunks == other.chunks and np.array_equal(self.holding_R, other.holding_R)

    @cached_property
    def peers_C(self) -> tuple[tuple[int, ...], ...]:
        """Mesh rows whose workers hold each chunk, ascending; these workers are peers with respect to the chunk."""
        holds_RC = self.chunks.holds_HC[self.holding_R]
        return tuple(tuple(np.flatnonzero(holds_R).tolist()) for holds_R in holds_RC.T)

    @cached_property
    def rounds(self) -> Rounds:
        """Sums over the workers that hold the same chunk."""
        unequal = reduction_for_unequal_groups(self.live.mesh.devices.flat[0].platform)
        return Rounds.of(self.peers_C, self.chunks.holds_HC, unequal)

    @property
    def sums_need_all(self) -> bool:
        """Whether all workers must take part in a sum over some of them."""
        return self.ties_stages or any(peer_sum.is_tree for peer_sum in self.rounds.sums)

    @property
    def ties_stages(self) -> bool:
        """Whether the head reads the embedding and the two are in different chunks.

        If so, every worker keeps an up-to-date embedding: its gradient is the sum over all workers.
        """
        return self.gpt.config.tied_embeddings and len(self.chunks.sizes) > 1

    def locations(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns (lowest mesh row that has it, its stack index there) for each layer of a group, int64[L] each."""
        index_RL = self.model_index[name][self.holding_R]
        if name in EMBEDDING_AND_HEAD:
            chunk = 0 if name == "embedding" else len(self.chunks.sizes) - 1
            return np.array([self.peers_C[chunk][0]]), np.zeros(1, int)
        worker, layer = np.nonzero(index_RL >= 0)
        _, first = np.unique(index_RL[worker, layer], return_index=True)
        return worker[first], layer[first]

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of a worker's state, over all its expert ranks."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.worker_shapes))

    @property
    def is_single_worker(self) -> bool:
        """Whether there is only one worker: no pipeline, and no peers."""
        return len(self.live.topology.workers) == 1

    @cached_property
    def number_shapes(self) -> Any:
        """Shapes of the router's own numbers in one layer, ``Number`` by name; an empty tuple for none."""
        if "router" not in self.gpt.groups:
            return ()
        router, num_classes, length = self.experts.router, self.experts.num_classes, self.gpt.config.sequence_length
        num_tokens = num_classes * length  # enough for a router whose experts choose tokens

        def tokens(keys: jax.Array) -> RouterTokens:
            logits_TX = jnp.zeros((num_tokens, router.num_logits(num_classes)), self.accumulate_dtype)
            x_TD = jnp.zeros((num_tokens, self.gpt.config.model_dim), self.compute_dtype)
            state = {name: jnp.asarray(value) for name, value in router.init_state(num_classes).items()}
            noise = TokenNoise.of(keys, 0, length) if router.draws_noise else None
            return RouterTokens(logits_TX, x_TD, jnp.ones(num_tokens, bool), state, noise)

        keys = jax.ShapeDtypeStruct((num_classes, 2), jnp.uint32)
        return jax.eval_shape(lambda keys: self.experts.route(tokens(keys)).numbers, keys)

    @cached_property
    def draws_noise(self) -> bool:
        """Whether a training step needs ``Batch.keys``."""
        return self.experts.router.draws_noise and "router" in self.gpt.groups

    @property
    def accumulate_dtype(self) -> DTypeLike:
        """Dtype for master weights, moments and gradient sums."""
        return jnp.promote_types(self.compute_dtype, jnp.float32)

    @property
    def row_wire_dtype(self) -> DTypeLike:
        """Dtype in which row gradients of the embedding are sent, if ranks share the rows."""
        layout = self.layouts["embedding"]
        assert isinstance(layout, Decoupled)
        return layout.wire_dtype

    def stages_mesh(self) -> LiveMesh:
        """Returns the live mesh with one worker per stage, for a checkpoint's state."""
        return self.live.with_rows(tuple(self.live.rows[index] for index in self.live.first_rows))

    @cached_property
    def checkpoint_spec(self) -> "StepSpec":
        """Spec of the state in a checkpoint: one worker per stage, with the first pipeline's cut."""
        on_stages = self.at(self.stages_mesh())
        return on_stages if self.chunks.matches_stages else replace(on_stages, chunks=None, worker_shapes=None)  # type: ignore[arg-type]

    def at(self, live: LiveMesh) -> "StepSpec":
        """Returns the same spec on another live mesh of the same topology."""
        return replace(self, live=live)

    @cached_property
    def embedding_and_head_bytes(self) -> int:
        """Bytes of embedding and head on a worker: every rank's copy or shard, and master weights and moments once."""
        ends = {jax.tree_util.DictKey(name) for name in EMBEDDING_AND_HEAD}
        state = self.worker_shapes
        leaves = jax.tree_util.tree_leaves_with_path((state.master, state.moments))
        shared = sum(leaf.size * leaf.dtype.itemsize for path, leaf in leaves if ends & set(path))
        copies = self.live.num_ranks * sum(self.gpt.slot_groups[end.key].size for end in ends)
        return shared + copies * jnp.dtype(self.compute_dtype).itemsize

    def placements(
        self, experts_LNS: Int[Array, "L N S"], stacks: Mapping[str, Any] | None = None
    ) -> dict[str, jax.Array]:
        """Returns the placement of each group; a dense group is one class with a slot on every rank.

        Args:
            experts_LNS: placement of the experts.
            stacks: array ``[layer, ...]`` for each group, which determines the number of layers, or None for the
                numbers of layers in a worker's stacks.
        """
        num_layers = self.num_layers if stacks is None else {name: len(leaf) for name, leaf in stacks.items()}
        return {
            name: experts_LNS if group.is_expert else jnp.zeros((num_layers[name], self.live.num_ranks, 1), jnp.int32)
            for name, group in self.gpt.groups.items()
        }

    def init(self, key: jax.Array) -> TrainState:
        """Creates the state before the first iteration; it depends on ``key``, not on the number of ranks or stages."""
        # Drawn on one device: a program on the whole mesh would draw everything on each of its devices.
        return self.state_from_params(jax.jit(self.gpt.init)(key))

    def state_from_params(self, params: Mapping[str, jax.Array]) -> TrainState:
        """Creates the state before the first iteration from parameters ``[layer, class, size]`` by group."""
        return self.fill_slots(self.state_without_slots(params))

    def state_without_slots(self, params: Mapping[str, jax.Array]) -> TrainState:
        """Creates the state from parameters, without slots."""
        return jax.jit(self._lay_out, out_shardings=replace(self.shardings, slots={}))(dict(params))

    def fill_slots(self, state: TrainState) -> TrainState:
        """Fills the slots from the master weights and the placement, as after a restore."""
        filled = replace(state, slots=self._make_slots(self.in_device_memory(state).master, state.placement))
        return self.to_resting_memory(filled)

    @property
    def shardings(self) -> TrainState:
        """Shardings of a state between iterations, as a prefix tree."""
        shardings = self.live.shardings(self.specs)
        if self.memory == "device":
            return shardings

        def slices(spec: PartitionSpec, sharding: NamedSharding) -> NamedSharding:
            return sharding.with_memory_kind(self.memory) if spec == RANKED else sharding

        pairs = ((of.master, of.moments) for of in (self.specs, shardings))
        master, moments = jax.tree.map(slices, *pairs, is_leaf=is_spec)
        return replace(shardings, master=master, moments=moments)

    def jitted(self, per_rank: Callable[..., Any], in_specs: Any, out_specs: Any, **options: Any) -> Wrapped:
        """Returns a jitted function of global arrays, see ``LiveMesh.per_rank``, with ``jax.jit``'s other options.

        The shardings are explicit, so that states from init, from a restore and from a previous call run the same
        program.
        """
        ins, outs = map(self._shardings_of, (in_specs, out_specs))
        run = self.live.per_rank(per_rank, in_specs, out_specs)
        return jax.jit(run, in_shardings=ins, out_shardings=outs, **options)

    def _shardings_of(self, specs: Any) -> Any:
        """Maps a tree of specs to shardings; a state's shardings have its memory between iterations."""

        def is_state(node: Any) -> bool:
            return node is self.specs

        def sharding(node: Any) -> Any:
            return self.shardings if is_state(node) else self.live.shardings(node)

        return jax.tree.map(sharding, specs, is_leaf=lambda node: is_state(node) or is_spec(node))

    def to_resting_memory(self, state: TrainState) -> TrainState:
        """Moves master weights and moments to their memory between iterations."""
        return state if self.memory == "device" else jax.device_put(state, self.shardings)

    def in_device_memory(self, state: TrainState) -> TrainState:
        """Moves everything to device memory, as programs other than iterations expect it."""
        return state if self.memory == "device" else jax.device_put(state, self.live.shardings(self.specs))

    def abstract(self, *, with_slots: bool = False) -> TrainState:
        """Returns a state's shapes, dtypes and shardings; without slots, those in a checkpoint."""
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

    def gather_master_weights(self, state: TrainState) -> dict[str, np.ndarray]:
        """Gathers the master weights on the host, by group: ``[layer, class, size]``, the layout of a plain model."""
        # Each op on sharded arrays would be a program with its own collectives, and emulated devices can deadlock when
        # many of those run at once. Also, the weights of all experts need not fit on one device.
        master, placement = jax.device_get((state.master, state.placement))

        def classes(name: str) -> np.ndarray:
            worker_L, index_L = self.locations(name)
            classes_by_worker = {}
            for worker in set(worker_L.tolist()):
                stacks = {name: leaf[worker] for name, leaf in master.items()}
                placements = self.placements(placement[worker], stacks)
                classes_by_worker[worker] = self.layouts[name].classes(stacks[name], placements[name])
            return np.stack(
                [
                    classes_by_worker[worker][index]
                    for worker, index in zip(worker_L.tolist(), index_L.tolist(), strict=True)
                ]
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

        holdings = jax.vmap(self._lay_out_holding, axis_size=len(self.chunks.worker_chunks))(
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
    """Fills the slots of every group, per rank, from master weights and the placement int32 ``[L, N, S]``."""
    placements = spec.placements(placement_LNS, master)
    return {name: spec.layouts[name].materialize(master[name], placements[name]) for name in master}
