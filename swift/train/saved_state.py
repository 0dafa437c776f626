"""Converts training states to and from checkpoints, for any ranks and stages, with fallback directories for full disks.

A checkpoint that cannot be written to its run directory is written to a fallback directory, until ``--resume`` moves it
back. The fallback directory's name is derived from the run, since its path cannot be recorded on a full or read-only
disk. A file in the fallback directory names the run directory, to tell a run that was moved to another disk from a copy
of a run, which is a separate run.
"""

import json
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from swift.checkpoint.manifest import (
    MANIFEST,
    Ledger,
    Manifest,
    begin_save,
    checkpoint_path,
    checkpoint_steps,
    commit_save,
    committed_steps,
    digest,
    read_manifest,
    synced_digests,
)
from swift.checkpoint.reader import RestorePlan, load_plan, load_share, plan_restore
from swift.checkpoint.units import StateSplit
from swift.config.experiment import Experiment
from swift.errors import RunError, SettingError
from swift.experts.placement.replicas import placement_error
from swift.experts.state_layouts import Decoupled
from swift.mesh.live import LiveMesh
from swift.pipeline.reconfigure.reshard import StateShape, reshape_state, reshaped
from swift.pipeline.reconfigure.transfer import move_state, transfer_to_devices
from swift.pipeline.state import TrainState
from swift.pipeline.step.spec import StepSpec
from swift.runlog.files import EVENTS

_SHAPE = "state_shape"
"""Name of the state's shape in a manifest's ``extra``."""
_MEMORY = Path("/dev/shm")
_PREFIX, _ORIGIN = "kept-by-swift", "origin"
"""Prefix of fallback directories, and the file in them that names the run directory."""


def split_of(spec: StepSpec) -> StateSplit:
    """Divides a run's state into a dense part and experts, in checkpoint layout, which has one row for each stage."""
    abstract = spec.checkpoint_spec.abstract()
    has_classes = isinstance(spec.layouts.get("expert"), Decoupled)
    return StateSplit(abstract, replace(spec.specs, slots={}), has_classes, spec.cut.counts(is_moe=True))


