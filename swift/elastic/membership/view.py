"""The membership of a run at one moment: the data of the state machine, and what can be read off it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Self

from swift.deadlines import Deadlines
from swift.elastic.membership.commands import RestoreState
from swift.elastic.membership.processes import Member, Process, ShardLayout, lost_stages, whole_workers
from swift.elastic.membership.status import Generation, ProcessStatus, State

Recovery = Literal["live", "restart"]


@dataclass(frozen=True)
class RecoveryPolicy:
    """Settings of recovery from failures.

    Attributes:
        recovery: ``live``: survivors stay in their processes; ``restart``: they are started again, too.
        max_restarts: how often a process is started again that was not killed on purpose.
        is_resumed: the run resumes from its newest checkpoint.
        is_elastic: any processes can run without the others, see ``swift.elastic.membership.shard_ownership``.
    """

    recovery: Recovery = "live"
    max_restarts: int = 10
    is_resumed: bool = False
    is_elastic: bool = False


@dataclass(frozen=True)
class MembershipView:
    """Known state of a run's processes and generations.

    Attributes:
        processes: all that the run may have, of all stages.
        deadlines: the time limits.
        statuses: the status of every process.
        since: when the run began, or its generation ended for want of a stage, in seconds.
        policy: how the run recovers.
        generation: the newest; None while there is none: at the beginning, and while a stage has no process.
        number: the newest generation that was ever formed.
        went: the newest that was ever live.
        lost: the stages that have been reported as lost since the last generation.
        retried: the newest generation that was formed because nobody in the one before made progress; 0: none.
        deaf_until: the time before which nothing is decided, as messages may still be unread.
        cuts: the layouts of the states of an elastic run, the newest last.
    """

    processes: tuple[Process, ...]
    deadlines: Deadlines
    statuses: Mapping[Process, ProcessStatus]
    since: float
    policy: RecoveryPolicy = field(default_factory=RecoveryPolicy)
    generation: Generation | None = None
    number: int = 0
    went: int = 0
    lost: tuple[int, ...] = ()
    retried: int = 0
    deaf_until: float = -float("inf")
    cuts: tuple[ShardLayout, ...] = ()

    def present(self) -> tuple[Member, ...]:
        """The members that a new generation would have: of the workers all of whose processes are ready.

        In an elastic run, all that are ready.
        """
        ready = [process for process, status in self.statuses.items() if status.is_present]
        if self.policy.is_elastic:
            return tuple(self.statuses[process].member for process in sorted(ready))
        whole = whole_workers(self.processes, ready)
        return tuple(self.statuses[process].member for process in sorted(ready) if process.worker in whole)

    @property
    def is_manned(self) -> bool:
        """Whether every stage has a worker that could be a member of a new generation."""
        return not self.unmanned

    @property
    def unmanned(self) -> tuple[int, ...]:
        """The stages without any worker that could be a member of a new generation."""
        present = [member.process for member in self.present()]
        return lost_stages(self.processes, present, is_elastic=self.policy.is_elastic)

    def lost_without(self, processes: Collection[Process]) -> tuple[int, ...]:
        """The stages that nobody would serve without these processes."""
        there = [process for process in self.processes if process not in processes]
        return lost_stages(self.processes, there, is_elastic=self.policy.is_elastic)

    @property
    def dead(self) -> tuple[Process, ...]:
        """The processes whose newest life has ended."""
        return tuple(process for process, status in self.statuses.items() if not status.is_there)

    @property
    def is_done(self) -> bool:
        """Whether all members of the newest generation have run all their iterations."""
        return self.generation is not None and self.generation.is_done

    @property
    def is_loading(self) -> bool:
        """Whether the newest generation waits for a checkpoint."""
        return self.generation is not None and isinstance(self.generation.restoring, RestoreState)

    def awaits_state(self, number: int) -> bool:
        """Whether a generation is the newest, and waits for a checkpoint or a resharded state."""
        restoring = self.generation.restoring if self.generation else None
        return restoring is not None and restoring.number == number

    @property
    def is_waiting(self) -> bool:
        """Whether the newest generation waits for something that its members do not have to do."""
        return self.generation is not None and (self.generation.restoring is not None or self.generation.is_done)

    @property
    def is_recovering(self) -> bool:
        """Whether members form a generation, or have not all finished an iteration of it yet."""
        generation = self.generation
        if generation is None or generation.restoring is not None:
            return False
        base = generation.base
        return base is None or any(status.finished <= base for status in self.members_of(generation))

    def members_of(self, generation: Generation) -> tuple[ProcessStatus, ...]:
        """The status of each member's process."""
        return tuple(self.statuses[process] for process, _ in generation.form.members)

    def is_broken(self, generation: Generation) -> bool:
        """Whether a member has died, or could not continue."""
        return any(
            status.member != member or status.state not in (State.FORMING, State.LIVE)
            for status, member in zip(self.members_of(generation), generation.form.members, strict=True)
        )

    def is_winding_down(self, generation: Generation) -> bool:
        """Whether members still run the generation before, up to an iteration that they were given."""
        running = (self.statuses[process].lived == self.went for process, _ in generation.staying)
        return generation.form.after is not None and any(running)

    def with_statuses(self, *statuses: ProcessStatus) -> Self:
        """The same with these statuses of their processes."""
        return replace(self, statuses={**self.statuses, **{status.member.process: status for status in statuses}})
