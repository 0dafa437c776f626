"""Running the equations of a jaxpr one by one, for code that takes a traced computation apart."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Literal, Var


def read(env: Mapping[Var, Any], atom: Any) -> Any:
    """The value of a variable or a literal."""
    return atom.val if isinstance(atom, Literal) else env[atom]


def bind(equation: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
    """The results of an equation on values for its inputs."""
    with equation.ctx.manager:
        results = equation.primitive.bind(*values, **equation.params)
    return results if equation.primitive.multiple_results else [results]


@contextmanager
def named(equation: JaxprEqn) -> Iterator[None]:
    """The names that an equation had where it was traced, for what is traced in its place."""
    names = str(equation.source_info.name_stack)
    if not names:
        yield
        return
    with jax.named_scope(names):
        yield


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many inputs of a scan are constants, and how many are carried, by its equation's parameters."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # jax 0.12 keeps the trees of (constants, carry, inputs) instead; one that is iterated over gives its leaves.
    consts, carry, _ = (len(list(tree)) for tree in params["ft_in"].unpack())
    return consts, carry