def extra_of(spec: StepSpec, position: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a manifest's ``extra``: the loader's position and the state's shape."""
    return {"loader": dict(position), _SHAPE: StateShape.of(spec).to_json()}


def load_state(directory: Path, plan: RestorePlan, spec: StepSpec) -> TrainState:
    """Loads a state and converts it from the ranks, slots and stages that it was saved with.

    Args:
        directory: directory of all checkpoints of the run.
        plan: checkpoints to read.
        spec: spec of the step that continues from the state; its checkpoint layout has one row for each stage.

    Returns:
        The state on the host, without slots. On several hosts, if the state was saved in the same shape, each host
        reads only what its devices hold, and the rest is zeros.

    Raises:
        SettingError: the arrays belong to another model, or have changed since the plan was made.
    """
    stored, shape, share = spec.checkpoint_spec, _shape_of(plan.manifest, spec), spec.live.share
    is_own = spec.chunks.matches_stages and shape == StateShape.of(spec)
    if is_own and share != dict.fromkeys(range(spec.num_stages), slice(spec.live.num_ranks)):
        return load_share(directory, plan, split_of(spec), share)
    saved = reshaped(stored, shape)
    return reshape_state(load_plan(directory, plan, split_of(saved)), saved, stored)


def load_newest(directory: Path, identity: Mapping[str, Any], spec: StepSpec) -> tuple[TrainState, RestorePlan] | None:
    """Loads the newest intact checkpoint, see ``load_state``; returns None if nothing was saved.

    Args:
        directory: directory of all checkpoints of the run.
        identity: settings that the run must share with the checkpoint.
        spec: spec of the step that continues from the state.

    Raises:
        RunError: no checkpoint is intact.
    """
    if not committed_steps(directory):
        return None
    try:
        plan = plan_restore(directory, identity)
        return load_state(directory, plan, spec), plan
    except SettingError as error:
        raise RunError(str(error)) from error


def to_store(spec: StepSpec, state: TrainState) -> tuple[TrainState, LiveMesh]:
    """Converts a state to checkpoint layout: one row for each stage of the checkpoint's cut, and no slots.

    Blocks are moved only if the workers hold other blocks than these stages.

    Returns:
        (state in checkpoint layout, mesh that it is on).
    """
    state = replace(state, slots={})
    return (
        (state, spec.live)
        if spec.chunks.matches_stages
        else (move_state(state, spec, spec.checkpoint_spec)[0], spec.checkpoint_spec.live)
    )


def put_state(spec: StepSpec, state: TrainState) -> TrainState:
    """Transfers a host state in checkpoint layout to the devices of all live workers, and fills their slots."""
    if spec.chunks.matches_stages:
        return spec.fill_slots(spec.live.put_stages(state, replace(spec.specs, slots={})))
    return spec.fill_slots(transfer_to_devices(state, spec.checkpoint_spec, spec))


def first_ledger(experiment: Experiment, split: StateSplit) -> Ledger:
    """Returns the ledger of a run that has not saved a checkpoint yet."""
    return Ledger.first(
        split.num_layers, split.num_classes, experiment.checkpoint.first_k(experiment.experts.num_classes)
    )


def ledger_after(experiment: Experiment, plan: RestorePlan) -> Ledger:
    """Returns the ledger of a run that continues from a checkpoint."""
    config = experiment.checkpoint
    return plan.ledger(config.first_k(experiment.experts.num_classes), config.plt_budget)


def ledger_for(spec: StepSpec, manifest: Manifest, ledger: Ledger) -> Ledger:
    """Returns a checkpoint's ledger, emptied if the run's state has another shape, see ``Ledger.emptied``."""
    is_same = _shape_of(manifest, spec) == StateShape.of(spec)
    return ledger if is_same else ledger.emptied(ledger.k)


def _shape_of(manifest: Manifest, spec: StepSpec) -> StateShape:
    return StateShape(**manifest.extra[_SHAPE]) if _SHAPE in manifest.extra else StateShape.of(spec)


def check_savable(state: TrainState, step: int, num_classes: int) -> None:
    """Raises RunError if a state is not fit to be saved.

    A state is rejected if its parts are from different iterations or not from iteration ``step``, if its weights are
    not finite, or if its placement is invalid.
    """
    steps = sorted(set(state.step.tolist()))
    if steps != [step]:
        raise RunError(f"the parts are of the state after iteration {steps}, not {step}")
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.master)):
        raise RunError(f"the weights are not finite after iteration {step}")
    flaw = placement_error(state.placement.reshape(-1, *state.placement.shape[2:]), num_classes)
    if flaw is not None:
        raise RunError(f"{flaw} after iteration {step}: correct the policy of Experiment.placement")


def fallback_directories(checkpoints: Path) -> list[Path]:
    """Returns the directories for checkpoints that cannot be written to the run directory, in order of preference.

    Args:
        checkpoints: directory of the run's checkpoints.
    """
    path = digest(f"{checkpoints.resolve()}".encode())
    return [top / f"{_name(checkpoints)}-{path[:16]}" for top in _tops()]


def save_fallback(checkpoints: Path, step: int, write: Callable[[Path], object]) -> str:
    """Writes a checkpoint to the first of ``fallback_directories`` that accepts it.

    Args:
        checkpoints: directory of the run's checkpoints.
        step: iterations done.
        write: function that writes the checkpoint into a given directory of checkpoints.

    Returns:
        A phrase that names the directory, and says how to resume from it.

    Raises:
        RunError: no directory accepts it; the message gives the reason for each.
    """
    troubles = []
    for fallback in fallback_directories(checkpoints):
        try:
            fallback.mkdir(mode=0o700, exist_ok=True)
            if not _is_own(fallback):
                raise PermissionError("belongs to somebody else")
            (fallback / _ORIGIN).write_text(f"{checkpoints.resolve()}", encoding="utf-8")
            write(fallback)
        except Exception as error:  # after any error, the next directory may work
            troubles.append(f"{fallback}: {' '.join(str(error).split())}")
            if not checkpoint_steps(fallback) and _is_own(fallback):
                shutil.rmtree(fallback, ignore_errors=True)
            continue
        memory = ", which is memory and does not outlast a restart of the machine" if fallback.parent == _MEMORY else ""
        return (
            f"the state after iteration {step} is kept in {fallback} on {socket.gethostname()}{memory}; make room, "
            f"then resume there with --run-dir {checkpoints.parent} --resume, which takes it from that directory"
        )
    raise RunError("; ".join(troubles))


