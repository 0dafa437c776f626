"""What must hold of processes that are started, waited for, given up, and of the end of a run."""

from swift.elastic.membership.status import ProcessState
from tests.elastic.membership.script import LIMITS
from tests.elastic.membership.simulation.state import WorldState


class ProcessChecks(WorldState):
    """Assertions about commands that concern single processes, and about deadlines."""

    def check_restart(self, process):
        assert self.newest[process].is_dead, "a process is started that lives"
        assert process not in self.retired | self.spent(), "a process is started that must not be"
        assert process not in self.chance.away, "a process is started on a node that is away"
        if process in self.chance.held_down:
            lost = self.membership.lost_without(self.down)
            assert process.worker[1] in lost, "a process is started that is held down"

    def check_stop(self):
        """The run ends only where a stage has nobody who may be started again."""
        assert self.membership.lost_without(self.hopeless()), "a run ends that could continue"

    def check_left_out(self, process):
        """A process is left out once, for failing at its start again and again, where the others can continue."""
        assert self.failed_at_start[process] == LIMITS.max_quick_deaths, "a process is left out that does not fail"
        assert process not in self.left_out
        assert not self.membership.lost_without({process, *self.hopeless()}), "nobody is left to continue"

    def check_give_up(self, process):
        """A process that fails at its start ends the run where the others need it, or have never worked either."""
        assert self.failed_at_start[process] == LIMITS.max_quick_deaths, "a run ends for one that does not fail"
        others = self.failed_at_start.total() - self.failed_at_start[process]
        is_needed = self.membership.lost_without({process, *self.hopeless()})
        assert is_needed or (self.worked == {0} and others >= LIMITS.max_quick_deaths), "the others could continue"

    def check_stall(self):
        """A run ends without progress only after three generations of the same processes that do nothing."""
        idle = [number for number in self.forms if number > max(self.worked)]
        assert sum(self.processes_in(number) == self.processes_in(idle[-1]) for number in idle) >= 3
        type(self).num_stalls += 1

    def check_deadlines(self):
        """No process is waited for beyond its deadline after a decision, unless it is being killed."""
        membership, generation = self.membership, self.membership.generation
        for status in membership.statuses.values():
            silent_s = self.time - status.seen
            assert not status.is_present or silent_s <= LIMITS.heartbeat, "a silent process is not killed"
            is_starting = status.state is ProcessState.STARTING and not status.is_dying
            assert not is_starting or silent_s <= LIMITS.start, "a process that is never ready is not killed"
        if generation is None or membership.failed or any(one.is_dying for one in membership.statuses.values()):
            return
        waited_s = self.time - generation.since
        assert membership.is_broken(generation) or waited_s <= LIMITS.progress, "a generation makes no progress"
        late = set(generation.not_departed or generation.not_formed) - generation.linked
        if late and not membership.is_finishing_previous(generation):
            assert waited_s <= LIMITS.forming, "a member that does not form is not killed"

    def check_patience(self):
        """A process that was to be killed has died since, or is retired, or has not had its time yet."""
        for status in self.membership.statuses.values():
            if status.is_alive and (killed_at := self.by_member(status.member).killed_at) is not None:
                assert self.time - killed_at <= LIMITS.dying, "the run waits for a death longer than was said"
