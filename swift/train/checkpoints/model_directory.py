"""Model directories: the parameters of a model as plain arrays for one device, without a run's other state."""

import shutil
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import SingleDeviceSharding

from swift.checkpoint import MANIFEST, load_arrays, load_metadata, save_arrays, stored_types
from swift.errors import RunError, SettingError, first_line
from swift.models import GPT, Weights
from swift.train.settings import Experiment


def write_model(out: Path, gpt: GPT, arrays: dict[str, Any], step: int) -> None:
    """Writes weights as one array per parameter.

    Args:
        out: directory to make.
        gpt: architecture.
        arrays: parameters by group, row and name.
        step: iteration that they are of.

    Raises:
        RunError: they cannot be written; nothing is left of them.
    """
    try:
        save_arrays(out, arrays, {"step": step, "model": _shape(gpt)})
    except (OSError, ValueError) as error:  # the system's own, or Orbax's, which wraps those in half a page
        shutil.rmtree(out, ignore_errors=True)
        raise RunError(f"{out}: the model cannot be written: {first_line(error)}") from error


def load_exported(experiment: Experiment, path: Path) -> tuple[GPT, Weights]:
    """Reads a model directory.

    Args:
        experiment: settings of the model; only its shape and the vocabulary matter.
        path: directory that ``write_model`` has made.

    Returns:
        (architecture, weights in the types that they are stored in).

    Raises:
        SettingError: it is not a model directory, one of another shape, or damaged.
    """
    gpt = GPT(experiment.model, experiment.vocab_size, experiment.experts.num_classes)
    theirs = load_metadata(path, "MODEL").get("model")
    if theirs != _shape(gpt):
        raise SettingError(
            "MODEL", str(path), f"is a model of shape {theirs}, and its configuration says {_shape(gpt)}"
        )
    weights = jax.eval_shape(lambda: gpt.unpack(gpt.init(jax.random.key(0))))
    types = stored_types(path, "MODEL")
    # With a device given, since Orbax would warn that it looks up where the arrays were.
    device = SingleDeviceSharding(jax.devices()[0])

    def stored(place: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        name = jax.tree_util.keystr(place, simple=True, separator=".")
        return jax.ShapeDtypeStruct(leaf.shape, types.get(name, leaf.dtype), sharding=device)

    abstract = jax.tree_util.tree_map_with_path(stored, pure(weights))
    arrays = load_arrays(path, abstract, "MODEL")
    return gpt, jax.tree.unflatten(jax.tree.structure(weights), jax.tree.leaves(arrays))


def is_model(path: Path) -> bool:
    """Whether a directory is a model's, not a run's."""
    return (path / MANIFEST).is_file()


def check_new(path: Path) -> None:
    """Raises SettingError if ``--out`` is there already, or cannot be made."""
    try:
        path.mkdir()
        path.rmdir()
    except OSError as error:
        raise SettingError("--out", str(path), f"cannot be made a directory: {error.strerror}") from error


def pure(weights: Weights) -> dict[str, Any]:
    """The parameters as a tree by group, row and the parts of their names."""
    return {
        name: {row: nnx.to_pure_dict(state) for row, state in enumerate(states)} for name, states in weights.items()
    }


def _shape(gpt: GPT) -> dict[str, Any]:
    return {"config": repr(gpt.config), "vocab_size": gpt.vocab_size, "num_classes": gpt.num_classes}
