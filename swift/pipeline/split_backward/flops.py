"""FLOPs and bytes of a traced function, of its matmuls alone: the planner's cost of an operation."""

import math
from collections.abc import Callable
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params

from swift.pipeline.split_backward.equations import CUDNN_ATTENTION


def dot_flops(jaxpr: Jaxpr | ClosedJaxpr) -> int:
    """Floating-point operations of all ``dot_general``, a multiplication and an addition counted as two.

    What a kernel does inside is not counted: see ``counted_stage``.

    A ``ragged_dot`` counts every row once, for the group that it belongs to. The body of a ``scan`` counts as often as
    it runs, a ``cond`` counts its most expensive branch, a ``platform_dependent`` its default, and the body of a
    ``while``, whose length is not known, counts once.

    >>> import jax, jax.numpy as jnp
    >>> dot_flops(jax.make_jaxpr(jnp.matmul)(jnp.ones((2, 3)), jnp.ones((3, 5))))
    60
    """
    return _total(jaxpr, _flops)


def dot_bytes(jaxpr: Jaxpr | ClosedJaxpr) -> int:
    """Bytes that all ``dot_general`` and kernels of attention read and write, counted like ``dot_flops``.

    >>> import jax, jax.numpy as jnp
    >>> dot_bytes(jax.make_jaxpr(jnp.matmul)(jnp.ones((2, 3)), jnp.ones((3, 5))))
    124
    """
    return _total(jaxpr, _bytes)


def _total(jaxpr: Jaxpr | ClosedJaxpr, of_dot: Callable[[JaxprEqn], int]) -> int:
    return sum(_of_equation(equation, of_dot) for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns)


def _of_equation(equation: JaxprEqn, of_dot: Callable[[JaxprEqn], int]) -> int:
    if equation.primitive.name in ("pallas_call", *CUDNN_ATTENTION):
        return _bytes(equation) if of_dot is _bytes else 0
    if equation.primitive.name in ("dot_general", "ragged_dot_general"):
        return of_dot(equation)
    inner = [_total(sub, of_dot) for sub in jaxprs_in_params(equation.params)]
    if equation.primitive.name == "cond":
        return inner[-1] if equation.params.get("branches_platforms") else max(inner)
    return equation.params.get("length", 1) * sum(inner) if equation.primitive.name == "scan" else sum(inner)


def _flops(equation: JaxprEqn) -> int:
    if equation.primitive.name == "ragged_dot_general":
        return _ragged_flops(equation)
    (contracted, _), _ = equation.params["dimension_numbers"]
    left, out = _shape(equation.invars[0]), _shape(equation.outvars[0])
    return 2 * math.prod(out) * math.prod(left[dim] for dim in contracted)


def _ragged_flops(equation: JaxprEqn) -> int:
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (_, right_contracted), _ = numbers.dot_dimension_numbers
    left, right = _shape(equation.invars[0]), _shape(equation.invars[1])
    summed = (*right_contracted, *numbers.rhs_group_dimensions)
    columns = math.prod(size for dim, size in enumerate(right) if dim not in summed)
    return 2 * math.prod(left) * columns


def _bytes(equation: JaxprEqn) -> int:
    atoms: Any = (*equation.invars, *equation.outvars)
    return sum(atom.aval.size * atom.aval.dtype.itemsize for atom in atoms)


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape
