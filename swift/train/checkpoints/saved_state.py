"""A run's state in a checkpoint: how it is divided, what shape it has, and how it is read on other ranks or stages."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from swift.checkpoint import Ledger, Manifest, RestorePlan, StateSplit, load_plan
from swift.experts import Decoupled
from swift.mesh import move_rows, source_rows
from swift.pipeline import StateShape, StepSpec, TrainState, reshape_state, reshaped
from swift.train.settings import Experiment

_SHAPE = "state_shape"


def split_of(spec: StepSpec) -> StateSplit:
    """How a run's state falls into a dense part and experts, in the layout of a checkpoint: a row for every stage."""
    abstract = spec.at(spec.stages_mesh()).abstract()
    has_classes = isinstance(spec.layouts.get("expert"), Decoupled)
    return StateSplit(abstract, replace(spec.specs, slots={}), has_classes)


def extra_of(spec: StepSpec, position: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept beside a state: the loader's position, and the state's shape."""
    return {"loader": dict(position), _SHAPE: StateShape.of(spec).to_json()}


def load_state(directory: Path, plan: RestorePlan, spec: StepSpec) -> TrainState:
    """Reads what a plan says, whatever ranks, slots and stages the run had that saved it.

    Args:
        directory: of all checkpoints of the run.
        plan: for this directory.
        spec: that goes on; its state has one row for every stage in a checkpoint.

    Returns:
        The program's state on the host, without slots.

    Raises:
        SettingError: the arrays are of another model, or have changed since the plan was made.
    """
    saved = reshaped(spec, _shape_of(plan.manifest, spec))
    return reshape_state(load_plan(directory, plan, split_of(saved)), saved, spec)


def put_state(spec: StepSpec, state: TrainState) -> TrainState:
    """A state that is on the host, one row for every stage, on the devices of all live workers; with slots."""
    saved, specs = spec.at(spec.stages_mesh()).live, replace(spec.specs, slots={})
    sources = source_rows(saved, spec.live)
    return spec.fill_slots(move_rows(saved.put(state, specs), saved, spec.live, specs, sources))


def first_ledger(experiment: Experiment, split: StateSplit) -> Ledger:
    """What a run that has saved nothing knows of its checkpoints."""
    return Ledger.first(
        split.num_layers, split.num_classes, experiment.checkpoint.first_k(experiment.experts.num_classes)
    )


def ledger_after(experiment: Experiment, plan: RestorePlan) -> Ledger:
    """What a run knows of its checkpoints that goes on from one of them."""
    config = experiment.checkpoint
    return plan.ledger(config.first_k(experiment.experts.num_classes), config.plt_budget)


def ledger_for(spec: StepSpec, manifest: Manifest, ledger: Ledger) -> Ledger:
    """A ledger of a checkpoint, for the checkpoints of a run that may be of another shape, see ``Ledger.anew``."""
    is_same = _shape_of(manifest, spec) == StateShape.of(spec)
    return ledger if is_same else ledger.anew(ledger.k)


def _shape_of(manifest: Manifest, spec: StepSpec) -> StateShape:
    return StateShape(**manifest.extra[_SHAPE]) if _SHAPE in manifest.extra else StateShape.of(spec)
