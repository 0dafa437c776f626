"""Minimum vertex cut of a graph: which values to keep between two operations."""

import math
from collections import defaultdict, deque
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)

_INSIDE, _OUTSIDE = "source", "sink"


def minimum_cut(
    weights: Mapping[Node, float],
    edges: Iterable[tuple[Node, Node]],
    sources: Collection[Node],
    sinks: Collection[Node],
) -> list[Node]:
    """The nodes of least total weight without which no path leads from a source to a sink.

    Max-flow by shortest augmenting paths (Edmonds and Karp) on the graph with every node split into an entry and an
    exit. Among cuts of equal weight it is the one nearest to the sinks.

    Args:
        weights: positive weight of every node; infinite for one that may not be cut.
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
    arcs += [(_INSIDE, (node, "in")) for node in sources] + [((node, "out"), _OUTSIDE) for node in sinks]
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
    came_from: dict = {_INSIDE: None}
    queue = deque([_INSIDE])
    while queue and _OUTSIDE not in came_from:
        tail = queue.popleft()
        for head, left in room[tail].items():
            if left > 0 and head not in came_from:
                came_from[head] = tail
                queue.append(head)
    path, head = [], _OUTSIDE
    while came_from.get(head) is not None:
        path.append((came_from[head], head))
        head = came_from[head]
    return path


def _leading_to_sink(room: Mapping) -> set:
    found, queue = {_OUTSIDE}, deque([_OUTSIDE])
    while queue:
        head = queue.popleft()
        for tail in room[head]:  # every arc has its reverse, so these are all the tails
            if room[tail][head] > 0 and tail not in found:
                found.add(tail)
                queue.append(tail)
    return found
