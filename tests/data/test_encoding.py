"""Samples as bytes: they come back as they were, and so do digests of operators in other processes."""

import os
import subprocess
import sys

import numpy as np
import pytest

from swift.data.encoding import Unencodable, checked_copy, copied, decoded, encoded, field_bytes

THROUGH = {"files": lambda sample: decoded(encoded(sample)), "memory": lambda sample: copied(checked_copy(sample))}
"""A sample that is kept and read again."""
BLOCK = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
ARRAYS = {
    "plain": BLOCK,
    "transposed": BLOCK.transpose(2, 0, 1),
    "every other": BLOCK[:, ::2],
    "backwards": BLOCK[::-1],
    "one more axis": BLOCK[..., None].transpose(3, 1, 0, 2),
    "broadcast": np.broadcast_to(np.float32(1), (2, 3)),
    "empty": np.zeros((0, 3)),
    "no axes": np.array(3.0),
    "a number": np.float32(3),
}


@pytest.mark.parametrize("through", THROUGH.values(), ids=THROUGH)
@pytest.mark.parametrize("value", ARRAYS.values(), ids=ARRAYS)
def test_an_array_comes_back_as_it_was(value, through):
    found = through({"x": value})["x"]
    np.testing.assert_array_equal(found, value)
    assert (type(found), found.dtype) == (type(value), value.dtype)
    assert field_bytes(found) == field_bytes(value)


@pytest.mark.parametrize("through", THROUGH.values(), ids=THROUGH)
def test_the_axes_of_an_array_lie_in_memory_as_they_did(through):
    """The order of a sum depends on it, and so do its last bits."""
    value = np.random.default_rng(0).random((7, 1000, 3)).astype(np.float32).transpose(2, 0, 1)
    found = through({"x": value})["x"]
    assert found.strides == value.strides
    assert found.mean(axis=(1, 2)).tobytes() == value.mean(axis=(1, 2)).tobytes()
    found[0, 0, 0] = 1  # it can be written to
    assert field_bytes(np.ascontiguousarray(value)) == field_bytes(value)


def test_what_is_done_to_a_sample_changes_nothing_that_memory_keeps():
    sample = {"x": np.arange(3), "names": ["a"]}
    kept = checked_copy(sample)
    for changed in (sample, copied(kept)):
        changed["x"][0] = 7
        changed["names"].append("b")
    assert copied(kept)["x"].tolist() == [0, 1, 2]
    assert copied(kept)["names"] == ["a"]


@pytest.mark.parametrize("through", THROUGH.values(), ids=THROUGH)
def test_a_chat_comes_back_as_it_was_and_apart(through):
    messages = [{"role": "user", "content": [{"text": "a", "size": 1.5}], "name": None}]
    found = through({"x": messages})["x"]
    assert found == messages
    assert field_bytes(found) == field_bytes(messages)
    found[0]["content"][0]["text"] = "b"
    assert messages[0]["content"][0]["text"] == "a"


def nested(depth):
    """A list in a list, and so on."""
    return [nested(depth - 1)] if depth else []


@pytest.mark.parametrize(
    "value",
    [
        *(object(), {"a": object()}, [[{1}]], {1: "a"}, nested(200)),
        *(np.array([None]), np.zeros(1, [("a", int)]), {1}),
    ],
)
def test_memory_keeps_what_files_do_and_nothing_else(value):
    for keep in (encoded, checked_copy):
        with pytest.raises(Unencodable, match="field 'x' is a"):
            keep({"x": value})


DIGEST = """
from swift.data.sample_store import value_digest
print(value_digest(lambda sample: sample["kind"] in {"one", "two", "three", "four"} and (1, (2.5, "x"))))
"""


def test_a_set_in_an_operators_code_has_the_same_digest_in_every_process():
    seeds = [os.environ | {"PYTHONHASHSEED": str(seed)} for seed in (1, 2, 3)]
    found = {subprocess.check_output([sys.executable, "-c", DIGEST], env=env, text=True) for env in seeds}
    assert len(found) == 1
