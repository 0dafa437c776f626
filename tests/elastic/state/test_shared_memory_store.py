"""States on the host come back bit for bit, in this process and in the next; what is damaged is not taken."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swift.elastic.membership.messages import Process, StateId
from swift.elastic.state.store import SharedMemoryStore
from swift.errors import RunError

WHO = Process((1, 0))
STATE = {
    "weights": [np.arange(15, dtype=np.float32).reshape(3, 5), np.full((7,), -0.0)],
    "slots": np.asarray(jnp.arange(6, dtype=jnp.bfloat16)),
    "step": np.int32(3).reshape(()),
    "none": np.zeros((0, 4)),
}


def shapes(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def test_a_state_comes_back_bit_for_bit_and_stays_when_it_is_forgotten(tmp_path):
    SharedMemoryStore(tmp_path, WHO).save(StateId(2, 7), STATE)
    keep = SharedMemoryStore(tmp_path, WHO)  # of the next life
    keep.save(StateId(2, 8), STATE)
    assert keep.stamps() == {StateId(2, 7), StateId(2, 8)}
    assert SharedMemoryStore(tmp_path, Process((1, 0), rank=1)).stamps() == frozenset()
    back = keep.load(StateId(2, 7), shapes(STATE))
    keep.retain_only(frozenset({StateId(2, 8)}))
    assert keep.stamps() == {StateId(2, 8)}
    assert jax.tree.structure(back) == jax.tree.structure(STATE)
    for mine, theirs in zip(jax.tree.leaves(back), jax.tree.leaves(STATE), strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        assert mine.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("damage", ["flip", "truncate", "head"])
def test_what_is_damaged_is_not_taken(tmp_path, damage):
    keep = SharedMemoryStore(tmp_path, WHO)
    keep.save(StateId(1, 4), STATE)
    (file,) = tmp_path.glob("*/state-1-4")
    whole = bytearray(file.read_bytes())
    whole[-1] ^= 1
    file.write_bytes({"flip": whole, "truncate": whole[:-9], "head": b"{}" + whole}[damage])
    with pytest.raises(RunError, match="damaged"):
        keep.load(StateId(1, 4), shapes(STATE))


def test_a_state_of_another_model_is_not_taken(tmp_path):
    keep = SharedMemoryStore(tmp_path, WHO)
    keep.save(StateId(1, 4), STATE)
    with pytest.raises(RunError, match="another model"):
        keep.load(StateId(1, 4), shapes(STATE | {"none": np.zeros((4, 0))}))


def test_records_are_kept_with_a_state_and_outlive_the_process(tmp_path):
    SharedMemoryStore(tmp_path, WHO).save(
        StateId(2, 7), STATE, [{"step": 6, "loss": 1.5}, {"step": 7, "loss": float("nan")}]
    )
    SharedMemoryStore(tmp_path, WHO).save(StateId(3, 8), STATE, [{"step": 7, "loss": 0.5}, {"step": 8, "loss": 0.25}])
    SharedMemoryStore(tmp_path, WHO).save(StateId(3, 9), STATE)
    keep = SharedMemoryStore(tmp_path, WHO)  # of the next life
    losses = {6: 1.5, 7: 0.5, 8: 0.25}
    assert keep.records() == {step: {"step": step, "loss": loss} for step, loss in losses.items()}
    other = SharedMemoryStore(tmp_path, Process((0, 0)))
    keep.hand_over(other)
    assert other.records() == keep.records()
    keep.load(StateId(3, 8), shapes(STATE))


@pytest.mark.parametrize("damage", [(b"0.25", b"0.75"), (b"records", b"recorda"), (b"{", b"[")])
def test_records_that_are_damaged_are_not_told(tmp_path, damage):
    keep = SharedMemoryStore(tmp_path, WHO)
    keep.save(StateId(3, 8), STATE, [{"step": 8, "loss": 0.25}])
    (file,) = tmp_path.glob("*/state-3-8")
    file.write_bytes(file.read_bytes().replace(*damage, 1))
    assert keep.records() == {}


def test_records_that_cannot_be_read_are_not_told(tmp_path):
    keep = SharedMemoryStore(tmp_path, WHO)
    keep.save(StateId(3, 8), STATE, [{"step": 8, "loss": 0.25}])
    (file,) = tmp_path.glob("*/state-3-8")
    file.unlink()
    file.symlink_to(tmp_path / "on-a-disk-that-is-gone")
    assert keep.records() == {}
    with pytest.raises(RunError, match="state-3-8 cannot be read: No such file"):
        keep.load(StateId(3, 8), shapes(STATE))