def import_fallback(checkpoints: Path) -> list[str]:
    """Moves a checkpoint from a fallback directory back to its run directory, if it is the run's newest.

    Fallback directories are removed afterwards, except those whose newest checkpoint is damaged.

    Args:
        checkpoints: directory of the run's checkpoints.

    Returns:
        A line for each checkpoint that was moved back, or skipped because it is damaged.

    Raises:
        RunError: the checkpoint still cannot be written to the run's directory.
    """
    lines = []
    for fallback in dict.fromkeys((*filter(_is_own, fallback_directories(checkpoints)), *_left_behind(checkpoints))):
        step = max(checkpoint_steps(fallback), default=0)
        if step > max(checkpoint_steps(checkpoints), default=0):
            try:
                _copy(fallback, checkpoints, step)
            except SettingError as error:  # it is damaged; the run may resume from an older one
                lines.append(f"passed over: {fallback / checkpoint_path(fallback, step).name} {error.allowed}")
                continue
            except OSError as error:
                where = (
                    f"the state after iteration {step}, which is kept in {fallback}, cannot be brought to {checkpoints}"
                )
                raise RunError(f"{where}: {error.strerror or error}: make room, then --resume again") from error
            lines.append(f"the checkpoint of iteration {step} was kept in {fallback} and is now in {checkpoints}")
        shutil.rmtree(fallback, ignore_errors=True)
    return lines


def _copy(fallback: Path, checkpoints: Path, step: int) -> None:
    """Copies a checkpoint, and verifies the copy before it is committed; raises SettingError if it is damaged."""
    source = checkpoint_path(fallback, step)
    manifest = read_manifest(source, "checkpoint")
    temporary = begin_save(checkpoints, step)
    try:
        shutil.copytree(source, temporary, dirs_exist_ok=True)
        digests, needed = synced_digests(temporary), manifest.files_needed()[step]
        wrong = [name for name, expected in needed.items() if digests.get(name) != expected]
        if wrong:
            raise SettingError("checkpoint", str(source), f"is damaged: its file {wrong[0]} is not as it was saved")
        assert MANIFEST in digests
        commit_save(checkpoints, step)
    except shutil.Error as error:  # a list of errors, one for each file
        raise OSError(str(error.args[0][0][2])) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _tops() -> list[Path]:
    return [top for top in (Path(tempfile.gettempdir()), _MEMORY) if top.is_dir()]


def _name(checkpoints: Path) -> str:
    """Returns the name prefix of a run's fallback directories, which does not depend on the run directory's path."""
    return f"{_PREFIX}-{os.getuid()}-{digest(_begun(checkpoints.parent / EVENTS).encode())[:16]}"


def _left_behind(checkpoints: Path) -> list[Path]:
    """Finds the run's fallback directories, including those made before the run directory was moved."""
    if not _begun(checkpoints.parent / EVENTS):
        return []
    fallbacks = [
        fallback for top in _tops() for fallback in sorted(top.glob(f"{_name(checkpoints)}-*")) if _is_own(fallback)
    ]
    return [fallback for fallback in fallbacks if _is_for(fallback, checkpoints.resolve())]


def _is_for(fallback: Path, checkpoints: Path) -> bool:
    """Whether a fallback directory was made for this run directory, or for one that was moved and no longer exists."""
    try:
        origin = Path((fallback / _ORIGIN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return origin.resolve() == checkpoints or not origin.parent.exists()


def _is_own(fallback: Path) -> bool:
    """Whether a directory exists and only this user can access it, so that nobody else can plant a checkpoint there."""
    try:
        status = fallback.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _begun(events: Path) -> str:
    """Returns the start time of a run, or an empty string if unknown.

    It keeps a new run in a reused directory from taking over the old run's checkpoints.
    """
    try:
        with events.open("rb") as file:
            return str(json.loads(file.readline()).get("time"))
    except (OSError, ValueError, AttributeError):
        return ""
