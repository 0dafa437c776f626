"""Checks that an optimizer is elementwise: each update element depends only on the same element of the inputs.

Every rank updates only a slice of each expert, in arrays of any shape, so an optimizer must not mix elements. The check
traces an update of two small arrays and goes through its equations one by one, tracking for every number the input
elements that it depends on. An operation that also accepts scalars works on each element separately. Any other
operation is run on trial inputs, whose elements are changed one at a time to see which results change.

Legend: N elements of all small arrays together.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params

from swift.jaxprs import bind, read, scan_counts

_SMALL = (3, 4), (2, 5)
_OTHER = ((128, 128), (128, 256)), ((5,), (7,))
"""Shapes for which optimizers may behave differently: large dims, for which Adafactor factors its moments and Muon
orthogonalizes; and vectors, which masks may exclude."""
_FILLS = 0, 1, 2
_CHANGES = -2, 0, 1, 3, np.nan


class _Origin(NamedTuple):
    """Dependence of an array's elements on the inputs."""

    elements: np.ndarray  # bool[*shape, N], the elements of the small arrays that each element depends on
    by_place: bool = False  # whether elements may differ even if all their inputs are equal
    causes: tuple[str, ...] = ()  # non-elementwise operations on the way; those that mix elements come first


def why_not_elementwise(optimizer: optax.GradientTransformation) -> str | None:
    """Returns why an optimizer cannot update slices in the same way as whole arrays; None if it can.

    >>> why_not_elementwise(optax.sgd(0.1)), why_not_elementwise(optax.lamb(0.1))
    (None, "it applies 'reduce_sum' to a whole array")
    """
    small, shapes = _traced(optimizer, _SMALL)
    ends = np.cumsum([np.prod(shape) for shape in _SMALL])
    identities = {
        shape: np.eye(ends[-1], dtype=bool)[end - np.prod(shape) : end].reshape(*shape, -1)
        for shape, end in zip(_SMALL, ends, strict=True)
    }
    input_elements = [identities.get(aval.shape, np.zeros((*aval.shape, ends[-1]), bool)) for aval in small.in_avals]
    origins = _Origins(int(ends[-1]))
    results = origins.of(small, [_Origin(elements) for elements in input_elements])
    for aval, result in zip(shapes, results, strict=True):
        depends_on_others = result.elements & ~identities[aval.shape] if aval.shape in identities else result.elements
        if depends_on_others.any() or result.by_place:
            return f"it applies {result.causes[0]!r} to a whole array"
    if odd := [list(aval.shape) for aval in shapes if aval.shape and aval.shape not in identities]:
        return (
            f"it keeps an array of shape {odd[0]} of parameters of shapes {' and '.join(map(str, map(list, _SMALL)))}"
        )
    if any(list(origins.outline(_traced(optimizer, other)[0])) != list(origins.outline(small)) for other in _OTHER):
        return "it does something else with arrays of another shape"
    return None


def _traced(optimizer: optax.GradientTransformation, shapes: Sequence[tuple[int, ...]]) -> tuple[ClosedJaxpr, Any]:
    """Traces the initial state, an update and the next state; returns the jaxpr and the shapes of its results."""
    params = {f"group {number}": jax.ShapeDtypeStruct(shape, jnp.float32) for number, shape in enumerate(shapes)}

    def step(gradients: Any, state: Any, params: Any) -> Any:
        return optimizer.init(params), optimizer.update(gradients, state, params)

    jaxpr, results = jax.make_jaxpr(step, return_shape=True)(params, jax.eval_shape(optimizer.init, params), params)
    return jaxpr, jax.tree.leaves(results)


