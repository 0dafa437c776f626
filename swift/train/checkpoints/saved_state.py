"""The state of a run in a checkpoint: its division, its shape, and reading it on other ranks or stages."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from swift.checkpoint.partial.expert_units import StateSplit
from swift.checkpoint.storage.directory import committed_steps
from swift.checkpoint.storage.manifest import Ledger, Manifest
from swift.checkpoint.storage.reader import RestorePlan, load_plan, load_share, plan_restore
from swift.errors import RunError, SettingError
from swift.experts.placement.soundness import unsound_placement
from swift.experts.state_layouts import Decoupled
from swift.mesh.live import LiveMesh
from swift.pipeline.reconfigure.block_transfer import put_moved
from swift.pipeline.reconfigure.reshard import StateShape, reshape_state, reshaped
from swift.pipeline.reconfigure.state_move import move_state
from swift.pipeline.runtime.step_spec import StepSpec
from swift.pipeline.train_state import TrainState
from swift.train.settings.experiment import Experiment

_SHAPE = "state_shape"


def split_of(spec: StepSpec) -> StateSplit:
    """Divides a run's state into a dense part and experts, in the layout of a checkpoint: a row for every stage."""
    abstract = spec.stored.abstract()
    has_classes = isinstance(spec.layouts.get("expert"), Decoupled)
    return StateSplit(abstract, replace(spec.specs, slots={}), has_classes, spec.cut.counts(is_moe=True))


def extra_of(spec: StepSpec, position: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the position of the loader and the shape of the state, which a checkpoint keeps beside the state."""
    return {"loader": dict(position), _SHAPE: StateShape.of(spec).to_json()}


def load_state(directory: Path, plan: RestorePlan, spec: StepSpec) -> TrainState:
    """Loads a state, whatever ranks, slots and stages the run had that saved it.

    Args:
        directory: directory of all checkpoints of the run.
        plan: checkpoints to read.
        spec: spec of the step that continues; its state has one row for every stage in a checkpoint.

    Returns:
        The state on the host, without slots. One of several hosts reads only what its devices hold, if the run that
        saved it had the same shape; the rest is zeros.

    Raises:
        SettingError: the arrays are of another model, or have changed since the plan was made.
    """
    stored, shape, share = spec.stored, _shape_of(plan.manifest, spec), spec.live.share
    is_own = spec.chunks.are_stages and shape == StateShape.of(spec)
    if is_own and share != dict.fromkeys(range(spec.num_stages), slice(spec.live.num_ranks)):
        return load_share(directory, plan, split_of(spec), share)
    saved = reshaped(stored, shape)
    return reshape_state(load_plan(directory, plan, split_of(saved)), saved, stored)


def load_newest(directory: Path, identity: Mapping[str, Any], spec: StepSpec) -> tuple[TrainState, RestorePlan] | None:
    """Loads the newest intact checkpoint, see ``load_state``; returns None if nothing was saved.

    Args:
        directory: directory of all checkpoints of the run.
        identity: settings that the run has to share with the checkpoint.
        spec: spec of the step that continues.

    Raises:
        RunError: none is intact.
    """
    if not committed_steps(directory):
        return None
    try:
        plan = plan_restore(directory, identity)
        return load_state(directory, plan, spec), plan
    except SettingError as error:
        raise RunError(str(error)) from error


def to_store(spec: StepSpec, state: TrainState) -> tuple[TrainState, LiveMesh]:
    """A state without its slots on a mesh whose stages hold what those of a checkpoint do."""
    state = replace(state, slots={})
    return (state, spec.live) if spec.chunks.are_stages else (move_state(state, spec, spec.stored)[0], spec.stored.live)


def put_state(spec: StepSpec, state: TrainState) -> TrainState:
    """Puts a state on the host, one row for every stage, on the devices of all live workers, with slots."""
    if spec.chunks.are_stages:
        return spec.fill_slots(spec.live.put_stages(state, replace(spec.specs, slots={})))
    return spec.fill_slots(put_moved(state, spec.stored, spec))


def first_ledger(experiment: Experiment, split: StateSplit) -> Ledger:
    """Returns the ledger of a run that has saved nothing."""
    return Ledger.first(
        split.num_layers, split.num_classes, experiment.checkpoint.first_k(experiment.experts.num_classes)
    )


def ledger_after(experiment: Experiment, plan: RestorePlan) -> Ledger:
    """Returns the ledger of a run that continues from a checkpoint."""
    config = experiment.checkpoint
    return plan.ledger(config.first_k(experiment.experts.num_classes), config.plt_budget)


def ledger_for(spec: StepSpec, manifest: Manifest, ledger: Ledger) -> Ledger:
    """Adapts the ledger of a checkpoint to a run that may be of another shape, see ``Ledger.emptied``."""
    is_same = _shape_of(manifest, spec) == StateShape.of(spec)
    return ledger if is_same else ledger.emptied(ledger.k)


def _shape_of(manifest: Manifest, spec: StepSpec) -> StateShape:
    return StateShape(**manifest.extra[_SHAPE]) if _SHAPE in manifest.extra else StateShape.of(spec)


def check_savable(state: TrainState, step: int, num_classes: int) -> None:
    """Raises RunError if a state must not replace a sound checkpoint."""
    found = sorted(set(state.step.tolist()))
    if found != [step]:
        raise RunError(f"the parts are of the state after iteration {found}, not {step}")
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.master)):
        raise RunError(f"the weights are not finite after iteration {step}")
    flaw = unsound_placement(state.placement.reshape(-1, *state.placement.shape[2:]), num_classes)
    if flaw is not None:
        raise RunError(f"{flaw} after iteration {step}: correct the policy of Experiment.placement")
