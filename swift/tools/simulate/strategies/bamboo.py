"""Bamboo (NSDI'23), with the throughputs and rules of Oobleck's artifact, which are those of Bamboo's simulator."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from swift.tools.simulate.strategies.published import MOST_NODES, Published, throughput
from swift.tools.simulate.strategies.strategy import Moment, Pace, Pause, Turn

STAGES = 12
"""Stages of a pipeline."""
SLOWDOWN = 1.5
"""Factor on an iteration's duration from a removal until stages are reassigned."""
GLOBAL_RENDEZVOUS_S = 30.0
"""Duration of the rendezvous after a fatal removal."""
MOST_AT_RISK = 0.05
"""Share of nodes whose loss would be fatal (twice those with two stages), above which stages are reassigned."""

_Place = tuple[int, int]


class _Assignment(NamedTuple):
    """Assignment of stages to nodes.

    Attributes:
        nodes: present nodes, in the order in which they joined.
        place_of: (pipeline, stage) of the running nodes.
        doubled: nodes that run their successor's stage as well.
        num_spare: number of spare nodes as Bamboo counts them: it does not notice that a spare node leaves.
        is_slow: True if a node has left since stages were assigned.
        num_assigned: number of nodes at that time, which determines the throughput.
    """

    nodes: tuple[str, ...]
    place_of: Mapping[str, _Place]
    doubled: frozenset[str]
    num_spare: int
    is_slow: bool
    num_assigned: int


@dataclass(frozen=True)
class Bamboo:
    """Every node also holds its successor's stage and runs both if the successor leaves; nothing is lost.

    A removal is fatal, and costs a global rendezvous and the current iteration, if the node runs two stages or its
    shadow is gone. At the end of the iteration stages are reassigned if there are as many spare nodes as doubled ones,
    if too many nodes are at risk, or if another pipeline fits. That takes a local rendezvous.

    Attributes:
        model: model with published figures; Bamboo must not run out of memory on it.
    """

    model: Published
    name = "bamboo"

    def __post_init__(self) -> None:
        assert self.model.bamboo is not None, "out of memory"

    @property
    def source(self) -> str:
        """Source of its figures."""
        return f"Oobleck's artifact: Bamboo's table for {self.model.name}, {MOST_NODES} nodes"

    @property
    def iteration_s(self) -> float:
        """Duration of an iteration on 30 nodes."""
        return self.model.samples / self._table[0]

    @property
    def samples(self) -> float:
        """Samples of an iteration, as published."""
        return self.model.samples

    def start(self, nodes: tuple[str, ...]) -> tuple[_Assignment, Turn]:
        """Starts with all nodes."""
        state = _assign(nodes)
        return state, Turn(self._pace(state))

    def change(self, state: _Assignment, moment: Moment) -> tuple[_Assignment, Turn | None]:
        """Absorbs removals or treats them as fatal, then may reassign stages."""
        after, is_fatal = state, False
        for node in moment.removed:
            after, fatal = _remove(after, node)
            is_fatal |= fatal
        after = after._replace(nodes=(*after.nodes, *moment.added), num_spare=after.num_spare + len(moment.added))
        local = Pause("reconfiguration", self.model.bamboo_rendezvous_s)
        if is_fatal or not moment.is_running:
            assigned = _assign(after.nodes)
            pace = self._pace(assigned)
            pause = Pause("reconfiguration", GLOBAL_RENDEZVOUS_S) if is_fatal else local
            return assigned, Turn(pace, "iteration", (pause,) if pace else ())
        # The current iteration slows down once, however many nodes leave.
        stretch = SLOWDOWN if moment.removed and not state.is_slow else 1.0
        if _is_reassigned(after):
            assigned = _assign(after.nodes)
            return assigned, Turn(self._pace(assigned), "nothing", (local,), stretch)
        if stretch == 1.0:
            return after, None
        return after, Turn(self._pace(after), "nothing", (), stretch)

    @property
    def _table(self) -> tuple[float, ...]:
        return self.model.bamboo or ()

    def _pace(self, state: _Assignment) -> Pace | None:
        rate = throughput(self._table, state.num_assigned)
        if not rate or not state.place_of:
            return None
        return Pace(self.model.samples / rate * (SLOWDOWN if state.is_slow else 1.0))


def _assign(nodes: tuple[str, ...]) -> _Assignment:
    """Assigns nodes, in order, to whole pipelines; the others are spare."""
    num_running = len(nodes) // STAGES * STAGES
    place_of = {node: divmod(index, STAGES) for index, node in enumerate(nodes[:num_running])}
    return _Assignment(nodes, place_of, frozenset(), len(nodes) - num_running, False, len(nodes))


def _remove(state: _Assignment, node: str) -> tuple[_Assignment, bool]:
    """Removes a node; also returns True if that is fatal."""
    left = state._replace(nodes=tuple(other for other in state.nodes if other != node), is_slow=True)
    if node not in state.place_of:
        return left, False
    place_of = {other: place for other, place in state.place_of.items() if other != node}
    left = left._replace(place_of=place_of, doubled=state.doubled - {node})
    pipeline, stage = state.place_of[node]
    shadows = [other for other, place in place_of.items() if place == (pipeline, (stage - 1) % STAGES)]
    if node in state.doubled or not shadows:
        return left, True
    return left._replace(doubled=left.doubled | {shadows[0]}), False


def _is_reassigned(state: _Assignment) -> bool:
    num_doubled, num_running = len(state.doubled), len(state.place_of)
    if num_doubled and (state.num_spare >= num_doubled or 2 * num_doubled > MOST_AT_RISK * num_running):
        return True
    return (num_running + state.num_spare) // STAGES > (num_running + num_doubled) // STAGES
