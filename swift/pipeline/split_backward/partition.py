"""Partition of a stage's equations, gradient included, into F, B and W, and the values kept between them.

Equations are costly (matmuls, collectives, loops, sorts) or cheap (elementwise, reductions, gathers, reshapes). Every
costly equation runs only once, and subject to that, as few bytes as possible are kept. So a value may be recomputed
from kept values, but only by cheap equations: for example a GELU's output from its input, which B needs anyway. This
takes two minimum vertex cuts: through the values between B and W, then through the values between F and both. Values
that depend on parameters and extras alone are recomputed wherever they are read, and the gradient of a norm's weights,
a short vector, belongs to B.
"""

import math
from collections import defaultdict, deque
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from jax.extend.core import JaxprEqn, Var, jaxprs_in_params

from swift.pipeline.split_backward.equations import (
    CUDNN_ATTENTION,
    EquationGroup,
    dependent,
    needed,
    num_bytes,
    variables,
)

# Loops, branches, scatters and kernels are costly, too; they are recognized by the jaxpr in their parameters.
_COSTLY = frozenset(
    {
        *("dot_general", "ragged_dot_general", "conv_general_dilated"),
        *("psum", "pmax", "pmin", "all_to_all", "all_gather", "reduce_scatter", "ppermute", "ragged_all_to_all"),
        *("sort", "top_k", "argmax", "argmin", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"),
        *("random_bits", "threefry2x32", "cholesky", "triangular_solve", "ffi_call"),
        *CUDNN_ATTENTION,
    }
)
_Node = TypeVar("_Node", bound=Hashable)
_SOURCE, _SINK = "source", "sink"
"""Terminals of the graph to cut, before all sources and after all sinks."""


@dataclass(frozen=True)
class Joint:
    """Forward and backward of a stage as one jaxpr, with variables grouped by meaning.

    Attributes:
        constants: values of the variables that tracing found constant.
        equations: equations without wrappers, in order.
        params_and_extras: parameters and extras, inputs of each of F, B and W.
        x: input.
        d_out: cotangent of the differentiated output.
        results: output and metrics.
        dx: cotangent of the input.
        dparams: gradient of the parameters.
    """

    constants: dict[Var, Any]
    equations: Sequence[JaxprEqn]
    params_and_extras: tuple[Var, ...]
    x: tuple[Var, ...]
    d_out: tuple[Var, ...]
    results: tuple[Any, ...]
    dx: tuple[Any, ...]
    dparams: tuple[Any, ...]


class Stashes(NamedTuple):
    """One entry for each of the three stashes between F, B and W: the stashed arrays, their shapes, or a slot."""

    for_b: Any  # written by F, read by B alone
    for_b_and_w: Any  # written by F, read by W; B may read it, too
    for_w: Any  # written by B, read by W


class Partition(NamedTuple):
    """Parts F, B and W, and the stashes between them; comments give the order of each part's inputs and results."""

    forward: EquationGroup  # parameters and extras, x -> results, stashes for_b and for_b_and_w
    backward_input: EquationGroup  # parameters and extras, stashes for_b and for_b_and_w, d_out -> dx, stash for_w
    backward_weight: EquationGroup  # parameters and extras, stashes for_b_and_w and for_w -> dparams
    stashes: Stashes  # tuple[Var, ...] each


def partition(joint: Joint) -> Partition:
    """Assigns every equation to F, B or W; a cheap equation may be assigned to several of them."""
    late = _late_variables(joint)
    late_equations = [e for e in joint.equations if not late.isdisjoint(e.outvars)]
    early_equations = [e for e in joint.equations if late.isdisjoint(e.outvars)]
    stash_for_w = _cut_before_w(joint, late_equations)
    b_outputs = (*joint.dx, *stash_for_w)
    _, read_by_b = needed(late_equations, b_outputs)
    _, read_by_w = needed(late_equations, joint.dparams, stash_for_w)
    f_stash = _cut_after_f(joint, early_equations, read_by_b | read_by_w)

    w_equations, read_by_w = needed(joint.equations, joint.dparams, (*f_stash, *stash_for_w))
    stash_for_b = tuple(var for var in f_stash if var not in read_by_w)
    stash_for_b_and_w = tuple(var for var in f_stash if var in read_by_w)
    f_outputs = (*joint.results, *stash_for_b, *stash_for_b_and_w)
    f_equations, _ = needed(joint.equations, f_outputs)
    b_equations, _ = needed(joint.equations, b_outputs, f_stash)
    b_inputs = (*joint.params_and_extras, *stash_for_b, *stash_for_b_and_w, *joint.d_out)
    return Partition(
        EquationGroup(joint.constants, (*joint.params_and_extras, *joint.x), f_equations, f_outputs),
        EquationGroup(joint.constants, b_inputs, b_equations, b_outputs),
        EquationGroup(
            joint.constants, (*joint.params_and_extras, *stash_for_b_and_w, *stash_for_w), w_equations, joint.dparams
        ),
        Stashes(stash_for_b, stash_for_b_and_w, stash_for_w),
    )


def _is_costly(equation: JaxprEqn) -> bool:
    return equation.primitive.name in _COSTLY or any(True for _ in jaxprs_in_params(equation.params))


def _outputs(equations: Iterable[JaxprEqn]) -> list[Var]:
    return [var for equation in equations for var in equation.outvars]


def _late_variables(joint: Joint) -> set[Var]:
    """Returns variables computed after F: from the cotangent, or from a matmul of F that a ``checkpoint`` repeats."""
    in_forward = set(map(id, needed(joint.equations, joint.results)[0]))
    repeated = [e for e in joint.equations if _is_costly(e) and id(e) not in in_forward]
    return dependent(joint.equations, [*joint.d_out, *_outputs(repeated)])


def _cut_before_w(joint: Joint, equations: Sequence[JaxprEqn]) -> tuple[Var, ...]:
    """Chooses W's stash: the values from B, as few bytes as possible, that spare W all costly equations of B."""
    costly = [e for e in equations if _is_costly(e)]
    from_d_out = dependent(equations, joint.d_out)
    repeated = [e for e in costly if from_d_out.isdisjoint(e.outvars)]
    in_b = set(map(id, needed(equations, (*joint.dx, *_outputs(repeated)))[0]))
    w_equations, _ = needed(equations, joint.dparams)
    in_w = [e for e in w_equations if _is_costly(e) and id(e) not in in_b]
    return _cut(
        equations=[e for e in w_equations if not _is_costly(e)],
        among=[*joint.d_out, *_outputs(equations)],
        never=dependent(equations, _outputs(in_w)),
        sources=[*joint.d_out, *_outputs(e for e in costly if id(e) in in_b)],
        sinks=[*joint.dparams, *(var for e in in_w for var in e.invars)],
    )


def _cut_after_f(joint: Joint, equations: Sequence[JaxprEqn], read: set[Var]) -> tuple[Var, ...]:
    """Chooses F's stashes: the values, as few bytes as possible, that spare B and W all costly equations of F."""
    return _cut(
        equations=[e for e in equations if not _is_costly(e)],
        among=[*joint.x, *_outputs(equations)],
        never=set(),
        sources=[*joint.x, *_outputs(e for e in equations if _is_costly(e))],
        sinks=read,
    )


def _cut(
    equations: Sequence[JaxprEqn], among: Sequence[Var], never: set[Var], sources: Iterable[Var], sinks: Iterable[Any]
) -> tuple[Var, ...]:
    """Returns the lightest variables ``among`` that cut every path of ``equations`` from the sources to the sinks."""
    # An empty array needs a positive weight, too; otherwise a path through it would already count as cut.
    weights = {var: math.inf if var in never else max(num_bytes(var.aval), 1) for var in among}
    edges = [(a, b) for e in equations for a in variables(e.invars) if a in weights for b in e.outvars]
    sinks = {var for var in variables(sinks) if var in weights}
    return tuple(minimum_cut(weights, edges, dict.fromkeys(sources), sinks))


def minimum_cut(
    weights: Mapping[_Node, float],
    edges: Iterable[tuple[_Node, _Node]],
    sources: Collection[_Node],
    sinks: Collection[_Node],
) -> list[_Node]:
    """Finds the nodes of least total weight whose removal leaves no path from a source to a sink.

    Max-flow by shortest augmenting paths (Edmonds and Karp) on the graph with every node split into an entry and an
    exit. Among cuts of equal weight the one nearest to the sinks is returned.

    Args:
        weights: positive weight of every node; infinite for a node that may not be cut.
        edges: pairs (from, to).
        sources: nodes where paths begin; may be cut.
        sinks: nodes where paths end; may be cut.

    Returns:
        The nodes of the cut, in the order of ``weights``.

    >>> minimum_cut({"x": 4, "a": 1, "b": 2, "y": 4}, [("x", "a"), ("x", "b"), ("a", "y"), ("b", "y")], ["x"], ["y"])
    ['a', 'b']
    """
    room: dict = defaultdict(lambda: defaultdict(float))  # residual capacity of every arc
    for node, weight in weights.items():
        room[node, "in"][node, "out"] = weight
    arcs: list[tuple] = [((a, "out"), (b, "in")) for a, b in edges]
    arcs += [(_SOURCE, (node, "in")) for node in sources] + [((node, "out"), _SINK) for node in sinks]
    for tail, head in arcs:
        room[tail][head] = math.inf
    for tail in list(room):
        for head in list(room[tail]):
            room[head].setdefault(tail, 0.0)

    while path := _shortest_path(room):
        flow = min(room[tail][head] for tail, head in path)
        assert flow < math.inf, "a path that cannot be cut"
        for tail, head in path:
            room[tail][head] -= flow
            room[head][tail] += flow

    leads_out = _leading_to_sink(room)
    return [node for node in weights if (node, "out") in leads_out and (node, "in") not in leads_out]


def _shortest_path(room: Mapping) -> list[tuple]:
    came_from: dict = {_SOURCE: None}
    queue = deque([_SOURCE])
    while queue and _SINK not in came_from:
        tail = queue.popleft()
        for head, left in room[tail].items():
            if left > 0 and head not in came_from:
                came_from[head] = tail
                queue.append(head)
    path, head = [], _SINK
    while came_from.get(head) is not None:
        path.append((came_from[head], head))
        head = came_from[head]
    return path


def _leading_to_sink(room: Mapping) -> set:
    reached, queue = {_SINK}, deque([_SINK])
    while queue:
        head = queue.popleft()
        for tail in room[head]:  # every arc has its reverse, so these are all the tails
            if room[tail][head] > 0 and tail not in reached:
                reached.add(tail)
                queue.append(tail)
    return reached
