"""Equations of a jaxpr: making them atomic, choosing some of them, and running those.

A part of a computation is a list of equations in the order of the jaxpr, run one by one in an environment. No new jaxpr
is built, so a part runs under whatever transformation it is called in.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from swift.jaxprs import bind, read

# Equations that only wrap others, and the parameter that holds what they wrap. Custom rules are spent by the time that
# the backward is traced: only the plain computation is left to run.
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


def variables(atoms: Iterable[Any]) -> list[Var]:
    """Those of the atoms that are variables."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def spec(leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape and type of an array, or of something that has an array's."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def num_bytes(array: Any) -> int:
    """Bytes of an array, by its shape and type."""
    return math.prod(array.shape) * array.dtype.itemsize


def needed(
    equations: Sequence[JaxprEqn], outputs: Iterable[Any], given: Iterable[Var] = ()
) -> tuple[tuple[JaxprEqn, ...], set[Var]]:
    """The equations that ``outputs`` depend on where the variables ``given`` are known.

    Returns:
        (the equations in order, every variable that they and the outputs read).
    """
    given = set(given)
    read, chosen = set(variables(outputs)), []
    for equation in reversed(equations):
        if any(var in read and var not in given for var in equation.outvars):
            chosen.append(equation)
            read.update(variables(equation.invars))
    return tuple(reversed(chosen)), read


def dependent(equations: Iterable[JaxprEqn], roots: Iterable[Var]) -> set[Var]:
    """The roots and every variable that is computed from one of them."""
    reached = set(roots)
    for equation in equations:
        if not reached.isdisjoint(variables(equation.invars)):
            reached.update(equation.outvars)
    return reached


@dataclass(frozen=True)
class EquationGroup:
    """Some equations of a jaxpr as a function of arrays.

    Attributes:
        constants: variables with the arrays that tracing found.
        inputs: the variables that the arguments stand for.
        equations: what to run, in order.
        outputs: variables and literals that are returned.
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
    """The jaxpr with wrappers (``jit``, ``checkpoint``, custom rules) inlined; loops and branches stay one equation.

    Args:
        closed: the jaxpr.
        axis_env: names and sizes of the mesh axes that its collectives use, where it is not traced inside of them.
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