@dataclass
class _Origins:
    """Follows element dependences through a program's equations.

    Attributes:
        total: number of elements of all small arrays together, N.
        scalar: cache of ``_takes_scalars``, by operation, options and dtypes.
    """

    total: int
    scalar: dict[tuple[Any, ...], bool] = field(default_factory=dict)

    def of(self, closed: ClosedJaxpr, origins: Sequence[_Origin]) -> list[_Origin]:
        """Computes the origins of a program's results, given its inputs' origins."""
        constants = [self._constant(value) for value in closed.consts]
        inputs = *closed.jaxpr.constvars, *closed.jaxpr.invars
        env: dict[Var, _Origin] = dict(zip(inputs, (*constants, *origins), strict=True))

        def origin(atom: Any) -> _Origin:
            return self._constant(atom.val) if isinstance(atom, Literal) else read(env, atom)

        for equation in closed.jaxpr.eqns:
            results = self._results(equation, [origin(atom) for atom in equation.invars])
            env |= zip(equation.outvars, results, strict=True)
        return [origin(atom) for atom in closed.jaxpr.outvars]

    def outline(self, jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[Any]:
        """Yields a program's elementwise operations and the numbers in it, independent of array shapes."""
        for equation in _open(jaxpr).eqns:
            numbers = [atom.val for atom in equation.invars if isinstance(atom, Literal) and np.ndim(atom.val) == 0]
            inner = list(jaxprs_in_params(equation.params))
            if not inner and self._takes_scalars(equation):
                yield equation.primitive.name, str(equation.params), str(numbers)
            else:  # integers may be indices, which differ with the shape
                yield from (str(number) for number in numbers if jnp.issubdtype(jnp.result_type(number), jnp.inexact))
            for each in inner:
                yield from self.outline(each)

    def _constant(self, value: Any) -> _Origin:
        is_key = jnp.issubdtype(jnp.result_type(value), jax.dtypes.extended)
        by_place = np.size(value) > 1 and (is_key or len(np.unique(np.asarray(value))) > 1)
        return _Origin(np.zeros((*np.shape(value), self.total), bool), by_place, ("constant",) * by_place)

    def _joined(self, origins: Sequence[_Origin], shape: tuple[int, ...]) -> _Origin:
        """Origin of elements that are each computed from the same element in several arrays, or from scalars."""
        elements = np.zeros((*shape, self.total), bool)
        for origin in origins:
            elements |= origin.elements
        causes = tuple(dict.fromkeys(cause for origin in origins for cause in origin.causes))
        return _Origin(elements, any(origin.by_place for origin in origins), causes)

    def _results(self, equation: JaxprEqn, origins: Sequence[_Origin]) -> list[_Origin]:
        name, params, inner = equation.primitive.name, equation.params, list(jaxprs_in_params(equation.params))
        if name == "cond":
            return self._branch_origins(params["branches"], origins)
        if name == "scan":
            return self._scan_origins(params, origins)
        if name == "while":
            return self._while_origins(params, origins)
        # A call with one inner program (jit, custom_jvp): follow that program.
        if len(inner) == 1 and [_shape(v) for v in _open(inner[0]).invars] == [_shape(v) for v in equation.invars]:
            return self.of(_closed(inner[0]), origins)
        shapes = {_shape(var) for var in equation.outvars}
        is_alike = len(shapes) == 1 and {_shape(var) for var in equation.invars} <= {(), *shapes}
        if is_alike and (shapes == {()} or self._takes_scalars(equation)):
            return [self._joined(origins, _shape(var)) for var in equation.outvars]
        return self._trial_origins(equation, origins)

    def _takes_scalars(self, equation: JaxprEqn) -> bool:
        """Whether an operation also accepts scalars, and therefore cannot mix the elements of an array."""
        kind = equation.primitive.name, str(equation.params), *(str(_dtype(var)) for var in equation.invars)
        if kind not in self.scalar:
            scalars = [jax.ShapeDtypeStruct((), _dtype(var)) for var in equation.invars]
            try:  # compile it, too: some operations check their options only then
                traced = jax.jit(lambda *values: bind(equation, values)).trace(*scalars)
                traced.lower(lowering_platforms=("cpu",))
                self.scalar[kind] = all(var.shape == () for var in jax.tree.leaves(traced.out_info))
            except Exception:  # an operation may raise any kind of error
                self.scalar[kind] = False
        return self.scalar[kind]

    def _branch_origins(self, branches: Sequence[ClosedJaxpr], origins: Sequence[_Origin]) -> list[_Origin]:
        index, *operands = origins
        results = [self.of(branch, operands) for branch in branches]
        return [self._joined((index, *each), each[0].elements.shape[:-1]) for each in zip(*results, strict=True)]

    def _scan_origins(self, params: Any, origins: Sequence[_Origin]) -> list[_Origin]:
        num_consts, num_carry = scan_counts(params)
        consts, carry = origins[:num_consts], origins[num_consts:][:num_carry]
        stacks = origins[num_consts + num_carry :]
        stacks, rows = [stack._replace(causes=(*stack.causes, "scan")) for stack in stacks], []
        for step in range(params["length"])[:: -1 if params["reverse"] else 1]:
            results = self.of(
                params["jaxpr"], [*consts, *carry, *(stack._replace(elements=stack.elements[step]) for stack in stacks)]
            )
            carry = results[:num_carry]
            rows.append((step, results[num_carry:]))
        columns = zip(*(row for _, row in sorted(rows, key=lambda row: row[0])), strict=True)
        return [*carry, *(self._stacked(column) for column in columns)]

    def _stacked(self, column: Sequence[_Origin]) -> _Origin:
        """Joins the origins of a scan's per-step results, stacked along a new first dim."""
        causes = self._joined(column, column[0].elements.shape[:-1]).causes
        return _Origin(np.stack([o.elements for o in column]), any(o.by_place for o in column), causes)

    def _while_origins(self, params: Any, origins: Sequence[_Origin]) -> list[_Origin]:
        counts = params["cond_nconsts"], params["body_nconsts"]
        condition_consts, body_consts = origins[: counts[0]], origins[counts[0] : sum(counts)]
        carry = origins[sum(counts) :]

        def once(carry: Sequence[_Origin]) -> list[_Origin]:
            (goes_on,) = self.of(params["cond_jaxpr"], [*condition_consts, *carry])
            after = self.of(params["body_jaxpr"], [*body_consts, *carry])
            return [self._joined((goes_on, origin), origin.elements.shape[:-1]) for origin in after]

        return self._repeated(carry, once)

    def _repeated(self, carry: Sequence[_Origin], once: Callable[[Sequence[_Origin]], list[_Origin]]) -> list[_Origin]:
        """Iterates a loop carry's origins to a fixed point, which is valid for any number of loop iterations."""
        while True:
            after = [self._joined(pair, pair[0].elements.shape[:-1]) for pair in zip(carry, once(carry), strict=True)]
            if all(
                new.by_place == old.by_place and np.array_equal(new.elements, old.elements)
                for new, old in zip(after, carry, strict=True)
            ):
                return after
            carry = after

    def _trial_origins(self, equation: JaxprEqn, origins: Sequence[_Origin]) -> list[_Origin]:
        """Determines the origins of an operation's results by trial; if it cannot run, all elements count as mixed."""
        shapes, name = [_shape(var) for var in equation.outvars], equation.primitive.name
        try:
            readers, by_place = _trial(equation, origins)
        except Exception:  # an operation may raise any kind of error
            sizes = [origin.elements[..., 0].size for origin in origins]
            readers = [[np.ones((math.prod(shape), size), bool) for size in sizes] for shape in shapes]
            by_place = [True] * len(shapes)
        before = self._joined(
            [o._replace(elements=np.any(o.elements.reshape(-1, self.total), axis=0)) for o in origins], ()
        )
        most = max((origin.elements.sum(axis=-1).max(initial=0) for origin in origins), default=0)
        results = []
        for shape, input_readers, is_by_place in zip(shapes, readers, by_place, strict=True):
            elements = np.zeros((math.prod(shape), self.total), bool)
            for reads, origin in zip(input_readers, origins, strict=True):
                elements = elements | (reads @ origin.elements.reshape(-1, self.total))
            causes = before.causes
            if elements.any() or is_by_place:
                causes = (name, *causes) if elements.sum(axis=1).max(initial=0) > most else (*causes, name)
            is_array = math.prod(shape) > 1
            results.append(_Origin(elements.reshape(*shape, -1), is_array and (is_by_place or before.by_place), causes))
        return results


def _trial(equation: JaxprEqn, origins: Sequence[_Origin]) -> tuple[list[list[np.ndarray]], list[bool]]:
    """Runs an operation on trial inputs, and again with each of their numbers changed in turn.

    Returns:
        (for each result and input, bool[result size, input size]: whether the result's number depends on the input's;
        for each result, whether its elements differ even if all elements of each input are equal).
    """
    random, atoms = np.random.default_rng(0), equation.invars

    def run(inputs: Sequence[Any]) -> list[np.ndarray]:
        values = [atom.val if isinstance(atom, Literal) else value for atom, value in zip(atoms, inputs, strict=True)]
        return [np.asarray(result).ravel() for result in bind(equation, [jnp.asarray(value) for value in values])]

    def numbers(atom: Any, fill: int | None) -> np.ndarray:
        values = random.integers(0, 3, _shape(atom)) if fill is None else np.full(_shape(atom), fill)
        return values.astype(_dtype(atom))

    by_place = [False] * len(equation.outvars)
    for fill in _FILLS:
        alike = run([numbers(atom, fill + index) for index, atom in enumerate(atoms)])
        by_place = [
            known or bool(_differ(result, result[:1]).any()) for known, result in zip(by_place, alike, strict=True)
        ]
    readers = [[np.zeros((math.prod(_shape(o)), math.prod(_shape(i))), bool) for i in atoms] for o in equation.outvars]
    for base_fill in (*_FILLS, None):
        inputs = [numbers(atom, base_fill) for atom in atoms]
        base = run(inputs)
        for number, origin in enumerate(origins):
            for position in range(inputs[number].size) if origin.elements.any() else ():
                for change in _CHANGES:
                    if np.isnan(change) and not jnp.issubdtype(inputs[number].dtype, jnp.inexact):
                        continue
                    changed = inputs[number].copy()
                    changed.flat[position] = np.asarray(change).astype(changed.dtype)
                    results = run([*inputs[:number], changed, *inputs[number + 1 :]])
                    for reads, old, new in zip(readers, base, results, strict=True):
                        reads[number][:, position] |= _differ(old, new)
    return readers, by_place


def _differ(array: np.ndarray, other: np.ndarray) -> np.ndarray:
    return (array != other) & ((array == array) | (other == other))


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _dtype(atom: Any) -> Any:
    return atom.aval.dtype


def _open(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def _closed(jaxpr: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())
