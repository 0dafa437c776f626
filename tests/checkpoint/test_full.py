"""Full checkpoints: the newest stay, one of another model is refused, one that was cut short does not count."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from swift.checkpoint import checkpoint_path, checkpoint_steps, load_checkpoint, save_checkpoint
from swift.errors import SettingError

IDENTITY = {"ModelConfig": "small", "Topology": [1, 1, 8]}


def state(step: int) -> dict:
    return {"weights": jnp.full((4, 4), step, jnp.float32)}


def save(directory: Path, step: int) -> Path:
    return save_checkpoint(directory, step, state(step), identity=IDENTITY, extra={"next": step}, num_kept=2)


def load(path: Path, **identity):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), state(0))
    return load_checkpoint(path, abstract, IDENTITY | identity)


def test_the_newest_checkpoints_stay_and_hold_what_was_kept_beside_them(tmp_path):
    for step in (1, 9, 10, 100):
        assert save(tmp_path, step) == checkpoint_path(tmp_path, step)
    assert checkpoint_steps(tmp_path) == [10, 100]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000100"]
    weights, extra = load(checkpoint_path(tmp_path, 10))
    assert extra == {"next": 10}
    assert float(weights["weights"][0, 0]) == 10


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    path = save(tmp_path, 1)
    with pytest.raises(SettingError, match="is of another model: its ModelConfig is 'small', here 'large'"):
        load(path, ModelConfig="large")


def test_no_directory_has_no_checkpoints(tmp_path):
    assert checkpoint_steps(tmp_path / "nowhere") == []


def test_a_save_that_is_cut_short_is_not_listed_and_is_saved_over(tmp_path, monkeypatch):
    def cut(*_):
        raise InterruptedError

    save(tmp_path, 1)
    for step in (2, 3):
        with monkeypatch.context() as patch:
            patch.setattr("swift.checkpoint.arrays.replace_file", cut)  # which writes the manifest
            with pytest.raises(InterruptedError):
                save(tmp_path, step)
    # As when Orbax itself is cut short: it writes under this name, and renames.
    checkpoint_path(tmp_path, 3).rename(tmp_path / "step-00000003.orbax-checkpoint-tmp")
    assert len(list(tmp_path.iterdir())) == 3
    assert checkpoint_steps(tmp_path) == [1]

    save(tmp_path, 2)
    save(tmp_path, 3)
    assert checkpoint_steps(tmp_path) == [2, 3]
    assert float(load(checkpoint_path(tmp_path, 3))[0]["weights"][0, 0]) == 3
