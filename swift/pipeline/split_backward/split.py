"""The decoupled backward: a stage's forward F, its input gradient B and its weight gradient W as three functions.

The stage and its gradient are traced as one jaxpr, whose equations are then divided (ReCycle's decoupled
back-propagation, zero-bubble's B and W): F gets the equations that the output needs, B those that the input's cotangent
needs, and W the rest. No matmul runs twice. In contrast, calling the function that ``jax.vjp`` returns twice, and
dropping one result each time, would repeat part of the backward pass. A layer with its whole backward pass, before:

>>> def layer(w, extras, x):
...     return jax.numpy.sin(x @ w), None
>>> w, x, dy = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((3, 5), (2, 3), (2, 5)))
>>> print(jax.make_jaxpr(lambda w, x, dy: jax.vjp(lambda w, x: layer(w, None, x)[0], w, x)[1](dy))(w, x, dy))
{ lambda ; a:f32[3,5] b:f32[2,3] c:f32[2,5]. let
    d:f32[2,5] = dot_general[
      dimension_numbers=(([1], [0]), ([], []))
      preferred_element_type=float32
    ] b a
    _:f32[2,5] = sin d
    e:f32[2,5] = cos d
    f:f32[2,5] = mul c e
    g:f32[5,3] = dot_general[
      dimension_numbers=(([0], [0]), ([], []))
      preferred_element_type=float32
    ] f b
    h:f32[3,5] = transpose[permutation=(1, 0)] g
    i:f32[2,3] = dot_general[
      dimension_numbers=(([1], [1]), ([], []))
      preferred_element_type=float32
    ] f a
  in (h, i) }

and after: B, whose second result is W's stash, and W, which reads this stash and the ``x`` that F kept.

>>> halves = split(layer, w, None, x)
>>> print(jax.make_jaxpr(halves.backward_input)(w, None, *halves.stash_shapes[:2], dy))
{ lambda ; a:f32[3,5] b:f32[2,5] c:f32[2,3] d:f32[2,5]. let
    e:f32[2,5] = mul d b
    f:f32[2,3] = dot_general[
      dimension_numbers=(([1], [1]), ([], []))
      preferred_element_type=float32
    ] e a
  in (f, e) }
>>> print(jax.make_jaxpr(halves.backward_weight)(w, None, *halves.stash_shapes[1:]))
{ lambda ; a:f32[3,5] b:f32[2,3] c:f32[2,5]. let
    d:f32[5,3] = dot_general[
      dimension_numbers=(([0], [0]), ([], []))
      preferred_element_type=float32
    ] c b
    e:f32[3,5] = transpose[permutation=(1, 0)] d
  in (e,) }
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from swift.pipeline.split_backward.equations import inlined, spec
from swift.pipeline.split_backward.partition import Joint, Partition, Stashes, partition


@dataclass(frozen=True)
class SplitStage:
    """A stage as three pure functions, for use under ``jit`` and inside ``shard_map`` or ``vmap``.

    Attributes:
        stash_shapes: shapes of the stashed arrays, one tuple per stash.
    """

    stash_shapes: Stashes
    _parts: Partition
    _trees: "_Trees"

    def forward(self, params: Any, extras: Any, x: Any) -> tuple[Any, Any, tuple, tuple]:
        """Runs F: (params, extras, x) -> (out, metrics, stash_for_b, stash_for_b_and_w)."""
        results = self._parts.forward(*jax.tree.leaves((params, extras, x)))
        sizes = self._trees.out.num_leaves, self._trees.metrics.num_leaves, len(self.stash_shapes.for_b)
        out, metrics, stash_for_b, stash_for_b_and_w = _sections(results, *sizes)
        return (
            self._trees.out.unflatten(out),
            self._trees.metrics.unflatten(metrics),
            tuple(stash_for_b),
            tuple(stash_for_b_and_w),
        )

    def backward_input(
        self, params: Any, extras: Any, stash_for_b: Sequence[Any], stash_for_b_and_w: Sequence[Any], d_out: Any
    ) -> tuple[Any, tuple]:
        """Runs B: (params, extras, stash_for_b, stash_for_b_and_w, out's cotangent) -> (x's cotangent, stash_for_w)."""
        params_and_extras, cotangents = jax.tree.leaves((params, extras)), jax.tree.leaves(d_out)
        results = self._parts.backward_input(*params_and_extras, *stash_for_b, *stash_for_b_and_w, *cotangents)
        dx, stash_for_w = _sections(results, self._trees.x.num_leaves)
        return self._trees.x.unflatten(dx), tuple(stash_for_w)

    def backward_weight(
        self, params: Any, extras: Any, stash_for_b_and_w: Sequence[Any], stash_for_w: Sequence[Any]
    ) -> Any:
        """Runs W: (params, extras, stash_for_b_and_w, stash_for_w) -> gradient of the parameters."""
        dparams = self._parts.backward_weight(*jax.tree.leaves((params, extras)), *stash_for_b_and_w, *stash_for_w)
        return self._trees.params.unflatten(dparams)


@dataclass(frozen=True)
class _Trees:
    """Tree structures of inputs and outputs."""

    params: Any
    x: Any
    out: Any
    metrics: Any


def split(
    f: Callable[[Any, Any, Any], tuple[Any, Any]],
    params: Any,
    extras: Any,
    x: Any,
    axis_env: Sequence[tuple[str, int]] | None = None,
) -> SplitStage:
    """Splits a stage and its gradient into F, B and W.

    As few bytes as possible are kept between the three without running a costly equation twice; see ``partition``. If
    ``f`` is wrapped in ``jax.checkpoint``, F keeps only the values that the checkpoint saves, and B recomputes the
    rest.

    Args:
        f: function (params, extras, x) -> (out, metrics); ``out`` is differentiated, ``metrics`` is not.
        params: float arrays or their shapes.
        extras: arrays or their shapes; not differentiated, and passed to B and W again, so never stashed.
        x: float arrays or their shapes; differentiated.
        axis_env: names and sizes of the mesh axes of ``f``'s collectives, if ``split`` is called outside them.
    """

    def joint(params: Any, extras: Any, x: Any, d_out: Any) -> tuple[list, list, list]:
        out, vjp, metrics = jax.vjp(lambda params, x: f(params, extras, x), params, x, has_aux=True)
        dparams, dx = vjp(d_out)
        return jax.tree.leaves((out, metrics)), jax.tree.leaves(dx), jax.tree.leaves(dparams)

    params, extras, x = jax.tree.map(spec, (params, extras, x))
    _, (out, metrics) = jax.make_jaxpr(f, axis_env=axis_env, return_shape=True)(params, extras, x)
    closed = inlined(jax.make_jaxpr(joint, axis_env=axis_env)(params, extras, x, out), axis_env)
    num_in = [len(jax.tree.leaves(tree)) for tree in ((params, extras), x)]
    num_out = [len(jax.tree.leaves(tree)) for tree in ((out, metrics), x)]
    parts = partition(_label(closed, num_in, num_out))
    stash_shapes = Stashes(*(tuple(spec(var.aval) for var in stash) for stash in parts.stashes))
    trees = _Trees(*map(jax.tree.structure, (params, x, out, metrics)))
    return SplitStage(stash_shapes, parts, trees)


def _label(closed: ClosedJaxpr, num_in: Sequence[int], num_out: Sequence[int]) -> Joint:
    jaxpr = closed.jaxpr
    constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    inputs = [tuple(section) for section in _sections(jaxpr.invars, *num_in)]
    outputs = [tuple(section) for section in _sections(jaxpr.outvars, *num_out)]
    return Joint(constants, jaxpr.eqns, *inputs, *outputs)


def _sections(values: Sequence[Any], *sizes: int) -> list[Sequence[Any]]:
    """Divides ``values`` into sections of the given sizes, followed by the remainder."""
    ends = list(itertools.accumulate(sizes, initial=0))
    return [values[start:end] for start, end in itertools.pairwise([*ends, len(values)])]
