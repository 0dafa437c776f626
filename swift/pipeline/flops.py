"""FLOPs of a traced function, by its matmuls alone: what the planner takes as the cost of an operation."""

import math
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params


def dot_flops(jaxpr: Jaxpr | ClosedJaxpr) -> int:
    """Floating-point operations of all ``dot_general``, a multiplication and an addition counted as two.

    A ``ragged_dot`` counts every row once, for the group that it belongs to. The body of a ``scan`` counts as often as
    it runs, of the branches of a ``cond`` the dearest counts, of a ``platform_dependent`` the default, and the body of
    a ``while``, whose length is not known, counts once.

    >>> import jax, jax.numpy as jnp
    >>> dot_flops(jax.make_jaxpr(jnp.matmul)(jnp.ones((2, 3)), jnp.ones((3, 5))))
    60
    """
    return sum(map(_equation_flops, getattr(jaxpr, "jaxpr", jaxpr).eqns))


def _equation_flops(equation: JaxprEqn) -> int:
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        left, out = _shape(equation.invars[0]), _shape(equation.outvars[0])
        return 2 * math.prod(out) * math.prod(left[dim] for dim in contracted)
    if equation.primitive.name == "ragged_dot_general":
        return _ragged_flops(equation)
    inner = [dot_flops(sub) for sub in jaxprs_in_params(equation.params)]
    if equation.primitive.name == "cond":
        return inner[-1] if equation.params.get("branches_platforms") else max(inner)
    return equation.params.get("length", 1) * sum(inner) if equation.primitive.name == "scan" else sum(inner)


def _ragged_flops(equation: JaxprEqn) -> int:
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (_, right_contracted), _ = numbers.dot_dimension_numbers
    left, right = _shape(equation.invars[0]), _shape(equation.invars[1])
    summed = (*right_contracted, *numbers.rhs_group_dimensions)
    columns = math.prod(size for dim, size in enumerate(right) if dim not in summed)
    return 2 * math.prod(left) * columns


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape
