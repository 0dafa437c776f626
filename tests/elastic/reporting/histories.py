"""Histories of a run of processes, told to the membership that decides and to the journal."""

from swift.deadlines import Deadlines
from swift.elastic.membership.messages import (
    Died,
    Formed,
    Heartbeat,
    Member,
    PhaseTimed,
    Ready,
    Started,
    StateId,
    Tick,
    processes_of,
)
from swift.elastic.membership.state_machine import Membership
from swift.elastic.membership.status import ProcessState
from swift.elastic.reporting.goodput import CAUSES
from swift.elastic.reporting.journal import Journal
from swift.topology import Topology

LIMITS = Deadlines(start=10, forming=4, heartbeat=2, progress=6)
A, B, C, D = ALL = processes_of(Topology(2, 2))
"""Workers 0:0, 0:1, 1:0 and 1:1: A and C serve stage 0, B and D stage 1."""


class History:
    """A run that is told to a membership and a journal; it begins at second 100, and its time moves with ``at``."""

    def __init__(self, limits=LIMITS, policy=None):
        self.time, self.journal, self.membership = 100.0, Journal(100.0), Membership.of(ALL, limits, 100.0, policy)
        self.notes, self.commands = [], []

    def at(self, second):
        """Advances to this second of the run; nothing happens before."""
        assert second >= self.time - 100
        self.time = 100 + second
        return self

    def tell(self, event):
        before = self.membership
        self.membership, commands = before.on(event)
        self.notes += self.journal.on(event, before, self.membership, commands)
        self.commands += commands
        return self

    def of(self, make, process, *args):
        return self.tell(make(self.membership.statuses[process].member, *args)._replace(time=self.time))

    def tick(self):
        return self.tell(Tick(self.time))

    def start(self, *processes):
        for process in processes:
            incarnation = self.membership.statuses[process].member.incarnation + 1
            self.tell(Started(Member(process, incarnation), self.time))
            self.of(Ready, process, 0)
        return self.tick()

    def die(self, *processes, reason="signal 9"):
        for process in processes:
            self.of(Died, process, 0, reason)
        return self.tick()

    def form(self, held):
        """All members answer; they have states after these iterations of the generation that ran last."""
        for member in self.membership.generation.form.members:
            stamps = frozenset(StateId(self.membership.last_live, step) for step in held)
            self.tell(Formed(member, self.membership.number, stamps, self.time))
        return self.tick()

    def enter(self, step, *processes):
        return self.beat(step, step - 1, *processes)

    def finish(self, step, *processes):
        return self.beat(step, step, *processes)

    def beat(self, entered, finished, *processes):
        for process in processes or [member.process for member in self.journal._running]:
            self.of(Heartbeat, process, self.membership.last_live, entered, finished, 0)
        return self.tick()

    def alive(self):
        for process in ALL:
            if self.membership.statuses[process].state is not ProcessState.DEAD:
                self.of(Heartbeat, process, 0, 0, 0, 0)
        return self.tick()

    def took(self, process, **parts):
        for part, seconds in parts.items():
            self.of(PhaseTimed, process, self.membership.number, part, seconds, 0)
        return self

    def now(self, *processes):
        return [self.membership.statuses[process].member for process in processes]

    def noted(self, event):
        return [note for note in self.notes if note.event == event]

    def texts(self):
        """The lines since the last time."""
        told, self.notes = [note.text for note in self.notes if note.text is not None], []
        return told

    def spent(self):
        """Seconds spent on each cause, without those that have cost nothing."""
        goodput = self.journal.goodput(self.time)
        assert goodput["total_s"] == sum(goodput[f"{cause}_s"] for cause in CAUSES) == self.time - 100
        return {cause: goodput[f"{cause}_s"] for cause in CAUSES if goodput[f"{cause}_s"]}


def recovering(live):
    """D is killed half a second into iteration 4, of which nobody has finished more than the third."""
    live.texts()
    live.notes += live.journal.kill_injected(D, 105.5)
    live.at(5.75).die(D)
    live.took(A, leave=0.25, connect=0.125).took(B, leave=0.125, load_program=0.5).took(C, load_program=0.25)
    live.at(7).form(held={2, 3}).enter(4)
    live.took(A, state=0.25, first_step=1.5).at(8.75).finish(4, A, B)
    return live.at(9).finish(4, C)
