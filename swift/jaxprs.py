"""Evaluation of a jaxpr equation by equation, for code that takes a traced computation apart."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Literal, Var


def read(env: Mapping[Var, Any], atom: Any) -> Any:
    """Looks up the value of a variable or a literal."""
    return atom.val if isinstance(atom, Literal) else env[atom]


def bind(equation: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
    """Applies an equation to values of its inputs and returns its results."""
    with equation.ctx.manager:
        results = equation.primitive.bind(*values, **equation.params)
    return results if equation.primitive.multiple_results else [results]


@contextmanager
def named(equation: JaxprEqn) -> Iterator[None]:
    """Traces replacement code under the name scopes of the original equation."""
    names = str(equation.source_info.name_stack)
    if not names:
        yield
        return
    with jax.named_scope(names):
        yield


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Counts the constants and the carried values among a scan's inputs, from its equation's parameters."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # jax 0.12 stores the trees of (constants, carry, inputs) instead; iterating over one yields its leaves.
    consts, carry, _ = (len(list(tree)) for tree in params["ft_in"].unpack())
    return consts, carry
