"""An experiment: every setting of a run, and the program that they make."""

from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from swift.data import Batch, DataConfig, Loader, Split
from swift.errors import SettingError, check_count, check_seed
from swift.experts import ExpertConfig
from swift.experts.layouts import Decoupled, Instances, Layout, ReplicaShards
from swift.experts.optimizer import OptimizerConfig, learning_rate, make_optimizer
from swift.experts.placement import PlacementPolicy, Static, Symi, check_slots
from swift.mesh import RANKED, LiveMesh, RankKind, live_mesh
from swift.models import GPT, Group, ModelConfig, model_size
from swift.topology import Topology
from swift.train.state import Program

COMPUTE_DTYPES = ("float32", "bfloat16", "float64")
WIRE_DTYPES = ("compute", "float32", "bfloat16")


@dataclass(frozen=True)
class Experiment:
    """A run's settings, each with the demo's value.

    Attributes:
        model: the GPT's shape.
        experts: its expert layers.
        placement: the policy that places experts anew every iteration.
        topology: pipelines, stages and expert ranks; this version runs (1, 1, N).
        ranks: ``emulated`` CPU devices, the machine's ``devices``, or ``virtual`` ranks of one device.
        data: documents and tokens.
        optimizer: optimizer and schedule.
        compute_dtype: type of slots and activations; master weights are at least float32.
        wire_dtype: type of gradients on the wire; ``compute`` is the compute type.
        seed: of the parameters and of the order of the data.
        num_steps: iterations.
        num_microbatches: micro-batches of an iteration in each pipeline.
        sequences_per_microbatch: sequences of a micro-batch, over all expert ranks.
        eval_every: iterations between evaluations on the validation split; 0 for none.
        num_eval_batches: batches of an evaluation; the first ones, always the same.
        checkpoint_every: iterations between checkpoints; the last iteration is saved too. 0 for none at all.
        num_checkpoints_kept: the newest ones stay.
        target_loss: the training loss to count the iterations to, or None.
    """

    model: ModelConfig = field(default_factory=lambda: model_size("demo"))
    experts: ExpertConfig = field(default_factory=ExpertConfig)
    placement: PlacementPolicy = field(default_factory=Symi)
    topology: Topology = field(default_factory=lambda: Topology(num_expert_ranks=8))
    ranks: RankKind = "emulated"
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    compute_dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    wire_dtype: Literal["compute", "float32", "bfloat16"] = "compute"
    seed: int = 0
    num_steps: int = 300
    num_microbatches: int = 1
    sequences_per_microbatch: int = 16
    eval_every: int = 100
    num_eval_batches: int = 8
    checkpoint_every: int = 100
    num_checkpoints_kept: int = 2
    target_loss: float | None = None

    def __post_init__(self) -> None:
        self._check_parts()
        positive = ("num_steps", "num_microbatches", "sequences_per_microbatch", "num_eval_batches")
        for name in (*positive, "num_checkpoints_kept"):
            check_count(f"Experiment.{name}", getattr(self, name), least=1)
        for name in ("eval_every", "checkpoint_every"):
            check_count(f"Experiment.{name}", getattr(self, name), least=0)
        check_seed("Experiment.seed", self.seed)
        for name, choices in {"compute_dtype": COMPUTE_DTYPES, "wire_dtype": WIRE_DTYPES}.items():
            if getattr(self, name) not in choices:
                raise SettingError(f"Experiment.{name}", getattr(self, name), f"choose one of {', '.join(choices)}")
        if len(self.topology.workers) > 1:
            shape = (self.topology.num_pipelines, self.topology.num_stages)
            raise SettingError("Topology", shape, "this version trains one pipeline of one stage, (1, 1)")
        if self.sequences_per_microbatch % self.topology.num_expert_ranks:
            allowed = f"must be a multiple of Topology.num_expert_ranks = {self.topology.num_expert_ranks}"
            raise SettingError("Experiment.sequences_per_microbatch", self.sequences_per_microbatch, allowed)
        check_slots(self.experts.num_classes, self.topology.num_expert_ranks, self.experts.slots_per_rank)
        self.model.stage_pattern(self.topology.num_stages)
        # Refused here, before anything is written or JAX has started.
        learning_rate(self.optimizer, self.num_steps)
        if self.optimizer.layout == "coupled":
            self._check_coupled()

    def _check_parts(self) -> None:
        parts = (ModelConfig, ExpertConfig, Topology, DataConfig, OptimizerConfig)
        for name, kind in zip(("model", "experts", "topology", "data", "optimizer"), parts, strict=True):
            if not isinstance(getattr(self, name), kind):
                raise SettingError(f"Experiment.{name}", getattr(self, name), f"must be @{kind.__name__}()")
        if isinstance(self.placement, type) or not hasattr(self.placement, "init"):
            raise SettingError("Experiment.placement", self.placement, "must be a placement policy, such as @Symi()")

    def _check_coupled(self) -> None:
        if not isinstance(self.placement, Static):
            return
        if self.ranks == "virtual":
            allowed = "with a static placement reduces over groups of ranks, which virtual ranks cannot: use decoupled"
            raise SettingError("OptimizerConfig.layout", "coupled", allowed)
        classes, slots, ranks = self.experts.num_classes, self.experts.slots_per_rank, self.topology.num_expert_ranks
        if classes % slots or ranks % max(1, classes // slots):
            allowed = f"needs ExpertConfig.slots_per_rank = {slots} to divide ExpertConfig.num_classes = {classes}, "
            allowed += f"and the quotient to divide Topology.num_expert_ranks = {ranks}"
            raise SettingError("OptimizerConfig.layout", "coupled", allowed)

    @property
    def tokens_per_step(self) -> int:
        """Positions of an iteration's global batch."""
        return self.num_microbatches * self.sequences_per_microbatch * self.model.sequence_length

    def loader(self, split: Split) -> Loader:
        """The batches of a split."""
        return Loader(
            self.data,
            split,
            num_microbatches=self.num_microbatches,
            sequences_per_microbatch=self.sequences_per_microbatch,
            sequence_length=self.model.sequence_length,
            seed=self.seed,
        )

    def program(self, live: LiveMesh | None = None) -> Program:
        """The program of an iteration, on a mesh of its own unless one is given."""
        if self.compute_dtype == "float64" and jax.dtypes.canonicalize_dtype(jnp.float64) != jnp.float64:
            raise SettingError("Experiment.compute_dtype", "float64", "needs the JAX setting jax_enable_x64")
        live = live or live_mesh(self.topology, self.ranks)
        gpt = GPT(self.model, self.data.vocab_size, self.experts.num_classes)
        return Program(
            gpt=gpt,
            experts=self.experts,
            policy=self.placement,
            live=live,
            optimizer=make_optimizer(self.optimizer, self.num_steps),
            schedule=learning_rate(self.optimizer, self.num_steps),
            clip_norm=self.optimizer.clip_norm,
            layouts={name: self._layout(group) for name, group in gpt.groups.items()},
            compute_dtype=jnp.dtype(self.compute_dtype),
        )

    def identity(self) -> dict[str, Any]:
        """What a checkpoint has to share with the run that reads it."""
        return {
            "ModelConfig": repr(self.model),
            "vocabulary": self.data.vocab_size,
            "ExpertConfig.num_classes": self.experts.num_classes,
            "ExpertConfig.slots_per_rank": self.experts.slots_per_rank,
            "Topology": repr(self.topology),
            "OptimizerConfig.name": self.optimizer.name,
            "OptimizerConfig.layout": self.optimizer.layout,
            "Experiment.placement": repr(self.placement),
            "Experiment.compute_dtype": self.compute_dtype,
        }

    def _layout(self, group: Group) -> Layout:
        classes, size, ranks = group.num_classes, group.size, self.topology.num_expert_ranks
        compute = jnp.dtype(self.compute_dtype)
        wire = compute if self.wire_dtype == "compute" else jnp.dtype(self.wire_dtype)
        if not group.is_expert or self.optimizer.layout == "decoupled":
            return Decoupled(classes, size, ranks, compute, wire)
        if isinstance(self.placement, Static):
            return ReplicaShards(classes, size, ranks, self.experts.slots_per_rank, compute)
        return Instances(classes, size, ranks, compute, wire)


def by_rank(batch: Batch, num_ranks: int) -> Batch:
    """Splits a batch ``[M, B, T]`` over the ranks, whole sequences: ``[worker = 1, M, rank, B / ranks, T]``."""

    def split(leaf: np.ndarray) -> np.ndarray:
        num_microbatches, num_sequences, length = leaf.shape
        return leaf.reshape(1, num_microbatches, num_ranks, num_sequences // num_ranks, length)

    return Batch(*map(split, batch))


def put_batch(batch: Batch, live: LiveMesh) -> Batch:
    """A host batch ``[M, B, T]`` on the mesh's devices, each rank's sequences on that rank."""
    return live.put(by_rank(batch, live.num_ranks), RANKED)
