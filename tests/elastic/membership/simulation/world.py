"""A simulated run: its supervisor, which carries out the commands of a membership."""

from collections import deque

from swift.elastic.membership.messages import (
    AbortRun,
    ActivateGeneration,
    CheckpointsListed,
    ClockJumped,
    Connect,
    Died,
    ExcludeProcess,
    FormGeneration,
    Heartbeat,
    Kill,
    Loaded,
    MayRestart,
    Member,
    PreloadPrograms,
    Ready,
    RecutFailed,
    RecutReady,
    ReshardState,
    RestartAll,
    Restored,
    RestoreFailed,
    RestoreState,
    Retire,
    Started,
    StartGeneration,
    StartProcess,
    StateId,
    StopRun,
    Tick,
    processes_of,
)
from swift.schedules.plans.normalize import ChunkAssignment, Move
from tests.elastic.membership.script import LIMITS
from tests.elastic.membership.simulation.generation_checks import GenerationChecks
from tests.elastic.membership.simulation.process import Simulated
from tests.elastic.membership.simulation.process_actions import ProcessActions
from tests.elastic.membership.simulation.process_checks import ProcessChecks


class World(GenerationChecks, ProcessChecks, ProcessActions):
    """Simulated processes, what is on its way between them and the supervisor, and what must always hold."""

    def __init__(self, topology, by_rank, policy):
        processes = processes_of(topology, by_rank=by_rank)
        super().__init__(topology, processes, policy)
        for process in processes:
            self.start(process)

    def tell(self, event):
        if self.is_stopped:
            return
        self.membership, commands = self.membership.on(event)
        if isinstance(event, Tick) and any(
            isinstance(one, RestartAll | ExcludeProcess | AbortRun | StopRun) for one in commands
        ):
            self.blame_alone()
        for command in commands:
            match command:
                case FormGeneration():
                    self.check_form(command)
                    self.send(command.members, command)
                case Connect(number, members):
                    assert set(members) == self.have_left[number], "some enter while others have not left"
                    self.send(members, command)
                case PreloadPrograms():
                    self.check_load(command)
                    self.send(command.members, command)
                case ActivateGeneration():
                    self.check_go(command)
                    self.check_without_checkpoint(command)
                    self.tell(CheckpointsListed(self.time, self.newest_saved, self.is_full, False, self.written()))
                case RestoreState() | ReshardState():
                    self.check_ask(command)
                    self.asked.append(command)
                case StartGeneration():
                    self.check_start(command)
                    self.send(self.forms[command.go.number].members, command)
                case StartProcess(process):
                    self.check_restart(process)
                    self.start(process)
                case StopRun(reason):
                    self.check_stall() if "generations in a row" in reason else self.check_stop()
                    self.is_stopped = True
                case ExcludeProcess(process):
                    self.check_left_out(process)
                    self.left_out.add(process)
                    World.num_left_out += 1
                case AbortRun(process):
                    self.check_give_up(process)
                    self.is_stopped = True
                case Kill(member):
                    self.kill(self.by_member(member))
                case Retire(member):
                    self.retire(self.by_member(member))
                case RestartAll():
                    for one in self.everybody:
                        one.is_one_of_all = one.is_one_of_all or not one.is_dead
                        one.is_excused = one.is_excused or one.is_one_of_all
                        self.kill(one)
        if isinstance(event, Tick) and self.time >= self.membership.paused_until:
            self.check_patience()
            if not commands:
                self.check_deadlines()

    def kill(self, one):
        one.kill_is_due, one.killed_at = True, self.time if one.killed_at is None else one.killed_at

    def retire(self, one):
        assert self.time - one.killed_at > LIMITS.dying, "it had less time to die than was said"
        assert one.is_undead or not one.is_dead, "who has died is retired"
        one.is_dead = True
        self.retired.add(one.member.process)

    def send(self, members, command):
        for one in self.everybody:  # the dead may be gone by now
            if one.member in members:
                one.inbox.append(command)

    def start(self, process):
        last = self.newest.get(process)
        if process not in self.retired | self.spent() and (last is None or last.is_dead) and not self.is_stopped:
            member = Member(process, last.member.incarnation + 1 if last else 0)
            self.newest[process] = one = Simulated(member)
            one.kill_is_due, one.outbox = False, deque([Ready(member, 0)])
            one.states = dict(last.kept) if last else {}
            one.kept = one.states
            self.everybody = [old for old in self.everybody if old.is_up or not old.is_dead] + [one]
            self.tell(Started(member, self.time))

    def find(self, order):
        """Some cut is prepared for those that a generation would lack now, or for others."""
        present = {member.process.worker for member in self.membership.present()}
        failed = frozenset(self.topology.workers) - present
        if order.random() < 0.2:
            failed |= {order.choice(self.topology.workers)}
        workers, live = self.topology.workers, [one for one in self.topology.workers if one not in failed]
        places = live if order.random() < 0.5 else order.sample(workers, len(live))
        held = [[p for e, p in places if d == e] for d in range(self.topology.num_pipelines)]
        stages = tuple(tuple(sorted(order.choices(at, k=4))) if at else () for at in held)
        moves = tuple(Move(*pair) for pair in zip(live, places, strict=True) if pair[0] != pair[1])
        cut = ChunkAssignment(stages if any(stages) else ((0,),) * len(held), moves)
        before = self.membership.generation
        self.tell(RecutReady(self.time, failed, cut, 0.1, 1.0))
        assert self.membership.generation is before, "a cut that is found changes a generation before the next decision"

    def save(self, is_full):
        """A checkpoint of the newest iteration that all have finished."""
        running = [one for one in self.everybody if one.is_running]
        done = min((one.done for one in running), default=0)
        if done >= self.newest_saved:
            self.newest_saved, self.is_full = done, is_full

    def answer(self):
        """The checkpoint service has done what it was asked for first, perhaps for a generation that has ended."""
        if not self.asked:
            return
        command = self.asked.popleft()
        is_awaited = self.membership.generation is not None and self.membership.generation.restoring == command
        step = self.newest_saved if isinstance(command, RestoreState) else command.stamp.step
        _, stopped = self.membership.on(RestoreFailed(command.number, self.time, "it is lost"))
        assert stopped == ((StopRun("it is lost"),) if is_awaited else ()), "a failed restore is missed"
        if is_awaited:
            self.restored[command.number] = f"{type(command).__name__} {step} for generation {command.number}"
        before = self.membership
        self.tell(Restored(StateId(command.number, step), self.time, self.written()))
        assert is_awaited or self.membership == before, "a generation runs from a state that was not for it"

    def may_restart(self, away=(), held_down=()):
        self.chance = MayRestart(self.time, dict.fromkeys(away, 1.0), frozenset(held_down))
        barred = {*away, *held_down, *self.retired, *self.spent()}
        self.down = {process for process in barred if self.newest[process].is_dead}
        self.tell(self.chance)

    def sleep(self, seconds):
        """The supervisor is suspended: until it has heard all that was sent meanwhile nothing is decided."""
        self.advance(seconds)
        self.tell(ClockJumped(self.time))
        late = self.time + 0.9 * LIMITS.heartbeat
        assert self.is_stopped or self.membership.on(Tick(late))[1] == (), "it decides before it has heard all"

    def reap(self, order=None):
        """Carries out what is due, and reports deaths, sooner or later; a process that is cut off is declared dead."""
        for one in list(self.everybody):
            if one.is_undead or (order and order.random() < 0.5):
                continue
            if one.kill_is_due and not one.is_cut_off:
                one.is_up = False
            if not one.is_dead and (not one.is_up or one.kill_is_due):
                one.is_dead = True
                self.note_death(one)
                self.tell(Died(one.member, self.time, "died"))
            one.kill_is_due = False

    def note_death(self, one):
        """Counts a failure at a start, for which all are restarted, unless others fail at the same time."""
        process, generation = one.member.process, self.membership.generation
        restarts_all = self.membership.policy.recovery == "restart" and generation is not None and not one.is_one_of_all
        if one.has_worked:
            self.failed_at_start[process] = 0
        if restarts_all and (self.together or not (one.has_worked or one.is_excused)):
            self.together.append(process)
            self.failing_since = self.failing_since if self.together[1:] else self.time
            return
        self.blamed[process] += not one.is_excused
        self.failed_at_start[process] += not (one.is_excused or one.has_worked)

    def blame_alone(self):
        """It is known by now who has failed together; only one that did so alone is to blame."""
        if self.together:
            assert self.time - self.failing_since > 1, "others may still fail, too"
        if len(self.together) == 1:
            self.blamed[self.together[0]] += 1
            self.failed_at_start[self.together[0]] += 1
        self.together = []

    def deliver(self, one):
        if one.outbox and not one.is_cut_off:
            before, message = self.membership, one.outbox.popleft()
            is_current = isinstance(message, Heartbeat) and message.number == before.last_live and not one.is_dead
            if is_current and message.finished and before.generation is not None:
                one.has_worked = True
                self.worked.add(message.number)
            if isinstance(message, Loaded) and not one.is_dead:
                self.loaded[message.number].add(one.member)
            self.tell(message._replace(time=self.time))
            if isinstance(message, RecutFailed) and one is self.newest[one.member.process] and not one.is_dead:
                self.is_refused = True
                World.num_refusals += 1
            if one.member.process in self.retired:
                assert self.membership == before, "what a retired process says changes something"

    def advance(self, seconds):
        self.time += seconds
        for one in self.everybody:
            if one.is_up and not one.is_frozen:
                self.beat(one)

    def settle(self, rounds, restarts=True, order=None):
        """Rounds in which all is heard, told, read and done; with an ``order``, some do more in a round than others."""
        for _ in range(rounds):
            for one in list(self.everybody):
                while one.outbox and not one.is_cut_off:
                    self.deliver(one)
            self.reap(order)
            self.tell(Tick(self.time))
            if not order or order.random() < 0.5:
                self.answer()
            if restarts:
                self.may_restart()
            for one in order.choices(self.everybody, k=3 * len(self.everybody)) if order else self.everybody * 2:
                self.read(one)
                self.step(one)
            self.check_running()
            self.advance(0.5)
