"""Oobleck (SOSP'23) and Varuna (EuroSys'22), with the throughputs and costs published in Oobleck's artifact."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from swift.tools.simulate.strategies.published import MOST_NODES, Published, throughput
from swift.tools.simulate.strategies.strategy import Moment, Pace, Pause, Saves, Turn

VARUNA_EVERY = 10
"""Iterations between Varuna's checkpoints."""


class _Nodes(NamedTuple):
    """Number of training nodes, and of those that joined since the last reconfiguration."""

    live: int
    waiting: int = 0


def _paced(model: Published, table: tuple[float, ...], live: int, saves: Saves | None = None) -> Turn:
    """Makes the turn for a number of training nodes."""
    rate = throughput(table, live)
    if not rate:
        return Turn(None, waits_for="waiting" if rate is None else "out_of_memory")
    return Turn(Pace(model.samples / rate, saves))


def _after(state: _Nodes, moment: Moment) -> _Nodes:
    """Applies a change: new nodes wait for the next reconfiguration, as in the artifact, unless training is stopped."""
    live, waiting = state.live - len(moment.removed), state.waiting + len(moment.added)
    if moment.removed or not moment.is_running:
        return _Nodes(live + waiting)
    return _Nodes(live, waiting)


@dataclass(frozen=True)
class Oobleck:
    """Pipelines are rebuilt from templates after every removal; the current iteration is lost.

    Attributes:
        model: model with published figures.
    """

    model: Published
    name = "oobleck"

    @property
    def source(self) -> str:
        """Source of its figures."""
        return f"Oobleck's artifact: its table for {self.model.name}, {MOST_NODES} nodes"

    @property
    def iteration_s(self) -> float:
        """Duration of an iteration on 30 nodes."""
        return self.model.samples / self.model.oobleck[0]

    @property
    def samples(self) -> float:
        """Samples of an iteration, as published."""
        return self.model.samples

    def start(self, nodes: tuple[str, ...]) -> tuple[_Nodes, Turn]:
        """Starts with all nodes."""
        return _Nodes(len(nodes)), _paced(self.model, self.model.oobleck, len(nodes))

    def change(self, state: _Nodes, moment: Moment) -> tuple[_Nodes, Turn | None]:
        """Reconfigures at each removal."""
        nodes = _after(state, moment)
        if nodes.waiting:
            return nodes, None
        turn = _paced(self.model, self.model.oobleck, nodes.live)
        pauses = (Pause("reconfiguration", self.model.oobleck_reconfiguration_s),) if turn.pace else ()
        return nodes, replace(turn, loses="iteration", pauses=pauses)


@dataclass(frozen=True)
class Varuna:
    """Training returns to the newest checkpoint after every removal, repartitioned for the remaining nodes.

    As in the artifact, every tenth iteration is followed by a checkpoint, and so is the first one after a restart; a
    restart takes the published time less that of a checkpoint. In the artifact, iterations continue during a restart
    and count; here they do not.

    Attributes:
        model: model with published figures.
    """

    model: Published
    name = "varuna"

    @property
    def source(self) -> str:
        """Source of its figures."""
        return f"Oobleck's artifact: Varuna's table for {self.model.name}, {MOST_NODES} nodes"

    @property
    def iteration_s(self) -> float:
        """Duration of an iteration on 30 nodes."""
        return self.model.samples / self.model.varuna[0]

    @property
    def samples(self) -> float:
        """Samples of an iteration, as published."""
        return self.model.samples

    def start(self, nodes: tuple[str, ...]) -> tuple[_Nodes, Turn]:
        """Starts with all nodes."""
        saves = Saves(VARUNA_EVERY, self.model.varuna_save_s)
        return _Nodes(len(nodes)), _paced(self.model, self.model.varuna, len(nodes), saves)

    def change(self, state: _Nodes, moment: Moment) -> tuple[_Nodes, Turn | None]:
        """Restarts at each removal."""
        nodes, model = _after(state, moment), self.model
        if nodes.waiting:
            return nodes, None
        until_tenth = VARUNA_EVERY - (moment.iterations_run + 1) % VARUNA_EVERY
        saves = Saves(VARUNA_EVERY, model.varuna_save_s, first=(1, until_tenth))
        turn = _paced(model, model.varuna, nodes.live, saves)
        pauses = (Pause("reconfiguration", model.varuna_restart_s - model.varuna_save_s),) if turn.pace else ()
        return nodes, replace(turn, loses="checkpoint", pauses=pauses)
