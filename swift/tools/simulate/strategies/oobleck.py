"""Oobleck (SOSP'23) and Varuna (EuroSys'22) by the throughputs and costs that Oobleck's artifact publishes."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from swift.tools.simulate.strategies.published import MOST_NODES, Published, throughput
from swift.tools.simulate.strategies.strategy import Moment, Pace, Pause, Saves, Turn

VARUNA_EVERY = 10
"""Iterations between Varuna's checkpoints."""


class _Nodes(NamedTuple):
    """Nodes that train, and those that came since the last reconfiguration."""

    live: int
    waiting: int = 0


def _paced(model: Published, table: tuple[float, ...], live: int, saves: Saves | None = None) -> Turn:
    """How training goes with so many nodes."""
    rate = throughput(table, live)
    if not rate:
        return Turn(None, waits_for="waiting" if rate is None else "out_of_memory")
    return Turn(Pace(model.samples / rate, saves))


def _after(state: _Nodes, moment: Moment) -> _Nodes:
    """Who comes waits for the next reconfiguration, as in the artifact; that is at once where training stands still."""
    live, waiting = state.live - len(moment.removed), state.waiting + len(moment.added)
    if moment.removed or not moment.is_running:
        return _Nodes(live + waiting)
    return _Nodes(live, waiting)


@dataclass(frozen=True)
class Oobleck:
    """Pipelines are put together anew from templates after every removal; the iteration under way is lost.

    Attributes:
        model: whose published figures count.
    """

    model: Published
    name = "oobleck"

    @property
    def source(self) -> str:
        """Whose figures it follows."""
        return f"Oobleck's artifact: its table for {self.model.name}, {MOST_NODES} nodes"

    @property
    def iteration_s(self) -> float:
        """Of 30 nodes."""
        return self.model.samples / self.model.oobleck[0]

    @property
    def samples(self) -> float:
        """Published."""
        return self.model.samples

    def start(self, nodes: tuple[str, ...]) -> tuple[_Nodes, Turn]:
        """With all nodes."""
        return _Nodes(len(nodes)), _paced(self.model, self.model.oobleck, len(nodes))

    def change(self, state: _Nodes, moment: Moment) -> tuple[_Nodes, Turn | None]:
        """A reconfiguration at each removal."""
        nodes = _after(state, moment)
        if nodes.waiting:
            return nodes, None
        turn = _paced(self.model, self.model.oobleck, nodes.live)
        pauses = (Pause("reconfiguration", self.model.oobleck_reconfiguration_s),) if turn.pace else ()
        return nodes, replace(turn, loses="iteration", pauses=pauses)


@dataclass(frozen=True)
class Varuna:
    """Training goes back to the newest checkpoint after every removal, and is cut anew for the nodes that are left.

    As in the artifact every tenth iteration that is run is followed by a checkpoint, and so is the first one after a
    restart; a restart takes as long as is published, less the time of a checkpoint. In the artifact, iterations go on
    while a restart is under way, and count; here they do not.

    Attributes:
        model: whose published figures count.
    """

    model: Published
    name = "varuna"

    @property
    def source(self) -> str:
        """Whose figures it follows."""
        return f"Oobleck's artifact: Varuna's table for {self.model.name}, {MOST_NODES} nodes"

    @property
    def iteration_s(self) -> float:
        """Of 30 nodes."""
        return self.model.samples / self.model.varuna[0]

    @property
    def samples(self) -> float:
        """Published."""
        return self.model.samples

    def start(self, nodes: tuple[str, ...]) -> tuple[_Nodes, Turn]:
        """With all nodes."""
        saves = Saves(VARUNA_EVERY, self.model.varuna_save_s)
        return _Nodes(len(nodes)), _paced(self.model, self.model.varuna, len(nodes), saves)

    def change(self, state: _Nodes, moment: Moment) -> tuple[_Nodes, Turn | None]:
        """A restart at each removal."""
        nodes, model = _after(state, moment), self.model
        if nodes.waiting:
            return nodes, None
        until_tenth = VARUNA_EVERY - (moment.iterations_run + 1) % VARUNA_EVERY
        saves = Saves(VARUNA_EVERY, model.varuna_save_s, first=(1, until_tenth))
        turn = _paced(model, model.varuna, nodes.live, saves)
        pauses = (Pause("reconfiguration", model.varuna_restart_s - model.varuna_save_s),) if turn.pace else ()
        return nodes, replace(turn, loses="checkpoint", pauses=pauses)
