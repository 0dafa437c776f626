"""The newest generation of a run, from the command that forms it to the last iteration of its members."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from swift.elastic.membership.commands import Form, GoLive, LoadAhead, ReshardState, RestoreState
from swift.elastic.membership.members import Member, Process, Stamp


@dataclass(frozen=True)
class Generation:
    """The newest generation.

    Attributes:
        form: command that began it.
        since: time of its last progress, in seconds: it began or went live, a member was connected, or running members
            finished an iteration.
        departed: members that have left the generation before.
        waiting_since: when the first of them had left it, in seconds; None: none has.
        linked: members that are connected to all the others.
        held: states that each formed member has.
        found: slices that these members know to be kept elsewhere than by their owner.
        go: command that made it live; None before.
        restoring: command for the state that its members wait for; None: they wait for none.
        base: iteration after which its members run; None before they do.
        done: members that have run all their iterations.
        ahead: command to load the programs of the next one while it runs; None: there was none.
        loaded: members that have done so.
    """

    form: Form
    since: float
    departed: frozenset[Member] = frozenset()
    waiting_since: float | None = None
    linked: frozenset[Member] = frozenset()
    held: Mapping[Member, frozenset[Stamp]] = field(default_factory=dict)
    found: frozenset[tuple[Process, Stamp]] = frozenset()
    go: GoLive | None = None
    restoring: RestoreState | ReshardState | None = None
    base: int | None = None
    done: frozenset[Member] = frozenset()
    ahead: LoadAhead | None = None
    loaded: frozenset[Member] = frozenset()

    @property
    def is_live(self) -> bool:
        """Returns whether all members have formed it."""
        return self.go is not None

    @property
    def not_formed(self) -> tuple[Member, ...]:
        """Members that have not formed it yet."""
        return tuple(member for member in self.form.members if member not in self.held)

    @property
    def not_departed(self) -> tuple[Member, ...]:
        """Members that have not left the generation before."""
        return tuple(member for member in self.form.members if member not in self.departed)

    @property
    def is_done(self) -> bool:
        """Returns whether all members have run all their iterations."""
        return self.is_live and set(self.form.members) <= self.done
