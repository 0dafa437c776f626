"""Helpers for evaluating a jaxpr equation by equation, and for summing a cost over its equations."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params


def read(env: Mapping[Var, Any], atom: Any) -> Any:
    """Returns a literal's value, or the value that ``env`` has for a variable."""
    return atom.val if isinstance(atom, Literal) else env[atom]


def bind(equation: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
    """Evaluates an equation on the given input values, and returns its results as a sequence."""
    with equation.ctx.manager:
        results = equation.primitive.bind(*values, **equation.params)
    return results if equation.primitive.multiple_results else [results]


@contextmanager
def named(equation: JaxprEqn) -> Iterator[None]:
    """Context that traces replacement code under the original equation's name scopes, so that profiles show them."""
    names = str(equation.source_info.name_stack)
    if not names:
        yield
        return
    with jax.named_scope(names):
        yield


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Counts the constants and the carried values of a scan, given its equation's parameters."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # jax 0.12 stores the trees of (constants, carry, inputs) instead; iterating over one yields its leaves.
    consts, carry, _ = (len(list(tree)) for tree in params["ft_in"].unpack())
    return consts, carry


def total(jaxpr: Jaxpr | ClosedJaxpr, count_of: Callable[[JaxprEqn], int | None]) -> int:
    """Sums a count over all equations of a program, including inner jaxprs.

    The body of a ``scan`` counts once for each iteration. A ``cond`` counts its most expensive branch, and a
    ``platform_dependent`` its default. The body of a ``while`` counts once, since its length is not known.

    Args:
        jaxpr: program.
        count_of: returns an equation's count, or None to sum over the jaxprs inside the equation.
    """
    return sum(_total_of(equation, count_of) for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns)


def _total_of(equation: JaxprEqn, count_of: Callable[[JaxprEqn], int | None]) -> int:
    if (count := count_of(equation)) is not None:
        return count
    inner = [total(sub, count_of) for sub in jaxprs_in_params(equation.params)]
    if equation.primitive.name == "cond":
        return inner[-1] if equation.params.get("branches_platforms") else max(inner)
    return equation.params.get("length", 1) * sum(inner) if equation.primitive.name == "scan" else sum(inner)
