"""Who of a run's dead processes is started again, and when nobody can be."""

from collections import Counter

from swift.elastic.coordinator.run_spec import RunSpec
from swift.elastic.membership import Member, Membership, Process, State
from swift.elastic.transport import Children


class RestartPolicy:
    """The processes of a run, and how often each has died.

    Args:
        run_spec: how the run goes.
        children: among which they are.
    """

    def __init__(self, run_spec: RunSpec, children: Children):
        self._run_spec, self._children = run_spec, children
        self._deaths: Counter[Process] = Counter()
        self._excused: set[Member] = set()

    def excuse(self, member: Member) -> None:
        """Its death is somebody else's doing, and does not count."""
        self._excused.add(member)

    def mourn(self, member: Member) -> None:
        """Counts a death."""
        self._deaths[member.process] += member not in self._excused

    def dead(self, membership: Membership) -> list[Process]:
        """Whose newest life has ended."""
        return [process for process, status in membership.statuses.items() if status.member not in self._children]

    def given_up(self, membership: Membership) -> tuple[int, ...]:
        """The stages that nobody will serve any more: too many deaths, or a node that does not come back."""
        return membership.lost_without([one for one in self.dead(membership) if self._is_given_up(one, membership)])

    def due(self, membership: Membership, newest: int) -> list[Process]:
        """Those to be started now.

        Args:
            membership: as it is.
            newest: iteration that somebody has ended; chaos keeps processes down until a later one.
        """
        dead = self.dead(membership)
        down = {process for process in dead if self._run_spec.chaos.keeps_down(process, newest)}
        startable = [one for one in dead if not self._is_spent(one, membership) and not self._children.away_s(one)]
        # Where a stage has nobody no iteration ends any more, and no later one would bring anybody back.
        needed = membership.lost_without([process for process in dead if process in down or process not in startable])
        return [process for process in startable if process not in down or process.worker[1] in needed]

    def _is_spent(self, process: Process, membership: Membership) -> bool:
        is_retired = membership.statuses[process].state is State.RETIRED
        return is_retired or self._deaths[process] > self._run_spec.max_restarts

    def _is_given_up(self, process: Process, membership: Membership) -> bool:
        return self._is_spent(process, membership) or self._children.away_s(process) > self._run_spec.deadlines.start
