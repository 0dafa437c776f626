"""Oobleck (SOSP'23), Varuna (EuroSys'22) and Bamboo (NSDI'23), with published throughputs and failure costs.

The figures come from the simulators in Oobleck's artifact (github.com/SymbioticLab/Oobleck, tools/simulator):
throughput in samples/s for 30 nodes down to 15, and the costs of a failure. Nothing else is taken from there. The
artifact simulates Bamboo by the rules of Bamboo's own simulator.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from swift.errors import SettingError
from swift.simulate.strategies import ClusterChange, Decision, IterationTiming, Pause, Saves

MOST_NODES, FEWEST_NODES = 30, 15
_GROUPS = (1, 6, 6, 3)
"""Sizes of the groups of 30, 29 to 24, 23 to 18 and 17 to 15 nodes, within which Bamboo's throughput is constant."""

_VARUNA_EVERY = 10
"""Number of iterations between Varuna's checkpoints."""

_STAGES = 12
"""Number of stages of a pipeline in Bamboo's simulator."""
SLOWDOWN = 1.5
"""Factor on the duration of Bamboo's iterations from a removal until stages are reassigned."""
GLOBAL_RENDEZVOUS_S = 30.0
"""Duration of Bamboo's global rendezvous after a fatal removal, in seconds."""
_MOST_AT_RISK = 0.05
"""Largest fraction of running nodes whose loss may be fatal; above it Bamboo reassigns stages.

Two nodes are at risk for each node that runs two stages."""

_Place = tuple[int, int]


@dataclass(frozen=True)
class Published:
    """Published figures of one model.

    Attributes:
        name: name of the model.
        samples: samples per iteration.
        oobleck: throughput in samples/s for 30, 29, ..., 15 nodes; 0 where the model does not fit.
        oobleck_reconfiguration_s: duration of the reconfiguration after every removal, in seconds.
        varuna: throughput, as for Oobleck.
        varuna_save_s: time that training waits for a checkpoint, in seconds.
        varuna_restart_s: time from a removal until training resumes, plus the duration of a checkpoint, in seconds.
        bamboo: throughput, as for Oobleck; None if the model runs out of memory.
        bamboo_rendezvous_s: duration of the local rendezvous that reassigns stages, in seconds.
    """

    name: str
    samples: float
    oobleck: tuple[float, ...]
    oobleck_reconfiguration_s: float
    varuna: tuple[float, ...]
    varuna_save_s: float
    varuna_restart_s: float
    bamboo: tuple[float, ...] | None
    bamboo_rendezvous_s: float

    def __post_init__(self) -> None:
        for table in (self.oobleck, self.varuna, self.bamboo):
            assert table is None or len(table) == MOST_NODES - FEWEST_NODES + 1, self.name


def throughput(table: tuple[float, ...], num_nodes: int) -> float | None:
    """Returns the throughput in samples/s, or None for fewer than 15 nodes. More than 30 nodes count as 30."""
    index = MOST_NODES - min(num_nodes, MOST_NODES)
    return table[index] if index < len(table) else None


def published(name: str) -> Published:
    """Returns the published figures for the model with this name.

    Raises:
        SettingError: there are no published figures for the model.
    """
    if name not in MODELS:
        raise SettingError("model", name, f"is not a known model; choose one of {', '.join(MODELS)}")
    return MODELS[name]


