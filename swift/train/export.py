"""Export of a trained model as plain arrays for one device."""

from dataclasses import replace
from pathlib import Path

from swift.checkpoint.storage.directory import committed_steps
from swift.checkpoint.storage.reader import RestorePlan, plan_restore
from swift.errors import SettingError
from swift.mesh.live import storage_mesh
from swift.models.gpt import GPT, Weights
from swift.train.checkpoints.model_directory import check_new, new_model, pure, write_model
from swift.train.checkpoints.saved_state import load_state
from swift.train.settings.experiment import Experiment
from swift.train.settings.for_storage import for_storage
from swift.train.settings.stored_config import copy_config


def export_model(experiment: Experiment, run_dir: Path, out: Path, step: int | None = None) -> RestorePlan:
    """Writes the master weights of a run's checkpoint as one plain array per parameter, such as ``head.0.out.kernel``.

    The run's configuration is copied beside them.

    Args:
        experiment: settings of the run.
        run_dir: run directory.
        out: directory to make.
        step: iteration of the checkpoint; the newest intact one unless given.

    Returns:
        The origin of the weights; in a partial checkpoint some experts are older than the iteration.

    Raises:
        SettingError: there is no such checkpoint, it is damaged, or ``out`` exists.
        RunError: the model cannot be written; nothing is left of it.
    """
    check_new(out)
    plan = find_checkpoint(experiment, run_dir, step)
    gpt, weights = load_weights(experiment, run_dir, plan)
    with new_model(out) as (made, _):
        write_model(made, gpt, pure(weights), plan.step)
        copy_config(run_dir, made)
    return plan


def find_checkpoint(experiment: Experiment, run_dir: Path, step: int | None) -> RestorePlan:
    """Finds and verifies the checkpoint of a run that is exported.

    Args:
        experiment: settings of the run.
        run_dir: run directory.
        step: its iteration; the newest intact one unless given.

    Raises:
        SettingError: there is no such checkpoint, or it is damaged.
    """
    steps = committed_steps(run_dir / "checkpoints")
    if not steps:
        raise SettingError("RUN_DIR", str(run_dir), "holds no checkpoint to export")
    if step is not None and step not in steps:
        raise SettingError("--step", step, f"must be one of {', '.join(map(str, steps))}, which have a checkpoint")
    return plan_restore(run_dir / "checkpoints", experiment.identity(), step)


def load_weights(experiment: Experiment, run_dir: Path, plan: RestorePlan) -> tuple[GPT, Weights]:
    """Reads the master weights of a checkpoint, as (architecture, weights of whole experts, on the host)."""
    spec = for_storage(experiment).step_spec(storage_mesh(experiment.topology))
    state = load_state(run_dir / "checkpoints", plan, spec)
    return replace(spec.gpt, head_ranks=1, embedding_ranks=1), spec.gpt.unpack(spec.stored.whole_classes(state))
