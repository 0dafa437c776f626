"""Starts a new run from the weights of another run or a model; optimizer moments and all else start fresh."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

from swift.checkpoint.arrays import load_metadata
from swift.checkpoint.reader import RestorePlan, plan_restore
from swift.config.experiment import Experiment
from swift.errors import SettingError, renamed_settings
from swift.experts.config import ExpertConfig
from swift.experts.routers import TopK
from swift.mesh.live import storage_mesh
from swift.models.config import ModelConfig
from swift.train.build import make_step_spec, on_storage_mesh
from swift.train.model_directory import load_float32
from swift.train.saved_state import load_state

_OPTION = "--init-from"


@dataclass(frozen=True)
class ModelPlan:
    """The iteration of the model that a run begins with; its files are only verified when they are read."""

    step: int
    passed_over: tuple[str, ...] = ()


_WeightPlan: TypeAlias = RestorePlan | ModelPlan
"""The source of a run's first weights: a checkpoint or a model directory."""


@dataclass(frozen=True)
class WeightSource:
    """A run whose weights a new run begins with.

    Attributes:
        run_dir: directory of the source run; nothing is written to it.
        experiment: settings of the source run, needed to read its checkpoints.
    """

    run_dir: Path
    experiment: Experiment

    def plan(self, experiment: Experiment) -> _WeightPlan:
        """Finds and verifies the newest intact checkpoint.

        Args:
            experiment: settings of the new run.

        Raises:
            SettingError: there is no intact checkpoint, or it belongs to another model.
        """
        self.check(experiment)
        with renamed_settings({"checkpoint": _OPTION}):
            return plan_restore(self.run_dir / "checkpoints", self.experiment.identity())

    def check(self, experiment: Experiment) -> None:
        """Raises SettingError if the new run's model differs from the source's model."""
        for name, (theirs, ours) in _shapes(self.experiment, experiment).items():
            if theirs != ours:
                allowed = f"is of another model: its {name} is {theirs}, and here it is {ours}"
                raise SettingError(_OPTION, str(self.run_dir), allowed)

    def parameters(self, plan: _WeightPlan) -> dict[str, Any]:
        """Loads the weights to the host: ``[layer, class, size]`` by group, for ``StepSpec.state_from_params``."""
        assert isinstance(plan, RestorePlan)
        theirs = make_step_spec(on_storage_mesh(self.experiment), storage_mesh(self.experiment.topology))
        with renamed_settings({"checkpoint": _OPTION}):
            state = load_state(self.run_dir / "checkpoints", plan, theirs)
        return theirs.checkpoint_spec.gather_master_weights(state)

    def facts(self, plan: _WeightPlan) -> dict[str, Any]:
        """Returns the weights' origin, as fields for the new run's record."""
        assert isinstance(plan, RestorePlan)
        oldest = min((copy.step for copy in plan.sources.values()), default=plan.step)
        return {
            "run": str(self.run_dir),
            "of_step": plan.step,
            "oldest_expert": oldest,
            "passed_over": list(plan.passed_over),
        }


@dataclass(frozen=True)
class ModelSource(WeightSource):
    """A model directory whose weights a new run begins with; ``run_dir`` is this directory."""

    def plan(self, experiment: Experiment) -> ModelPlan:
        """Checks that the model fits the new run, and reads its iteration.

        Args:
            experiment: settings of the new run.

        Raises:
            SettingError: the model's metadata is damaged, or the model has another shape or router.
        """
        self.check(experiment)
        theirs, ours = (_gates(e.experts) for e in (self.experiment, experiment))
        if theirs != ours:
            allowed = f"is of another model: its router has {theirs}, and here it has {ours}"
            raise SettingError(_OPTION, str(self.run_dir), allowed)
        return ModelPlan(int(load_metadata(self.run_dir, _OPTION).get("step", 0)))

    def parameters(self, plan: _WeightPlan) -> dict[str, Any]:
        """Loads the weights to the host: ``[layer, class, size]`` by group, in the dtype of master weights."""
        del plan
        with renamed_settings({"MODEL": _OPTION}):
            gpt, weights = load_float32(self.experiment, self.run_dir)
        return jax.tree.map(np.asarray, gpt.pack(weights))

    def facts(self, plan: _WeightPlan) -> dict[str, Any]:
        """Returns the weights' origin, as fields for the new run's record."""
        return {"run": str(self.run_dir), "of_step": plan.step, "oldest_expert": plan.step, "passed_over": []}


def _shapes(theirs: Experiment, ours: Experiment) -> Mapping[str, tuple[Any, Any]]:
    """Returns the settings that determine the weights' shapes and dtypes, as (source's value, new run's value)."""
    return {
        "ModelConfig": (_weights_shape(theirs.model), _weights_shape(ours.model)),
        "vocabulary": (theirs.vocab_size, ours.vocab_size),
        "ExpertConfig.num_classes": (theirs.experts.num_classes, ours.experts.num_classes),
        "ExpertConfig.router": (_router_shape(theirs.experts), _router_shape(ours.experts)),
        "double precision": (theirs.compute_dtype == "float64", ours.compute_dtype == "float64"),
    }


def _weights_shape(model: ModelConfig) -> ModelConfig:
    """Returns a copy of the settings in which those that do not affect the weights' shapes have fixed values.

    With rotary positions, no weight depends on the sequence length. The vocabulary is compared separately.
    """
    length = 1 if model.positions == "rope" else model.sequence_length
    return replace(model.explicit, sequence_length=length, vocab_size=None)


def _router_shape(experts: ExpertConfig) -> str:
    """Formats the sizes of the router's weights and state."""
    num_classes = experts.num_classes
    state = {name: value.shape for name, value in experts.router.init_state(num_classes).items()}
    return f"{experts.router.num_logits(num_classes)} outputs and {state or 'no state'}"


def _gates(experts: ExpertConfig) -> str:
    """Formats the router settings that change how its weights are used, but not their shapes."""
    router = experts.router
    if isinstance(router, TopK):  # two settings may mean the same
        router = replace(router, normalize_gates=router.normalizes(experts.top_k), bias_update_rate=None)
    settings = {"top_k": experts.top_k, "router": router}
    return ", ".join(f"{name} = {value!r}" for name, value in settings.items())
