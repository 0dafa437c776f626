"""FLOPs and bytes of a traced function, of its matmuls alone: the planner's cost of an operation."""

import math
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from swift.jaxprs import total
from swift.pipeline.split_backward.equations import CUDNN_ATTENTION

_KERNELS, _DOTS = ("pallas_call", *CUDNN_ATTENTION), ("dot_general", "ragged_dot_general")


def dot_flops(jaxpr: Jaxpr | ClosedJaxpr) -> int:
    """Floating-point operations of all ``dot_general``, a multiplication and an addition counted as two.

    What a kernel does inside is not counted: see ``counted_stage``.

    A ``ragged_dot`` counts every row once, for the group that it belongs to. Loops and branches: see ``total``.

    >>> import jax, jax.numpy as jnp
    >>> dot_flops(jax.make_jaxpr(jnp.matmul)(jnp.ones((2, 3)), jnp.ones((3, 5))))
    60
    """
    return total(jaxpr, _flops_of)


def dot_bytes(jaxpr: Jaxpr | ClosedJaxpr) -> int:
    """Bytes that all ``dot_general`` and kernels of attention read and write, counted like ``dot_flops``.

    >>> import jax, jax.numpy as jnp
    >>> dot_bytes(jax.make_jaxpr(jnp.matmul)(jnp.ones((2, 3)), jnp.ones((3, 5))))
    124
    """
    return total(jaxpr, _bytes_of)


def _flops_of(equation: JaxprEqn) -> int | None:
    """Returns the FLOPs of an equation, none of a kernel's; None: those of the jaxprs in it."""
    if equation.primitive.name in _KERNELS:
        return 0
    return _flops(equation) if equation.primitive.name in _DOTS else None


def _bytes_of(equation: JaxprEqn) -> int | None:
    """Returns the bytes of an equation; None: those of the jaxprs in it."""
    return _bytes(equation) if equation.primitive.name in (*_KERNELS, *_DOTS) else None


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
