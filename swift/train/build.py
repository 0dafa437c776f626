"""Builds what an experiment describes: its loaders, mesh, step, plans and engine; and derives other experiments.

Errors of lower layers name their own fields. The functions here rename them to the settings that users write.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from swift.config.cuts import checkpoint_cut, model_chunks, planning_problem
from swift.config.experiment import Experiment
from swift.data.config import Split
from swift.data.loader import Loader
from swift.errors import SettingError, renamed_settings
from swift.experts.optimizer import learning_rate, make_optimizer
from swift.experts.placement.policy import Static
from swift.experts.state_layouts import Decoupled, FetchedPerMicrobatch, Instances, Layout, ReplicaShards
from swift.mesh.live import LiveMesh, live_mesh
from swift.models.attention_kernels import choose_kernel
from swift.models.config import AttentionKernel
from swift.models.gpt import GPT
from swift.models.vocabulary.layouts import ColumnSharded, RowSharded
from swift.models.vocabulary.lookup import num_hot_rows
from swift.pipeline.reconfigure.configuration import PlanSettings
from swift.pipeline.step.costs import plan_costs
from swift.pipeline.step.single_worker import sequences_per_rank
from swift.pipeline.step.spec import StepSpec
from swift.topology import Worker

if TYPE_CHECKING:
    from swift.pipeline.reconfigure.engine import Engine, Prepare
    from swift.schedules.adapt.moves import MigrationPolicy

_SETTINGS = {
    "Loader.sequence_length": "ModelConfig.sequence_length",
    "choose_kernel.asked": "Experiment.attention",
    "planner": "Experiment.planner",
    "ranks": "Experiment.ranks",
    "StepSpec.policy": "Experiment.placement",
    "StepSpec.memory": "OptimizerConfig.memory",
}
"""Fields of lower layers, and the settings that users know them by."""

users_settings = partial(renamed_settings, _SETTINGS)
"""Context in which errors name settings as users write them."""


def make_loader(experiment: Experiment, split: Split, corpus: Path | None = None) -> Loader:
    """Makes the loader of a split.

    Args:
        experiment: settings of the run.
        split: split to load.
        corpus: index of the corpus, see ``find_index``; None: the corpus is read and tokenized now.
    """
    with users_settings():
        return Loader(
            experiment.data,
            split,
            num_microbatches=experiment.topology.num_pipelines * experiment.num_microbatches,
            sequences_per_microbatch=experiment.sequences_per_microbatch,
            sequence_length=experiment.model.sequence_length,
            seed=experiment.seed,
            corpus=corpus,
            # After a failure the run continues from a state that all processes have. By then one process may have read
            # data for the window after its current one, while another has yet to finish the window before.
            num_kept=3 * experiment.window if split == "train" else experiment.num_eval_batches,
            draws_keys=split == "train" and experiment.experts.router.draws_noise and any(experiment.model.moe_layers),
        )


def make_mesh(experiment: Experiment) -> LiveMesh:
    """Makes the mesh of all workers, on the devices that ``Experiment.ranks`` names."""
    with users_settings():
        return live_mesh(experiment.topology, experiment.ranks)


def make_step_spec(experiment: Experiment, live: LiveMesh | None = None, platform: str | None = None) -> StepSpec:
    """Makes the spec of a training step, whose vocabulary is the tokenizer's.

    Args:
        experiment: settings of the run.
        live: mesh; None: a new mesh of all workers.
        platform: platform that will run the step, if this process has no such devices; None: the mesh's platform.

    Raises:
        SettingError: the tokenizer's file cannot be read, or a setting does not work on this mesh.
    """
    if experiment.compute_dtype == "float64" and jax.dtypes.canonicalize_dtype(jnp.float64) != jnp.float64:
        raise SettingError("Experiment.compute_dtype", "float64", "needs the JAX setting jax_enable_x64")
    live = live or make_mesh(experiment)
    if experiment.vocab_size < experiment.data.vocab_size:
        allowed = f"must be at least {experiment.data.vocab_size}, the number of the tokenizer's tokens"
        raise SettingError("ModelConfig.vocab_size", experiment.vocab_size, allowed)
    optimizer, experts = experiment.optimizer, experiment.experts
    with users_settings():
        gpt = GPT(
            experiment.model,
            vocab_size=experiment.vocab_size,
            num_classes=experts.num_classes,
            router=experts.router,
            kernel=_choose_kernel(experiment, live, platform),
            separator=experiment.data.separator if experiment.separate_documents else None,
            has_slices=experts.capacity.fetches_weights,
            **_sharing_ranks(experiment, live),
        )
        return StepSpec(
            gpt=gpt,
            experts=experts,
            policy=experiment.placement,
            live=live,
            optimizer=make_optimizer(optimizer, experiment.num_steps),
            learning_rate=learning_rate(optimizer, experiment.num_steps),
            clip_norm=optimizer.clip_norm,
            decays_matrices_only=optimizer.decayed == "matrices",
            layouts=_make_layouts(experiment, gpt, live.num_ranks),
            compute_dtype=jnp.dtype(experiment.compute_dtype),
            num_microbatches=experiment.topology.num_pipelines * experiment.num_microbatches,
            num_hot_rows=_num_hot(experiment, gpt),
            remat=experiment.remat,
            weighs_tokens=experiment.data.weighs_tokens,
            memory="device" if live.virtual else optimizer.memory,  # a virtual mesh only stores states
            cut=checkpoint_cut(experiment),
            chunks=model_chunks(experiment),
        )


def make_plan_settings(experiment: Experiment, spec: StepSpec) -> PlanSettings:
    """Makes the settings that all plans of an experiment share.

    Raises:
        SettingError: there is too little memory for a single micro-batch.
    """
    per_rank = sequences_per_rank(experiment.sequences_per_microbatch, experiment.topology.num_expert_ranks)
    with users_settings():
        costs, chunk_costs, sizes = plan_costs(spec, per_rank)
        problem = planning_problem(experiment, costs, chunk_costs)
        return PlanSettings(problem, experiment.planner, sizes, adapt=experiment.adapt)


def make_engine(
    experiment: Experiment, failed: frozenset[Worker], prepare: "Prepare", live: LiveMesh | None = None
) -> "Engine":
    """Makes the engine of an experiment, planned for the first failures; on a new mesh unless one is given.

    Raises:
        SettingError: there are too few devices or too little memory, or no plan for these failures.
    """
    from swift.pipeline.reconfigure.engine import Engine

    spec = make_step_spec(experiment, live)
    settings = make_plan_settings(experiment, spec)
    with users_settings():
        return Engine(spec, settings, experiment.sequences_per_microbatch, prepare, failed)


def migration_policy(experiment: Experiment) -> "MigrationPolicy | None":
    """Returns the rule that decides when survivors of a failure take over blocks; None: never."""
    if experiment.adapt == "reroute":
        return None
    from swift.schedules.adapt.moves import Downtimes, MigrationPolicy

    return MigrationPolicy(Downtimes(experiment.expected_downtime), is_always=experiment.adapt in ("reassign", "recut"))


def with_num_ranks(experiment: Experiment, num_ranks: int) -> Experiment:
    """Returns the same experiment on fewer expert ranks, with a slot for every class, without failures or snapshots.

    It computes the same sums, but with fewer slots more tokens are dropped, unless the capacity is exact or its factor
    is None.
    """
    if num_ranks == experiment.topology.num_expert_ranks:
        return experiment
    experts = experiment.experts
    slots = max(experts.slots_per_rank, experts.capacity.least_slots(experts.num_classes, num_ranks))
    return replace(
        experiment,
        topology=replace(experiment.topology, num_expert_ranks=num_ranks),
        experts=replace(experts, slots_per_rank=slots),
        checkpoint=replace(experiment.checkpoint, snapshot_every=0, snapshot_experts_per_layer="all"),
        failures=(),
    )


def on_storage_mesh(experiment: Experiment) -> Experiment:
    """Returns the same experiment with an attention kernel for any device; states do not depend on the kernel."""
    return replace(experiment, attention="auto")


def _make_layouts(experiment: Experiment, gpt: GPT, num_ranks: int) -> dict[str, Layout]:
    """Makes each parameter group's layout, on a number of a worker's expert ranks.

    In the layout ``coupled``, where expert state is tied to slots, the placement policy decides whether slots keep
    their experts.
    """
    experts, layouts = experiment.experts, dict[str, Layout]()
    compute = jnp.dtype(experiment.compute_dtype)
    wire = compute if experiment.wire_dtype == "compute" else jnp.dtype(experiment.wire_dtype)
    for name, group in gpt.groups.items():
        shape = group.num_classes, group.size, num_ranks
        if group.is_expert and experts.capacity.fetches_weights:
            layouts[name] = FetchedPerMicrobatch(*shape, compute, wire)
        elif name == "embedding" and gpt.embedding_ranks > 1:
            layouts[name] = RowSharded(*shape, compute, wire, gpt.vocab_size, gpt.config.model_dim)
        elif name == "head" and gpt.head_ranks > 1:
            layouts[name] = ColumnSharded(*shape, compute, wire, gpt.config.model_dim, gpt.vocab_size)
        elif not group.is_expert or experiment.optimizer.layout == "decoupled":
            layouts[name] = Decoupled(*shape, compute, wire)
        elif isinstance(experiment.placement, Static):
            layouts[name] = ReplicaShards(*shape, experts.slots_per_rank, compute)
        else:
            layouts[name] = Instances(*shape, compute, wire)
    return layouts


def _sharing_ranks(experiment: Experiment, live: LiveMesh) -> dict[str, int]:
    """Returns how many ranks share the embedding and the head's matrix, as arguments of ``GPT``; 1: not sharded."""
    settings = {"embedding": experiment.embedding, "head": experiment.head}
    return {f"{name}_ranks": live.num_ranks if setting == "sharded" else 1 for name, setting in settings.items()}


def _num_hot(experiment: Experiment, gpt: GPT) -> int:
    """Returns how many rows of a sharded embedding a rank may hold as copies; 0 if it is not sharded."""
    if gpt.embedding_ranks == 1:
        return 0
    num_sequences = sequences_per_rank(experiment.sequences_per_microbatch, gpt.embedding_ranks)
    num_tokens = num_sequences * gpt.config.sequence_length
    return num_hot_rows(num_tokens, gpt.vocab_size, experiment.num_microbatches)


def _choose_kernel(experiment: Experiment, live: LiveMesh, platform: str | None) -> AttentionKernel:
    """Chooses the attention kernel for the devices of a mesh, or for a platform that this process does not have."""
    return choose_kernel(
        experiment.attention,
        platform or live.mesh.devices.flat[0].platform,
        experiment.compute_dtype,
        experiment.model,
        separates=experiment.separate_documents,
        is_here=platform is None,
    )
