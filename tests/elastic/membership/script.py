"""A membership that is told events one by one, and the states of a run that several tests begin from."""

from swift.deadlines import Deadlines
from swift.elastic.membership.messages import (
    ActivateGeneration,
    CheckpointsListed,
    Departed,
    Died,
    Formed,
    FormGeneration,
    Heartbeat,
    Loaded,
    MayRestart,
    Member,
    PreloadPrograms,
    Ready,
    RecutReady,
    RestartAll,
    Started,
    StateId,
    Tick,
    processes_of,
)
from swift.elastic.membership.state_machine import Membership
from swift.elastic.membership.status import ProcessState, RecoveryPolicy
from swift.schedules.adapt.moves import MigrationPolicy
from swift.schedules.plans.normalize import ChunkAssignment
from swift.topology import Topology

LIMITS = Deadlines(start=10, forming=4, heartbeat=2, progress=6, dying=5)
A, B, C, D = processes_of(Topology(2, 2))
"""Workers 0:0, 0:1, 1:0 and 1:1: A and C serve stage 0, B and D stage 1."""
RANKS = processes_of(Topology(1, 1, 4), by_rank=True)
MOVED = ChunkAssignment(((0, 0, 0, 0), (0, 0, 1, 1)))
"""With B down, A takes over all four blocks of its pipeline."""
B_DOWN = frozenset({B.worker})
ALWAYS = MigrationPolicy(is_always=True)


class Script:
    """A membership that is told events; the time is that of the last ``wait``."""

    def __init__(self, processes=(A, B, C, D), limits=LIMITS, **policy):
        self.time, self.membership = 0.0, Membership.of(processes, limits, 0.0, RecoveryPolicy(**policy))

    def tell(self, make, process, *args, incarnation=None):
        """Tells an event of a process, which then has the newest incarnation unless told."""
        newest = self.membership.statuses[process].member.incarnation
        member = Member(process, newest if incarnation is None else incarnation)
        event = make(member, *args)._replace(time=self.time)
        self.membership, commands = self.membership.on(event)
        return commands

    def start(self, *processes):
        for process in processes:
            self.tell(Started, process, 0, incarnation=self.membership.statuses[process].member.incarnation + 1)

    def ready(self, *processes):
        for process in processes:
            self.tell(Ready, process, 0)

    def die(self, *processes):
        return [command for process in processes for command in self.tell(Died, process, 0, "killed")]

    def formed(self, held_by, of=None):
        """Reports members that hold states after these iterations, of the generation that ran last unless given."""
        generation = self.membership.last_live if of is None else of
        self.left(*held_by)
        for process, held in held_by.items():
            self.tell(Formed, process, self.membership.number, frozenset(StateId(generation, step) for step in held), 0)

    def left(self, *processes):
        """The commands that came of it."""
        return [command for process in processes for command in self.tell(Departed, process, self.membership.number, 0)]

    def beat(self, entered_by):
        """Every member has ended the iteration before the one that it is in."""
        for process, entered in entered_by.items():
            self.tell(Heartbeat, process, self.membership.last_live, entered, entered - 1, 0)

    def tick(self, after=0.0):
        self.time += after
        self.membership, commands = self.membership.on(Tick(self.time))
        return list(commands)

    def now(self, *processes):
        return tuple(self.membership.statuses[process].member for process in processes)

    def alive(self):
        """All that have not died send heartbeats, without being in an iteration of this generation."""
        for process, status in self.membership.statuses.items():
            if status.state is not ProcessState.DEAD:
                self.tell(Heartbeat, process, 0, 0, 0, 0)


def script_live(processes=(A, B, C, D), **policy):
    script = Script(processes, **policy)
    script.start(*processes)
    script.ready(*processes)
    script.tick()
    script.formed(dict.fromkeys(processes, ()))
    script.tick()
    script.beat(dict.fromkeys(processes, 5))
    assert {status.state for status in script.membership.statuses.values()} == {ProcessState.LIVE}
    return script


def after_go(script, **stored):
    """Commands that follow where these checkpoints exist as the newest generation goes live."""
    script.membership, commands = script.membership.on(CheckpointsListed(script.time, **stored))
    return list(commands)


def survivors(script):
    """D has died, and the others go live with what they have of iteration 30."""
    script.die(D)
    script.tick()
    script.formed({A: {30}, B: {30}, C: {30}})
    (go,) = script.tick()
    return go


def may_restart(script, **chance):
    return list(script.membership.on(MayRestart(script.time, **chance))[1])


def once(**policy):
    """A run whose processes join one generation each, of which the first has lost D and all have been killed."""
    script = script_live(recovery="restart", joins_once=True, **policy)
    assert script.die(D) == [RestartAll("1:1 died")]
    script.die(A, B, C)
    script.tick()
    return script


def lost(rule=ALWAYS):
    """A run that goes on without B, everybody in iteration 7."""
    script = script_live(move_rule=rule)
    script.die(B)
    assert script.tick() == [FormGeneration(2, script.now(A, C, D))]
    script.formed({A: (4, 5), C: (4, 5), D: (4, 5)})
    assert [type(command) for command in script.tick()] == [ActivateGeneration]
    script.beat({A: 7, C: 7, D: 7})
    return script


def found(script, failed=B_DOWN, gain=0.5, most_bytes=1e9):
    """A cut is prepared, and loaded by all that are told to; the commands that come of it at once, and then."""
    script.membership, commands = script.membership.on(RecutReady(script.time, failed, MOVED, gain, most_bytes))
    assert commands == ()
    commands = script.tick()
    for command in commands:
        if isinstance(command, PreloadPrograms):
            assert command == PreloadPrograms(
                script.membership.number, script.membership.generation.form.members, MOVED
            )
            for process, _ in command.members:
                assert script.tick() == []
                script.tell(Loaded, process, command.number, 0)
            return script.tick()
    return commands


def moved():
    """A run without B whose other processes have taken over its blocks, everybody in iteration 10."""
    script = lost()
    found(script)
    script.formed({A: (7, 8), C: (7, 8), D: (7, 8)})
    script.tick()
    script.beat({A: 10, C: 10, D: 10})
    return script
