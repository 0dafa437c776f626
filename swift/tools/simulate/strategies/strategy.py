"""Interface of strategies: the pace of training with the present nodes, and the cost of a change."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

State: TypeAlias = Any
"""State of a strategy: frozen, or never changed in place."""


@dataclass(frozen=True)
class Saves:
    """Times at which the state is saved, and at which it can be restored.

    Attributes:
        every: iterations between saves.
        stall_s: time that training waits for a save.
        lag: iterations after a save until it can be restored, as it is written in the background; at most ``every``.
        first: iterations until each of the first saves, where these differ from ``every``.
        storage_every: iterations between background saves to storage, if ``every`` refers to saves to memory.
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
    """Pace of training between changes of nodes.

    Attributes:
        iteration_s: duration of an iteration without saving.
        saves: saves; None if nothing is saved.
    """

    iteration_s: float
    saves: Saves | None = None


class Pause(NamedTuple):
    """Interruption of training.

    Attributes:
        cause: one of ``outcome.CAUSES``.
        seconds: duration.
    """

    cause: str
    seconds: float


@dataclass(frozen=True)
class Turn:
    """Effect of a change of nodes on training.

    Attributes:
        pace: pace after the pauses; None if training has to wait for nodes.
        loses: progress that is lost: ``nothing``, the current iteration is finished first; ``iteration``, the current
            iteration; ``checkpoint``, everything since the newest save; ``storage``, everything since the newest save
            to storage.
        pauses: consecutive pauses. Those of the previous turn are cancelled if anything is lost, otherwise come first.
        stretch: factor on the rest of the current iteration if nothing is lost.
        saved: True if the state is saved before the pauses, which include the time for it.
        waits_for: cause to which time is attributed if there is no pace.
    """

    pace: Pace | None
    loses: Literal["nothing", "iteration", "checkpoint", "storage"] = "nothing"
    pauses: tuple[Pause, ...] = ()
    stretch: float = 1.0
    saved: bool = False
    waits_for: str = "waiting"


class Moment(NamedTuple):
    """A change of nodes, as described to a strategy.

    Attributes:
        removed: nodes that leave.
        added: nodes that join, or that leave and rejoin at the same time.
        iterations_run: iterations run so far, including lost ones.
        iterations_kept: iterations kept so far.
        is_running: True if iterations are running, and training neither pauses nor waits.
    """

    removed: tuple[str, ...]
    added: tuple[str, ...]
    iterations_run: int
    iterations_kept: int
    is_running: bool


class Strategy(Protocol):
    """Strategy for training on nodes that leave and join: a frozen dataclass with two pure functions."""

    @property
    def name(self) -> str:
        """Name on the command line."""

    @property
    def source(self) -> str:
        """Source of its figures."""

    @property
    def iteration_s(self) -> float:
        """Duration of an iteration with all nodes that it can use, the reference for goodput."""

    @property
    def samples(self) -> float | None:
        """Samples of an iteration; None if unknown."""

    def start(self, nodes: tuple[str, ...]) -> tuple[State, Turn]:
        """Returns the initial state with these nodes, and the first turn."""

    def change(self, state: State, moment: Moment) -> tuple[State, Turn | None]:
        """Returns the state after a change and its effect on training; None if there is none."""
