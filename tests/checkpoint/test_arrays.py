"""Arrays come back to the host as they were saved; whatever is wrong with their files is told in one line."""

import errno
import gc
import itertools
import json
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from swift.checkpoint import array_files
from swift.checkpoint import arrays as arrays_on_disk
from swift.checkpoint.arrays import load_arrays, load_metadata, save_arrays
from swift.checkpoint.manifest import digest
from swift.errors import RunError, SettingError


def sharding(*axes) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("a", "b")), PartitionSpec(*axes))


def arrays() -> dict:
    values = {
        "weights": (jnp.arange(64.0).reshape(8, 8) / 7, sharding("a", "b")),
        "half": (jnp.arange(8, dtype=jnp.bfloat16) / 3, sharding("b")),
        "step": (jnp.array(7, jnp.int32), sharding()),
    }
    return {"inner": {name: jax.device_put(*pair) for name, pair in values.items()}}


def abstract(tree):
    return jax.eval_shape(lambda: tree)


def files(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file() and file.stat().st_size]


def refusal(path: Path, tree=None) -> str:
    with pytest.raises(SettingError) as caught:
        load_arrays(path, abstract(tree or arrays()), "checkpoint")
    assert caught.value.setting == "checkpoint"
    assert caught.value.value == str(path)
    return caught.value.allowed


@pytest.fixture
def saved(tmp_path) -> Path:
    save_arrays(tmp_path / "arrays", arrays(), {"by": "a test", "steps": [1, 2]})
    return tmp_path / "arrays"


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")  # commands suppress it, too
@pytest.mark.parametrize("refused", [1, array_files.NUM_THREADS + 1, array_files.NUM_THREADS + 2])
def test_a_limit_on_tasks_that_is_reached_for_a_moment_fails_no_save_and_no_load(tmp_path, monkeypatch, refused):
    start, tried = threading.Thread.start, []

    def start_or_refuse(thread):
        tried.append(thread)
        if len(tried) in (refused, refused + 1):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_refuse)
    values = {"some": np.arange(6.0).reshape(2, 3)}
    array_files.write_arrays(tmp_path / "arrays", values)
    assert len(tried) > refused + 1
    tried.clear()
    read = array_files.read_arrays(tmp_path / "arrays", values)
    np.testing.assert_array_equal(read["some"], values["some"])
    gc.collect()  # what Orbax leaves of its first try warns here, and not in another test


@pytest.mark.parametrize("jump_s", [-400 * 86_400, 400 * 86_400])
def test_a_wall_clock_that_jumps_fails_no_save(tmp_path, monkeypatch, jump_s):
    """Each reading of the clock is more than a year away from the one before."""
    clock, jumps = time.time, itertools.count()
    monkeypatch.setattr(time, "time", lambda: clock() + next(jumps) * jump_s / 10)
    save_arrays(tmp_path / "arrays", arrays(), {})
    jax.tree.map(np.testing.assert_array_equal, load_arrays(tmp_path / "arrays", abstract(arrays()), "x"), arrays())


def test_a_save_that_takes_too_long_has_failed(tmp_path, monkeypatch):
    """A stand-in for a file system that stalls; the time grows with the bytes."""

    class Stalled:
        def result(self, timeout):
            assert timeout == 1200 + 80 / 10_000_000
            raise TimeoutError

    monkeypatch.setattr(array_files.ocp, "save_async", lambda *_, **__: Stalled())
    with pytest.raises(OSError, match="timed out") as caught:
        array_files.write_arrays(tmp_path / "arrays", {"ten": np.zeros(10)})
    assert caught.value.errno == errno.ETIMEDOUT


def test_sharded_arrays_come_back_bit_for_bit(saved):
    tree = arrays()
    loaded = load_arrays(saved, abstract(tree), "checkpoint")
    jax.tree.map(np.testing.assert_array_equal, loaded, tree)
    assert jax.tree.map(lambda leaf: leaf.dtype, loaded) == jax.tree.map(lambda leaf: leaf.dtype, tree)
    assert {type(leaf) for leaf in jax.tree.leaves(loaded)} == {np.ndarray}
    assert load_metadata(saved, "checkpoint") == {"by": "a test", "steps": [1, 2]}


def test_saving_again_replaces(saved):
    tree = jax.tree.map(lambda leaf: leaf + 1, arrays())
    save_arrays(saved, tree, {})
    jax.tree.map(np.testing.assert_array_equal, load_arrays(saved, abstract(arrays()), "checkpoint"), tree)


def flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def truncate(content: bytes) -> bytes:
    return content[:-1]


@pytest.mark.parametrize("damage", [flip, truncate])
def test_every_file_is_held_against_what_was_saved(saved, damage, capfd):
    for file in files(saved):
        before = file.read_bytes()
        file.write_bytes(damage(before))
        name = file.relative_to(saved).as_posix()
        assert refusal(saved) == f"is damaged: its file {name} is not as it was saved"
        file.write_bytes(before)
    assert capfd.readouterr() == ("", "")
    load_arrays(saved, abstract(arrays()), "checkpoint")


def test_what_was_not_written_as_it_is_in_memory_is_told(tmp_path, monkeypatch):
    write = arrays_on_disk.write_arrays
    spoilt = {"inner.half": np.zeros(8, "bfloat16")}
    monkeypatch.setattr(arrays_on_disk, "write_arrays", lambda path, arrays: write(path, arrays | spoilt))
    with pytest.raises(RunError, match=r"the values of inner\.half are not those that were saved"):
        save_arrays(tmp_path / "arrays", arrays(), {})
    assert refusal(tmp_path / "arrays") == "holds no checkpoint: there is no manifest.json in it"


def test_a_missing_file_is_named(saved):
    file = max(files(saved / "state"), key=lambda file: file.stat().st_size)
    file.unlink()
    assert refusal(saved) == f"is damaged: its file {file.relative_to(saved).as_posix()} is missing"


def test_without_a_manifest_there_is_no_checkpoint(saved, tmp_path):
    (saved / "manifest.json").unlink()
    assert refusal(saved) == "holds no checkpoint: there is no manifest.json in it"
    assert refusal(tmp_path / "nowhere") == "holds no checkpoint: there is no manifest.json in it"


def test_another_version_is_refused(saved):
    manifest = saved / "manifest.json"
    content = json.loads(manifest.read_bytes().partition(b"\n")[2]) | {"version": 2}
    text = json.dumps(content).encode()
    manifest.write_bytes(digest(text).encode() + b"\n" + text)
    assert refusal(saved) == "is of version 2 of this format, and this Swift reads version 1"


def test_other_arrays_are_refused(saved):
    wider, fewer, more = arrays(), arrays(), arrays()
    wider["inner"]["weights"] = jnp.zeros((8, 16))
    del fewer["inner"]["half"]
    more["inner"]["bias"] = jnp.zeros(3)
    assert refusal(saved, wider) == "is of another model: it has float32[8, 8] for inner.weights, here float32[8, 16]"
    assert refusal(saved, fewer) == "is of another model: it has bfloat16[8] for inner.half, here nothing"
    assert refusal(saved, more) == "is of another model: it has nothing for inner.bias, here float32[3]"


def test_empty_arrays_come_back_empty(tmp_path):
    """A model without experts has a placement of no layers."""
    tree = {"full": jnp.arange(3.0), "none": jnp.zeros((1, 0, 4), jnp.int32)}
    save_arrays(tmp_path / "arrays", tree, {})
    again = load_arrays(tmp_path / "arrays", abstract(tree), "checkpoint")
    jax.tree.map(np.testing.assert_array_equal, again, tree)
    assert again["none"].shape == (1, 0, 4)
