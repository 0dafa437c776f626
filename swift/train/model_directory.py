"""Model directories: a model's parameters as plain arrays for one device, without optimizer or loader state."""

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from swift.checkpoint.arrays import load_arrays, load_metadata, save_arrays, stored_types
from swift.checkpoint.manifest import MANIFEST
from swift.config.experiment import Experiment
from swift.errors import RunError, SettingError, first_line
from swift.files import new_directory
from swift.models.gpt import GPT, Weights
from swift.train.interrupt import Interrupt


@contextmanager
def new_model(out: Path) -> Iterator[tuple[Path, Interrupt]]:
    """Creates a model directory atomically: after an error or a signal, nothing is left behind.

    Args:
        out: directory to create.

    Yields:
        (temporary directory to write to, which is renamed to ``out`` at the end; signal handler to check between
        arrays).

    Raises:
        RunError: the model cannot be written.
        KeyboardInterrupt: a signal arrived.
    """
    try:
        with Interrupt(answer=_say_stopping).hold() as interrupt, new_directory(out.absolute()) as directory:
            yield directory, interrupt
            interrupt.check()
    except SettingError:
        raise
    except (OSError, ValueError) as error:  # Orbax raises ValueError with a long text around the system's error
        reason = getattr(error, "strerror", None) or first_line(error)
        raise RunError(f"{out}: the model cannot be written: {reason}") from error


def _say_stopping() -> None:
    print("swift: stopping; what is written will be removed; a second Ctrl-C ends at once", file=sys.stderr)


def write_model(directory: Path, gpt: GPT, arrays: dict[str, Any], step: int) -> None:
    """Writes weights, one array for each parameter.

    Args:
        directory: directory from ``new_model``.
        gpt: architecture.
        arrays: parameters by group, layer and name.
        step: iteration after which the weights were taken.

    Raises:
        OSError, ValueError: the weights cannot be written.
    """
    save_arrays(directory, arrays, {"step": step, "model": _shape(gpt)})


def load_exported(experiment: Experiment, path: Path) -> tuple[GPT, Weights]:
    """Reads a model directory.

    Args:
        experiment: settings of the model; only its architecture, vocabulary and number of expert classes are used.
        path: directory that ``write_model`` wrote.

    Returns:
        (architecture, weights on the host in their stored dtypes).

    Raises:
        SettingError: the path is not a model directory, or the model has another shape or is damaged.
    """
    gpt = GPT(experiment.model, experiment.vocab_size, experiment.experts.num_classes, router=experiment.experts.router)
    theirs = load_metadata(path, "MODEL").get("model")
    if theirs != _shape(gpt):
        raise SettingError(
            "MODEL", str(path), f"is a model of shape {theirs}, and its configuration says {_shape(gpt)}"
        )
    weights = gpt.weight_shapes
    types = stored_types(path, "MODEL")

    def stored(place: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        name = jax.tree_util.keystr(place, simple=True, separator=".")
        return jax.ShapeDtypeStruct(leaf.shape, types.get(name, leaf.dtype))

    abstract = jax.tree_util.tree_map_with_path(stored, pure(weights))
    arrays = load_arrays(path, abstract, "MODEL")
    return gpt, jax.tree.unflatten(jax.tree.structure(weights), jax.tree.leaves(arrays))


def load_float32(experiment: Experiment, path: Path) -> tuple[GPT, Weights]:
    """Reads a model directory, see ``load_exported``, and converts the weights with ``widened``."""
    gpt, weights = load_exported(experiment, path)
    return gpt, widened(experiment, weights)


def widened(experiment: Experiment, weights: Weights) -> Weights:
    """Converts host weights to the dtype of master weights, which is at least float32; wider weights are rounded."""
    wide = jnp.promote_types(experiment.compute_dtype, jnp.float32)
    return jax.tree.map(lambda leaf: np.asarray(leaf).astype(wide, copy=False), weights)


def is_model(path: Path) -> bool:
    """Whether a directory holds a model rather than a run."""
    return (path / MANIFEST).is_file()


def check_new(path: Path) -> None:
    """Raises SettingError if the directory for ``--out`` already exists or cannot be created."""
    try:
        path.mkdir()
        path.rmdir()
    except OSError as error:
        raise SettingError("--out", str(path), f"cannot be made a directory: {error.strerror}") from error


def pure(weights: Weights) -> dict[str, Any]:
    """Converts weights to nested dicts by group, layer and the components of the parameter names."""
    return {
        name: {layer: nnx.to_pure_dict(state) for layer, state in enumerate(states)} for name, states in weights.items()
    }


def _shape(gpt: GPT) -> dict[str, Any]:
    return {"config": repr(gpt.config), "vocab_size": gpt.vocab_size, "num_classes": gpt.num_classes}


def weights_digest(weights: Any) -> str:
    """Computes the SHA-256 digest of host weights and their names, to check that all hosts have the same weights."""
    digest = hashlib.sha256()
    for place, leaf in jax.tree_util.tree_leaves_with_path(weights):
        digest.update(f"{jax.tree_util.keystr(place)} {leaf.dtype} {leaf.shape}\n".encode())
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()
