"""Full checkpoints of a run: the whole training state, and where the data stood."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swift.checkpoint.arrays import is_complete, load_arrays, load_metadata, remove_arrays, save_arrays
from swift.errors import SettingError

_PREFIX = "step-"
_SETTING = "checkpoint"


def checkpoint_steps(directory: Path) -> list[int]:
    """The iterations of the complete checkpoints in a directory, oldest first."""
    found = directory.glob(f"{_PREFIX}*") if directory.is_dir() else []
    numbers = [path.name.removeprefix(_PREFIX) for path in found if is_complete(path)]
    return sorted(int(number) for number in numbers if number.isdigit())


def checkpoint_path(directory: Path, step: int) -> Path:
    """Where the checkpoint of an iteration lies."""
    return directory / f"{_PREFIX}{step:08d}"


def save_checkpoint(
    directory: Path, step: int, state: Any, *, identity: Mapping[str, Any], extra: Mapping[str, Any], num_kept: int
) -> Path:
    """Saves a state, then removes the oldest checkpoints.

    Args:
        directory: of all checkpoints of a run.
        step: iterations done.
        state: a pytree of arrays.
        identity: what a run has to share to read it, by the name of the setting; JSON.
        extra: kept beside it, such as the loader's state; JSON.
        num_kept: how many checkpoints stay.

    Returns:
        The checkpoint's path.
    """
    path = checkpoint_path(directory, step)
    save_arrays(path, state, {"step": step, "identity": dict(identity), "extra": dict(extra)})
    for old in checkpoint_steps(directory)[:-num_kept]:
        remove_arrays(checkpoint_path(directory, old))
    return path


def load_checkpoint(path: Path, abstract: Any, identity: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Reads a checkpoint and checks all of it.

    Args:
        path: the checkpoint.
        abstract: the state's tree of ``jax.ShapeDtypeStruct`` with shardings.
        identity: this run's; see ``save_checkpoint``.

    Returns:
        (the state, what was kept beside it).

    Raises:
        SettingError: it is no checkpoint, one of another model, or damaged; the line says what.
    """
    metadata = load_metadata(path, _SETTING)
    for name, mine in identity.items():
        theirs = metadata["identity"].get(name)
        if theirs != mine:
            raise SettingError(_SETTING, str(path), f"is of another model: its {name} is {theirs!r}, here {mine!r}")
    return load_arrays(path, abstract, _SETTING), metadata["extra"]
