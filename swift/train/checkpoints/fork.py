"""A new run that begins with the weights of another; everything else starts from scratch, also the moments."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from swift.checkpoint import RestorePlan, plan_restore
from swift.errors import SettingError, renamed_settings
from swift.mesh import storage_mesh
from swift.train.checkpoints.saved_state import load_state
from swift.train.settings import Experiment

_OPTION = "--init-from"


@dataclass(frozen=True)
class WeightSource:
    """A run whose weights another run begins with.

    Attributes:
        run_dir: directory of that run; nothing is written to it.
        experiment: settings of that run, with which its checkpoints are read.
    """

    run_dir: Path
    experiment: Experiment

    def plan(self, experiment: Experiment) -> RestorePlan:
        """Finds the newest intact checkpoint, and verifies it.

        Args:
            experiment: settings of the run that begins.

        Raises:
            SettingError: there is none, or it is of another model.
        """
        for name, (theirs, ours) in _shapes(self.experiment, experiment).items():
            if theirs != ours:
                allowed = f"is of another model: its {name} is {theirs}, and here it is {ours}"
                raise SettingError(_OPTION, str(self.run_dir), allowed)
        with renamed_settings({"checkpoint": _OPTION}):
            return plan_restore(self.run_dir / "checkpoints", self.experiment.identity())

    def parameters(self, plan: RestorePlan) -> dict[str, Any]:
        """Loads the weights of a plan, to the host: ``[row, class, size]`` by group, see ``StepSpec.adopt``."""
        theirs = self.experiment.step_spec(storage_mesh(self.experiment.topology))
        with renamed_settings({"checkpoint": _OPTION}):
            state = load_state(self.run_dir / "checkpoints", plan, theirs)
        return jax.tree.map(np.asarray, theirs.whole_classes(state))

    def facts(self, plan: RestorePlan) -> dict[str, Any]:
        """Names the origin of the weights, for the record of the run that begins."""
        oldest = min((copy.step for copy in plan.sources.values()), default=plan.step)
        return {
            "run": str(self.run_dir),
            "of_step": plan.step,
            "oldest_expert": oldest,
            "passed_over": list(plan.passed_over),
        }


def _shapes(theirs: Experiment, ours: Experiment) -> Mapping[str, tuple[Any, Any]]:
    """Settings on which the shapes and types of the weights depend, of both runs."""
    return {
        "ModelConfig": (theirs.model, ours.model),
        "vocabulary": (theirs.vocab_size, ours.vocab_size),
        "ExpertConfig.num_classes": (theirs.experts.num_classes, ours.experts.num_classes),
        "double precision": (theirs.compute_dtype == "float64", ours.compute_dtype == "float64"),
    }
