"""The check of annotated arrays that all other tests run under: what has some is checked, all else is as it was."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, TypeCheckError

from swift.experts.placement.replicas import replica_counts
from swift.experts.state_layouts import Decoupled
from tests.array_check import check_arrays, checked_where_arrays_are

check = checked_where_arrays_are(typechecker=check_arrays)
SQUARE, OBLONG = np.zeros((2, 2), np.float32), np.zeros((2, 3), np.float32)


def test_the_packages_are_checked():
    with pytest.raises(TypeCheckError, match="placement_LNS"):
        replica_counts(jnp.zeros((3, 4), jnp.int32), 3)


def test_a_method_of_a_dataclass_of_theirs_is_checked():
    layout = Decoupled(num_classes=3, size=4, num_ranks=2, compute_dtype=jnp.float32, wire_dtype=jnp.float32)
    with pytest.raises(TypeCheckError, match=r"Decoupled\.init"):
        layout.init(jnp.zeros((3, 4)), None)


def test_arguments_and_results_are_checked():
    @check
    def first_row(x: Float[Array, "N N"], rows: list[Float[Array, " M"]]) -> Float[Array, " N"]:
        return rows[0] if rows else x[0]

    assert first_row(SQUARE, []).shape == (2,)
    for arguments in ((OBLONG, []), (SQUARE, [OBLONG]), (SQUARE, [OBLONG[0]])):
        with pytest.raises(TypeCheckError):
            first_row(*arguments)


def test_methods_properties_and_fields_are_checked():
    @check
    @dataclass
    class Matrix:
        values: Float[Array, "N N"]

        @check
        def times(self, x: Float[Array, "N M"]) -> Float[Array, "N M"]:
            return self.values @ x

        @property
        @check
        def row(self) -> Float[Array, " N"]:
            return self.values

    with pytest.raises(TypeCheckError):
        Matrix(OBLONG)
    matrix = Matrix(SQUARE)
    assert matrix.times(OBLONG).shape == (2, 3)
    with pytest.raises(TypeCheckError):
        matrix.times(SQUARE[0])
    with pytest.raises(TypeCheckError):
        _ = matrix.row


def test_what_has_no_annotated_arrays_is_as_it_was():
    def count(values: list[int]) -> int:
        return len(values)

    @dataclass
    class Size:
        rows: int

    for defined in (count, Size):
        assert check(defined) is defined
