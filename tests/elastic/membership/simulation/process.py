"""A simulated process of a run."""

from collections import deque
from dataclasses import dataclass, field

from swift.elastic.membership.messages import FormGeneration, Member, StateId


@dataclass(eq=False)
class Simulated:
    """A process that obeys.

    Attributes:
        member: that it is.
        inbox, outbox: what it has not read yet, and what nobody has heard of yet.
        is_up, is_frozen, is_hung: whether it exists, whether it is stopped, whether only its heart beats.
        is_cut_off: whether it can neither be heard nor killed.
        is_dead: whether the supervisor has been told that it died, or does not count on that any more.
        is_excused: whether its death is no fault of its own.
        is_one_of_all: whether all are killed with it.
        has_worked: whether the supervisor has heard of an iteration that it has finished.
        is_unlike: whether it has other plans than the others, and takes part in no move of blocks.
        is_undead: whether it cannot be killed, nor dies by itself; it may continue as if nothing had happened.
        killed_at: when it was to be killed first; None: never.
        number: of the generation that it formed last, and runs if it ``runs``.
        leaving: the generation that it is about to form.
        states: by stamp, what its state comes from.
        kept: the same when it last left a generation; its next life finds it.
        moved_from: state that it keeps until others have their blocks of it; None: there is none.
        loading: generation for the next one of which it loads programs; 0: none.
        group: generation whose connections and devices it has; 0: it has none.
        done, begun, ended: iterations; the last two of this generation.
    """

    member: Member
    inbox: deque = field(default_factory=deque)
    outbox: deque = field(default_factory=deque)
    is_up: bool = True
    is_frozen: bool = False
    is_hung: bool = False
    is_cut_off: bool = False
    is_dead: bool = False
    is_excused: bool = False
    is_one_of_all: bool = False
    has_worked: bool = False
    is_unlike: bool = False
    is_undead: bool = False
    killed_at: float | None = None
    number: int = 0
    runs: bool = False
    leaving: FormGeneration | None = None
    states: dict = field(default_factory=dict)
    kept: dict = field(default_factory=dict)
    moved_from: StateId | None = None
    loading: int = 0
    group: int = 0
    done: int = 0
    begun: int = 0
    ended: int = 0

    @property
    def is_running(self):
        """Whether it still runs, and the supervisor counts on it."""
        return self.is_up and self.runs and not self.is_dead

    @property
    def can_act(self):
        return self.is_up and not self.is_frozen and not self.is_hung