def _bamboo(per_group: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(value for value, count in zip(per_group, _GROUPS, strict=True) for _ in range(count))


# fmt: off
_ALL = (
    Published(
        "bert-large", 8192,
        (368.25, 362.22, 328.35, 327.78, 329.14, 307.21, 304.45, 278.53,
         285.84, 260.31, 261.68, 243.56, 228.05, 209.21, 214.80, 192.30), 2,
        (343.13, 331.70, 329.58, 326.54, 306.04, 298.38, 290.04, 280.07,
         267.90, 255.72, 243.54, 232.95, 222.37, 211.78, 202.57, 193.36), 15.8, 76,
        _bamboo((119.25, 99.379, 74.534, 49.689)), 76,
    ),
    Published(
        "gpt-2", 1024,
        (110.01, 109.67, 98.837, 100.07, 99.480, 91.018, 90.522, 83.404,
         83.331, 76.950, 76.715, 71.587, 66.750, 63.016, 62.748, 55.916), 2,
        (125.79, 117.63, 117.63, 106.83, 110.92, 102.08, 102.08, 96.654,
         96.654, 85.834, 88.311, 78.311, 78.311, 70.464, 70.464, 64.299), 11.5, 83,
        _bamboo((27.030, 22.525, 16.893, 11.262)), 80,
    ),
    Published(
        "gpt3-medium", 819,
        (38.468, 37.186, 35.904, 34.622, 33.339, 31.666, 30.241, 28.964,
         27.775, 26.685, 25.689, 23.825, 23.034, 21.577, 20.865, 19.103), 3,
        (41.998, 38.886, 38.886, 35.850, 33.426, 33.426, 33.426, 28.264,
         28.264, 28.264, 28.232, 25.261, 25.261, 22.889, 22.889, 20.912), 11.2, 78.7,
        None, 100,
    ),
    Published(
        "gpt3-2.7b", 512,
        (9.2143, 8.9072, 8.6000, 8.2929, 7.9857, 7.6271, 7.5123, 7.4354,
         7.0528, 6.7048, 6.7973, 6.1050, 6.1151, 5.6307, 5.6306, 5.1307), 6,
        (9.7675, 9.4247, 9.4247, 9.0999, 9.0999, 9.0999, 9.0999, 7.4697,
         7.4697, 7.4697, 7.4697, 6.4246, 6.4246, 6.4246, 6.4246, 4.8638), 50, 515,
        None, 230,
    ),
    Published(
        "gpt3-6.7b", 1024,
        (5.5078, 5.3242, 5.1406, 4.9570, 4.7734, 4.8088, 4.3299, 4.1852,
         3.9472, 4.0109, 4.1544, 3.7123, 3.5933, 3.2840, 3.5309, 0.0), 10,
        (5.2406, 5.2406, 5.2406, 5.0969, 5.0969, 5.0969, 5.0969, 4.5034,
         4.5034, 4.5034, 4.5034, 3.9538, 3.9538, 3.9538, 3.9538, 3.0164), 120, 701,
        None, 450,
    ),
)
# fmt: on
MODELS: Mapping[str, Published] = {model.name: model for model in _ALL}


class _Nodes(NamedTuple):
    """Numbers of nodes.

    Attributes:
        live: nodes that train.
        waiting: nodes that have joined, which the next reconfiguration will include.
    """

    live: int
    waiting: int = 0


def _paced(model: Published, table: tuple[float, ...], live: int, saves: Saves | None = None) -> Decision:
    """Decides, for ``live`` training nodes, whether to train at the published pace for that number or to wait."""
    rate = throughput(table, live)
    if not rate:
        return Decision(None, waits_for="waiting" if rate is None else "out_of_memory")
    return Decision(IterationTiming(model.samples / rate, saves))


def _after(state: _Nodes, moment: ClusterChange) -> _Nodes:
    """Counts the nodes after a change.

    As in the artifact, new nodes wait for the next reconfiguration unless training has stopped.
    """
    live, waiting = state.live - len(moment.removed), state.waiting + len(moment.added)
    if moment.removed or not moment.is_running:
        return _Nodes(live + waiting)
    return _Nodes(live, waiting)


@dataclass(frozen=True)
class Oobleck:
    """Oobleck, which rebuilds pipelines from templates after every removal; the current iteration is lost.

    Attributes:
        model: model with published figures.
    """

    model: Published
    name = "oobleck"

    @property
    def source(self) -> str:
        """Source of its figures, for the report."""
        return f"Oobleck's artifact: its table for {self.model.name}, {MOST_NODES} nodes"

    @property
    def iteration_s(self) -> float:
        """Duration of an iteration on 30 nodes."""
        return self.model.samples / self.model.oobleck[0]

    @property
    def samples(self) -> float:
        """Samples per iteration, as published."""
        return self.model.samples

    def start(self, nodes: tuple[str, ...]) -> tuple[_Nodes, Decision]:
        """Starts with all nodes."""
        return _Nodes(len(nodes)), _paced(self.model, self.model.oobleck, len(nodes))

    def change(self, state: _Nodes, moment: ClusterChange) -> tuple[_Nodes, Decision | None]:
        """Reconfigures after every removal; new nodes alone change nothing while training runs."""
        nodes = _after(state, moment)
        if nodes.waiting:
            return nodes, None
        decision = _paced(self.model, self.model.oobleck, nodes.live)
        pauses = (Pause("reconfiguration", self.model.oobleck_reconfiguration_s),) if decision.pace else ()
        return nodes, replace(decision, loses="iteration", pauses=pauses)


@dataclass(frozen=True)
class Varuna:
    """Varuna, which returns to the newest checkpoint after every removal and re-partitions for the remaining nodes.

    As in the artifact, a checkpoint follows every tenth iteration and the first iteration after a restart. A restart
    takes the published time minus the duration of a checkpoint. In the artifact, iterations continue during a restart
    and count; here they do not.

    Attributes:
        model: model with published figures.
    """

    model: Published
    name = "varuna"

    @property
    def source(self) -> str:
        """Source of its figures, for the report."""
        return f"Oobleck's artifact: Varuna's table for {self.model.name}, {MOST_NODES} nodes"

    @property
    def iteration_s(self) -> float:
        """Duration of an iteration on 30 nodes."""
        return self.model.samples / self.model.varuna[0]

    @property
    def samples(self) -> float:
        """Samples per iteration, as published."""
        return self.model.samples

    def start(self, nodes: tuple[str, ...]) -> tuple[_Nodes, Decision]:
        """Starts with all nodes."""
        saves = Saves(_VARUNA_EVERY, self.model.varuna_save_s)
        return _Nodes(len(nodes)), _paced(self.model, self.model.varuna, len(nodes), saves)

    def change(self, state: _Nodes, moment: ClusterChange) -> tuple[_Nodes, Decision | None]:
        """Restarts after every removal; new nodes alone change nothing while training runs."""
        nodes, model = _after(state, moment), self.model
        if nodes.waiting:
            return nodes, None
        until_tenth = _VARUNA_EVERY - (moment.iterations_run + 1) % _VARUNA_EVERY
        saves = Saves(_VARUNA_EVERY, model.varuna_save_s, first=(1, until_tenth))
        decision = _paced(model, model.varuna, nodes.live, saves)
        pauses = (Pause("reconfiguration", model.varuna_restart_s - model.varuna_save_s),) if decision.pace else ()
        return nodes, replace(decision, loses="checkpoint", pauses=pauses)


class _Assignment(NamedTuple):
    """Assignment of stages to nodes.

    Attributes:
        nodes: present nodes, in the order in which they joined.
        place_of: (pipeline, stage) of each running node.
        doubled: nodes that also run their successor's stage.
        num_spare: number of spare nodes as Bamboo counts them; the count ignores spare nodes that leave.
        is_slow: whether a node has left since stages were assigned.
        num_assigned: number of nodes when stages were assigned, which determines the throughput.
    """

    nodes: tuple[str, ...]
    place_of: Mapping[str, _Place]
    doubled: frozenset[str]
    num_spare: int
    is_slow: bool
    num_assigned: int


@dataclass(frozen=True)
class Bamboo:
    """Bamboo, whose nodes also hold their successor's stage, and run both stages if the successor leaves.

    A removal is fatal if the node runs two stages, or if the node that shadows it has left. A fatal removal costs a
    global rendezvous and the current iteration; otherwise nothing is lost. Without a fatal removal, stages are
    reassigned at the end of the iteration if there are at least as many spare nodes as nodes that run two stages, if
    too many nodes are at risk, or if the nodes fill another pipeline. Reassigning takes a local rendezvous.

    Attributes:
        model: model with published figures; Bamboo must not run out of memory on it.
    """

    model: Published
    name = "bamboo"

    def __post_init__(self) -> None:
        assert self.model.bamboo is not None, "out of memory"

    @property
    def source(self) -> str:
        """Source of its figures, for the report."""
        return f"Oobleck's artifact: Bamboo's table for {self.model.name}, {MOST_NODES} nodes"

    @property
    def iteration_s(self) -> float:
        """Duration of an iteration on 30 nodes."""
        return self.model.samples / self._table[0]

    @property
    def samples(self) -> float:
        """Samples per iteration, as published."""
        return self.model.samples

    def start(self, nodes: tuple[str, ...]) -> tuple[_Assignment, Decision]:
        """Starts with all nodes."""
        state = _assign(nodes)
        return state, Decision(self._pace(state))

    def change(self, state: _Assignment, moment: ClusterChange) -> tuple[_Assignment, Decision | None]:
        """Decides whether removals are fatal, and whether to reassign stages."""
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
            return assigned, Decision(pace, "iteration", (pause,) if pace else ())
        # The current iteration slows down once, however many nodes leave.
        stretch = SLOWDOWN if moment.removed and not state.is_slow else 1.0
        if _is_reassigned(after):
            assigned = _assign(after.nodes)
            return assigned, Decision(self._pace(assigned), "nothing", (local,), stretch)
        if stretch == 1.0:
            return after, None
        return after, Decision(self._pace(after), "nothing", (), stretch)

    @property
    def _table(self) -> tuple[float, ...]:
        return self.model.bamboo or ()

    def _pace(self, state: _Assignment) -> IterationTiming | None:
        rate = throughput(self._table, state.num_assigned)
        if not rate or not state.place_of:
            return None
        return IterationTiming(self.model.samples / rate * (SLOWDOWN if state.is_slow else 1.0))


def _assign(nodes: tuple[str, ...]) -> _Assignment:
    """Assigns nodes, in order, to complete pipelines; the remaining nodes are spare."""
    num_running = len(nodes) // _STAGES * _STAGES
    place_of = {node: divmod(index, _STAGES) for index, node in enumerate(nodes[:num_running])}
    return _Assignment(nodes, place_of, frozenset(), len(nodes) - num_running, False, len(nodes))


def _remove(state: _Assignment, node: str) -> tuple[_Assignment, bool]:
    """Removes a node from an assignment; also returns whether the removal is fatal."""
    left = state._replace(nodes=tuple(other for other in state.nodes if other != node), is_slow=True)
    if node not in state.place_of:
        return left, False
    place_of = {other: place for other, place in state.place_of.items() if other != node}
    left = left._replace(place_of=place_of, doubled=state.doubled - {node})
    pipeline, stage = state.place_of[node]
    shadows = [other for other, place in place_of.items() if place == (pipeline, (stage - 1) % _STAGES)]
    if node in state.doubled or not shadows:
        return left, True
    return left._replace(doubled=left.doubled | {shadows[0]}), False


def _is_reassigned(state: _Assignment) -> bool:
    num_doubled, num_running = len(state.doubled), len(state.place_of)
    if num_doubled and (state.num_spare >= num_doubled or 2 * num_doubled > _MOST_AT_RISK * num_running):
        return True
    return (num_running + state.num_spare) // _STAGES > (num_running + num_doubled) // _STAGES
