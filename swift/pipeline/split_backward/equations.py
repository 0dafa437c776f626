"""Equations of a jaxpr: inlining wrappers, selecting equations, running them, and counting their work.

A group of equations is run one by one, in the order of the jaxpr. No new jaxpr is built, so a group runs under whatever
transformation it is called in. The planner's cost of an operation consists of the FLOPs of matmuls, and of the bytes
that matmuls and kernels read and write.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from swift.jaxprs import bind, read, total

# Equations that only wrap others, and the parameter that holds the wrapped jaxpr. Custom derivative rules have been
# applied by the time the backward pass is traced: only the plain computation is left.
_WRAPPERS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}

CUDNN_ATTENTION = ("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper")
"""Names of the kernels that ``jax.nn.dot_product_attention`` runs with cuDNN."""

_KERNELS, _DOTS = ("pallas_call", *CUDNN_ATTENTION), ("dot_general", "ragged_dot_general")


def variables(atoms: Iterable[Any]) -> list[Var]:
    """Returns the variables among atoms."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def spec(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of anything that has both, such as an array."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def num_bytes(array: Any) -> int:
    """Returns the size of an array in bytes, from its shape and dtype."""
    return math.prod(array.shape) * array.dtype.itemsize


def needed(
    equations: Sequence[JaxprEqn], outputs: Iterable[Any], known_vars: Iterable[Var] = ()
) -> tuple[tuple[JaxprEqn, ...], set[Var]]:
    """Selects the equations that ``outputs`` depend on, given the values of the variables ``known_vars``.

    Returns:
        (the equations in order, every variable that they and the outputs read).
    """
    known_vars = set(known_vars)
    read, chosen = set(variables(outputs)), []
    for equation in reversed(equations):
        if any(var in read and var not in known_vars for var in equation.outvars):
            chosen.append(equation)
            read.update(variables(equation.invars))
    return tuple(reversed(chosen)), read


def dependent(equations: Iterable[JaxprEqn], roots: Iterable[Var]) -> set[Var]:
    """Returns the roots and every variable computed from one of them."""
    reached = set(roots)
    for equation in equations:
        if not reached.isdisjoint(variables(equation.invars)):
            reached.update(equation.outvars)
    return reached


@dataclass(frozen=True)
class EquationGroup:
    """Group of equations in a jaxpr, callable as a function on arrays.

    Attributes:
        constants: values of the variables that tracing found constant.
        inputs: variables of the arguments.
        equations: equations to run, in order.
        outputs: variables and literals to return.
    """

    constants: Mapping[Var, Any]
    inputs: tuple[Var, ...]
    equations: tuple[JaxprEqn, ...]
    outputs: tuple[Any, ...]

    def __call__(self, *arrays: Any) -> list[Any]:
        """Runs the equations on the inputs."""
        env = dict(self.constants) | dict(zip(self.inputs, arrays, strict=True))
        for equation in self.equations:
            env |= zip(equation.outvars, bind(equation, [read(env, a) for a in equation.invars]), strict=True)
        return [read(env, a) for a in self.outputs]


def inlined(closed: ClosedJaxpr, axis_env: Sequence[tuple[str, int]] | None = None) -> ClosedJaxpr:
    """Inlines the wrappers of a jaxpr (``jit``, ``checkpoint``, custom rules); loops and branches stay one equation.

    Args:
        closed: jaxpr.
        axis_env: names and sizes of the mesh axes of its collectives, if it is traced outside them.
    """
    inputs = list(map(spec, closed.in_avals))
    return jax.make_jaxpr(lambda *args: _run(closed.jaxpr, closed.consts, args), axis_env=axis_env)(*inputs)


def _run(jaxpr: Jaxpr, constants: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    env = dict(zip(jaxpr.constvars, constants, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))
    for equation in jaxpr.eqns:
        values = [read(env, a) for a in equation.invars]
        wrapped = equation.params.get(_WRAPPERS.get(equation.primitive.name, ""))
        if wrapped is None:
            results = bind(equation, values)
        else:  # a closed jaxpr or, for some wrappers and versions of JAX, an open one without constants
            results = _run(getattr(wrapped, "jaxpr", wrapped), getattr(wrapped, "consts", ()), values)
        env |= zip(equation.outvars, results, strict=True)
    return [read(env, a) for a in jaxpr.outvars]


def dot_flops(jaxpr: Jaxpr | ClosedJaxpr) -> int:
    """Counts the FLOPs of all ``dot_general`` and ``ragged_dot_general``; a multiply-add counts as two.

    Work inside a kernel is not counted, see ``counted_stage``. A ``ragged_dot_general`` counts every row once, for the
    group that it belongs to. For loops and branches, see ``total``.

    >>> import jax, jax.numpy as jnp
    >>> dot_flops(jax.make_jaxpr(jnp.matmul)(jnp.ones((2, 3)), jnp.ones((3, 5))))
    60
    """
    return total(jaxpr, _flops_of)


def dot_bytes(jaxpr: Jaxpr | ClosedJaxpr) -> int:
    """Counts the bytes that all matmuls and kernels read and write; otherwise like ``dot_flops``.

    >>> import jax, jax.numpy as jnp
    >>> dot_bytes(jax.make_jaxpr(jnp.matmul)(jnp.ones((2, 3)), jnp.ones((3, 5))))
    124
    """
    return total(jaxpr, _bytes_of)


def _flops_of(equation: JaxprEqn) -> int | None:
    """Returns the FLOPs of an equation (0 for a kernel), or None if the jaxprs inside it are to be added up."""
    if equation.primitive.name in _KERNELS:
        return 0
    return _flops(equation) if equation.primitive.name in _DOTS else None


def _bytes_of(equation: JaxprEqn) -> int | None:
    """Returns the bytes of an equation, or None if the jaxprs inside it are to be added up."""
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
