"""A fixed order of collectives on every device: each collective depends on the previous one's result.

XLA:CPU runs independent operations concurrently. In a freshly compiled program it still keeps all collectives in order.
A program that was serialized and deserialized, by the persistent compilation cache or by another process, loses that
order between nesting levels: a collective inside a branch or a loop and one outside it may run in a different order on
each device, and the program crashes, hangs, or silently exchanges the wrong data (seen with jaxlib 0.10.2;
``ThunkSequenceSerDesProtobuf::FromProto`` gives every nested sequence its own communicators). This is a work-around
until https://github.com/openxla/xla fixes it; other platforms are unaffected, and their programs stay unchanged.

The work-around threads a token through the program: a number that is always 0, which XLA cannot infer. Before::

    b = ppermute a                          d = ppermute c

and after::

    a' = select (token == 0) a 0            c' = select (token' == 0) c 0
    b = ppermute a'                         d = ppermute c'
    token' = token & b[0]
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from swift.jaxprs import bind, named, read, scan_counts

_COLLECTIVES = {
    "psum",
    "psum_invariant",
    "pmax",
    "pmin",
    "all_gather",
    "all_gather_invariant",
    "all_to_all",
    "ppermute",
    "ragged_all_to_all",
    "reduce_scatter",
}
_CUSTOM = {"custom_jvp_call", "custom_vjp_call"}
"""Calls that cannot be bound again; their plain computation is enough in code that is no longer differentiated."""


def in_order(function: Callable[..., Any], axes: tuple[str, ...]) -> Callable[..., Any]:
    """Wraps a per-rank function so that its collectives run in program order, whatever else runs concurrently.

    Args:
        function: function from arrays to arrays, traced inside ``shard_map``.
        axes: all axes of the mesh; on a single axis of size 1, XLA would know the index and thus the token.
    """

    def ordered(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        # An index is never negative, so this is 0, but XLA does not infer that.
        token = lax.shift_right_arithmetic(lax.axis_index(axes), jnp.int32(31))
        _, *results = _run(closed.jaxpr, closed.consts, token, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return ordered


def _run(jaxpr: Jaxpr, constants: Sequence[Any], token: jax.Array, args: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr; returns the token after its last collective, followed by its results."""
    env: dict[Var, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
    env |= zip(jaxpr.invars, args, strict=True)
    for equation in jaxpr.eqns:
        values = [read(env, atom) for atom in equation.invars]
        with named(equation):
            if equation.primitive.name in _CUSTOM or _has_collectives(equation):
                rule = _RULES.get(equation.primitive.name, _inline)
                token, *results = rule(equation, token, values)
            else:
                results = list(bind(equation, values))
        env |= zip(equation.outvars, results, strict=True)
    return [token, *(read(env, atom) for atom in jaxpr.outvars)]


def _collective(equation: JaxprEqn, token: jax.Array, values: Sequence[Any]) -> list[Any]:
    operand = jnp.where(token == 0, values[0], jnp.zeros_like(values[0]))
    results = bind(equation, [operand, *values[1:]])
    if not results[0].size:
        return [token, *results]
    return [token & results[0].ravel()[0].astype(jnp.int32), *results]


def _cond(equation: JaxprEqn, token: jax.Array, values: Sequence[Any]) -> list[Any]:
    return lax.switch(values[0], [_call(branch) for branch in equation.params["branches"]], token, *values[1:])


def _while(equation: JaxprEqn, token: jax.Array, values: Sequence[Any]) -> list[Any]:
    params = equation.params
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    for_cond, for_body, carry = values[:first], values[first:second], values[second:]
    assert not _holds_collectives(params["cond_jaxpr"]), "a loop whose condition is a collective"
    condition, body = _call(params["cond_jaxpr"]), _call(params["body_jaxpr"])

    def is_not_done(loop: Any) -> Any:
        return condition(loop[0], *for_cond, *loop[1:])[1]

    def once(loop: Any) -> Any:
        return body(loop[0], *for_body, *loop[1:])

    start: Any = [token, *carry]
    return list(lax.while_loop(is_not_done, once, start))


def _scan(equation: JaxprEqn, token: jax.Array, values: Sequence[Any]) -> list[Any]:
    params, body = equation.params, _call(equation.params["jaxpr"])
    num_consts, num_carry = scan_counts(params)
    first_x = num_consts + num_carry
    consts, carry, xs = values[:num_consts], list(values[num_consts:first_x]), list(values[first_x:])

    def step(loop: Any, now: Any) -> tuple[Any, Any]:
        results = body(loop[0], *consts, *loop[1:], *now)
        return results[: 1 + num_carry], results[1 + num_carry :]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    start: Any = [token, *carry]
    end, ys = lax.scan(step, start, xs, **options)
    return [*end, *ys]


def _inline(equation: JaxprEqn, token: jax.Array, values: Sequence[Any]) -> list[Any]:
    inner = [value for value in equation.params.values() if isinstance(value, Jaxpr | ClosedJaxpr)]
    assert len(inner) == 1, f"no rule for {equation.primitive.name}, which has collectives inside"
    return _call(inner[0])(token, *values)


_RULES: Mapping[str, Callable[[JaxprEqn, jax.Array, Sequence[Any]], list[Any]]] = {
    **dict.fromkeys(_COLLECTIVES, _collective),
    "cond": _cond,
    "while": _while,
    "scan": _scan,
}


def _call(jaxpr: Any) -> Callable[..., list[Any]]:
    """Returns a function of the token and the inputs that evaluates a jaxpr, closed or open."""
    return lambda token, *args: _run(getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ()), token, args)


def _has_collectives(equation: JaxprEqn) -> bool:
    inner = [leaf for value in equation.params.values() for leaf in (value if isinstance(value, tuple) else (value,))]
    return equation.primitive.name in _COLLECTIVES or any(map(_holds_collectives, inner))


def _holds_collectives(value: Any) -> bool:
    jaxpr = getattr(value, "jaxpr", value)
    return isinstance(jaxpr, Jaxpr) and any(map(_has_collectives, jaxpr.eqns))
