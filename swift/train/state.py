"""The training state, its layout on a live mesh, and how it is made.

Every leaf has a leading ``worker`` dim. Master weights, moments and slots are RANKED ``[worker, row, rank, ...]``; the
iteration, the placement and the policy's own state are SHARED ``[worker, ...]``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from swift.experts import ExpertConfig
from swift.experts.layouts import Layout
from swift.experts.placement import PlacementPolicy
from swift.mesh import RANKED, SHARED, LiveMesh
from swift.models import GPT


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that an iteration reads and writes, or a tree of specs of the same form."""

    step: Any  # int32[worker], iterations done
    master: Any  # {group: master weights, at least float32 [worker, row, rank, ...]}
    moments: Any  # the optimizer's state over master; its counters are [worker]
    slots: Any  # {group: compute type [worker, row, rank, slot, size]}, made from master and placement
    placement: Any  # int32[worker, MoE row, rank, slot], the class in every slot
    policy: Any  # the placement policy's state


@dataclass(frozen=True)
class Program:
    """What an iteration is made of, apart from arrays.

    Attributes:
        gpt: the architecture.
        experts: the expert layers.
        policy: places the experts.
        live: the mesh that it runs on.
        optimizer: an elementwise optax transformation, without clip.
        schedule: the learning rate of an iteration, for the record.
        clip_norm: largest global gradient norm, or None.
        layouts: for each group, where its master weights live.
        compute_dtype: type of slots and activations.
    """

    gpt: GPT
    experts: ExpertConfig
    policy: PlacementPolicy
    live: LiveMesh
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    clip_norm: float | None
    layouts: Mapping[str, Layout]
    compute_dtype: DTypeLike
    specs: TrainState = field(init=False)

    def __post_init__(self) -> None:
        moments = self._shapes.moments
        # One leading dim is a counter of the worker; arrays as large as the master weights are ranked like them.
        specs = TrainState(
            step=SHARED,
            master=RANKED,
            moments=jax.tree.map(lambda leaf: SHARED if leaf.ndim == 1 else RANKED, moments),
            slots=RANKED,
            placement=SHARED,
            policy=SHARED,
        )
        object.__setattr__(self, "specs", specs)

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts, L."""
        return sum(self.gpt.config.moe_layers)

    @cached_property
    def ends_bytes(self) -> int:
        """Bytes of embedding and head on a worker: a copy on every rank, master weights and moments once."""
        ends = {jax.tree_util.DictKey(name) for name in ("embedding", "head")}
        state = self._shapes
        leaves = jax.tree_util.tree_leaves_with_path((state.master, state.moments))
        shared = sum(leaf.size * leaf.dtype.itemsize for path, leaf in leaves if ends & set(path))
        copies = self.live.num_ranks * sum(self.gpt.groups[end.key].size for end in ends)
        return shared + copies * jnp.dtype(self.compute_dtype).itemsize

    def placements(self, experts_LNS: jax.Array) -> dict[str, jax.Array]:
        """For each group, its placement; a dense group is one class with a slot on every rank."""
        return {
            name: experts_LNS if group.is_expert else jnp.zeros((group.num_rows, self.live.num_ranks, 1), jnp.int32)
            for name, group in self.gpt.groups.items()
        }

    def init(self, key: jax.Array) -> TrainState:
        """The state before the first iteration; it depends on ``key`` and not on the number of ranks."""
        create = jax.jit(lambda key: self._lay_out(self.gpt.init(key)), out_shardings=self._layout_shardings())
        return self.fill_slots(create(key))

    def adopt(self, params: Mapping[str, jax.Array]) -> TrainState:
        """The state before the first iteration on given parameters, whole classes ``[row, class, size]`` by group."""
        lay_out = jax.jit(self._lay_out, out_shardings=self._layout_shardings())
        return self.fill_slots(lay_out(dict(params)))

    def fill_slots(self, state: TrainState) -> TrainState:
        """The state with slots made anew from the master weights and the placement, as after a restore."""
        return replace(state, slots=self._make_slots(state.master, state.placement))

    def abstract(self) -> TrainState:
        """Shapes, types and shardings of a state without its slots: what a checkpoint holds."""
        return jax.tree.map(
            lambda sharding, sub: jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), sub
            ),
            self._layout_shardings(),
            self._shapes,
        )

    def whole_classes(self, state: TrainState) -> dict[str, jax.Array]:
        """The master weights ``[row, class, size]`` of each group, as a plain single-device model has them."""
        # From the host: op by op on sharded arrays, each op would be a program with collectives of its own, and
        # emulated devices can deadlock when many of them are under way.
        master, placement = jax.device_get((state.master, state.placement))
        placements = self.placements(placement[0])
        return {name: self.layouts[name].classes(master[name][0], placements[name]) for name in self.gpt.groups}

    @cached_property
    def _make_slots(self) -> Callable[[dict[str, jax.Array], jax.Array], dict[str, jax.Array]]:
        def make(master: dict[str, jax.Array], placement_LNS: jax.Array) -> dict[str, jax.Array]:
            return materialize_all(self, master, placement_LNS)

        return jax.jit(self.live.per_rank(make, (RANKED, SHARED), RANKED))

    def _layout_shardings(self) -> TrainState:
        return self.live.shardings(replace(self.specs, slots={}))

    @cached_property
    def _shapes(self) -> TrainState:
        return jax.eval_shape(lambda: self._lay_out(self.gpt.init(jax.random.key(0))))

    def _lay_out(self, params: Mapping[str, jax.Array]) -> TrainState:
        config, ranks = self.experts, self.live.num_ranks
        placement, policy = self.policy.init(self.num_moe_layers, config.num_classes, ranks, config.slots_per_rank)
        dtype, placements = jnp.promote_types(self.compute_dtype, jnp.float32), self.placements(placement)
        master = {
            name: self.layouts[name].init(classes.astype(dtype), placements[name]) for name, classes in params.items()
        }
        state = TrainState(jnp.zeros((), jnp.int32), master, self.optimizer.init(master), {}, placement, policy)
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], state)


def materialize_all(
    program: Program, master: Mapping[str, jax.Array], placement_LNS: jax.Array
) -> dict[str, jax.Array]:
    """Per rank: the slots of every group."""
    placements = program.placements(placement_LNS)
    return {name: program.layouts[name].materialize(master[name], placements[name]) for name in master}
