"""What a strategy is: how fast training goes with the nodes there are, and what a change of them costs."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

State: TypeAlias = Any
"""What a strategy remembers: frozen, or never changed in place."""


@dataclass(frozen=True)
class Saves:
    """When a state is saved, and when it can be restored.

    Attributes:
        every: iterations from one save to the next.
        stall_s: how long training waits for a save.
        lag: iterations after a save until it can be restored, for it is written behind training; at most ``every``.
        first: iterations until each of the first saves, where these are not ``every``.
        storage_every: iterations between saves to storage behind training, where ``every`` is of saves to memory.
    """

    every: int
    stall_s: float = 0.0
    lag: int = 0
    first: tuple[int, ...] = ()
    storage_every: int | None = None

    def __post_init__(self) -> None:
        assert min(self.every, *self.first, self.storage_every or 1) >= 1, self
        assert 0 <= self.lag <= self.every, self


@dataclass(frozen=True)
class Pace:
    """How training goes while nobody comes or goes.

    Attributes:
        iteration_s: of an iteration without saving.
        saves: None where nothing is saved.
    """

    iteration_s: float
    saves: Saves | None = None


class Pause(NamedTuple):
    """Training stands still.

    Attributes:
        cause: one of ``outcome.CAUSES``.
        seconds: how long.
    """

    cause: str
    seconds: float


@dataclass(frozen=True)
class Turn:
    """What a change of nodes does to training.

    Attributes:
        pace: after the pauses; None where training has to wait for nodes.
        loses: what has to be run again: ``nothing``, the iteration under way is finished first; ``iteration``, it is
            lost; ``checkpoint``, all since the newest save is; ``storage``, all since the newest save to storage is.
        pauses: one after the other. Those of the turn before are over where something is lost, else they come first.
        stretch: how much longer the rest of the iteration under way takes where nothing is lost.
        saved: the state is saved before the pauses; ``pauses`` says how long that takes.
        waits_for: the cause that is told where there is no pace.
    """

    pace: Pace | None
    loses: Literal["nothing", "iteration", "checkpoint", "storage"] = "nothing"
    pauses: tuple[Pause, ...] = ()
    stretch: float = 1.0
    saved: bool = False
    waits_for: str = "waiting"


class Moment(NamedTuple):
    """What a strategy is told of a change of nodes.

    Attributes:
        removed: nodes that go.
        added: nodes that come, or that have gone and come back at once.
        iterations_run: since the beginning, those that were lost included.
        iterations_kept: since the beginning.
        is_running: whether iterations are being run, and training neither pauses nor waits.
    """

    removed: tuple[str, ...]
    added: tuple[str, ...]
    iterations_run: int
    iterations_kept: int
    is_running: bool


class Strategy(Protocol):
    """A way to train on nodes that come and go: a frozen dataclass with two pure functions."""

    @property
    def name(self) -> str:
        """As the command line has it."""

    @property
    def source(self) -> str:
        """Whose figures it follows."""

    @property
    def iteration_s(self) -> float:
        """Time of an iteration while all nodes that it can use are there: what goodput is measured against."""

    @property
    def samples(self) -> float | None:
        """Samples of an iteration, where they are known."""

    def start(self, nodes: tuple[str, ...]) -> tuple[State, Turn]:
        """The state with these nodes, and how training begins."""

    def change(self, state: State, moment: Moment) -> tuple[State, Turn | None]:
        """The state after a change, and what it does to training; None where it does nothing."""
