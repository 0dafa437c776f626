"""Copies by rows have the numbers of a reshape, and TPUs' compiler gets no large reshape to write out."""

import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.models import parameters
from swift.models.config import model_size
from swift.models.gpt import GPT

sizes = st.integers(1, 5)
rows = st.integers(0, 5)
stacks = st.tuples(st.lists(sizes, max_size=2), st.lists(st.lists(rows, max_size=3), min_size=1, max_size=3))


@settings(max_examples=25, deadline=None)
@given(stack=stacks, piece=st.integers(1, 12), padding=st.integers(0, 3))
def test_vectors_are_split_and_joined_as_by_numpy(stack, piece, padding):
    lead, shapes = stack[0], [tuple(shape) for shape in stack[1]]
    lengths = [int(np.prod(shape)) for shape in shapes]
    vectors = np.arange(int(np.prod(lead)) * (sum(lengths) + padding), dtype=np.float32)
    vectors = vectors.reshape((*lead, sum(lengths) + padding))
    ends = np.cumsum(lengths)
    expected = [
        vectors[..., end - length : end].reshape((*lead, *shape))
        for end, length, shape in zip(ends, lengths, shapes, strict=True)
    ]
    with mock.patch.object(parameters, "_COPIED_AT_ONCE", piece):
        arrays = parameters.split_by_rows(jnp.asarray(vectors), shapes)
        joined = parameters.join_by_rows([jnp.asarray(array) for array in expected], shapes)
    for array, of_numpy in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(array, of_numpy)
    np.testing.assert_array_equal(joined, vectors[..., : ends[-1]])


def test_a_tpu_reshapes_no_more_than_a_piece_at_a_time():
    gpt = GPT(model_size("olmoe-1b-7b"), vocab_size=50_304, num_classes=64)
    slots = {
        name: jax.ShapeDtypeStruct((2, 4 if group.is_expert else 1, group.size), jnp.bfloat16)
        for name, group in gpt.slot_groups.items()
    }

    def largest(platform: str) -> int:
        there_and_back = jax.jit(lambda slots: gpt.pack_stacks(gpt.unpack_stacks(slots)))
        text = there_and_back.trace(slots).lower(lowering_platforms=(platform,)).as_text()
        moved = re.findall(r"stablehlo.reshape .*: \(tensor<([\dx]+)xbf16>\) -> tensor<([\dx]+)xbf16>", text)
        return max(
            np.prod([int(size) for size in before.split("x")])
            for before, after in moved
            if before.split("x")[-1] != after.split("x")[-1]
        )

    assert largest("tpu") <= 1 << 18
    assert largest("cpu") > 1 << 24
