"""A run of two members that are acted, without processes: its children, its checkpoints and its reporter."""

import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace

from swift.deadlines import Deadlines
from swift.elastic.coordinator import supervisor
from swift.elastic.coordinator.fault_injection import parse_chaos
from swift.elastic.coordinator.supervisor import RunContext, RunSpec, Supervisor
from swift.elastic.membership.messages import (
    Connect,
    Departed,
    Done,
    Formed,
    Heartbeat,
    PhaseTimed,
    Ready,
    StartGeneration,
    StateId,
    processes_of,
)
from swift.elastic.membership.status import RecoveryPolicy
from swift.elastic.state import run_files
from swift.elastic.transport.children import Death, ReceivedLine
from swift.elastic.transport.messages import (
    WORKER_COMMANDS,
    WORKER_MESSAGES,
    Begin,
    FormGroup,
    Halt,
    Record,
    SnapshotKept,
    SnapshotMissed,
    Stop,
)
from swift.errors import RunError
from swift.topology import Topology

TOPOLOGY = Topology(2, 1)
PROCESSES = processes_of(TOPOLOGY)
STEP_S = 0.05


class Acting:
    """A member that does as it is told, an iteration whenever it is looked at; they all are in the same."""

    def __init__(self):
        self.said, self.number, self.done, self.halt, self.members = deque([(Ready, {"number": 0})]), 0, 0, None, []
        self.runs, self.held, self.has_room, self.step_s = False, set(), True, STEP_S

    def send(self, kind, **said):
        self.said.append((kind, said))

    def obey(self, order):
        match order:
            case FormGroup(form):
                self.runs, self.number, self.members = False, form.number, form.members
                self.send(Departed, number=form.number)
            case Connect(number):
                self.send(PhaseTimed, number=number, phase="connect", seconds=0.0)
                self.send(Formed, number=number, states=self.held, known_slices=[])
            case StartGeneration(go):
                self.runs, self.done, self.halt = True, go.stamp.step if go.stamp else 0, None
            case Halt():
                self.halt = order

    def act(self):
        if not self.runs:
            return
        self.done += 1
        self.held = {StateId(self.number, self.done)}
        self.send(Record, record={"step": self.done, "loss": 1.0, "grad_norm": 1.0, "step_ms": 1000 * self.step_s})
        self.send(Heartbeat, number=self.number, entered=self.done, finished=self.done)
        if self.halt is not None and self.done >= self.halt.after:
            self.runs = False
            stamp = StateId(self.number, self.done)
            if self.has_room:
                self.send(SnapshotKept, stamp=stamp, loss=None)
            else:
                self.send(SnapshotMissed, stamp=stamp, reason="[Errno 28] No space left on device")
            self.send(Done, number=self.number)


class Stage:
    """Children, of which members act."""

    def __init__(self):
        self.there, self.dead, self.halts, self.begun, self.held = {}, [], [], {}, set()

    def __contains__(self, who):
        return who in self.there

    def node_missing_s(self, _):
        return 0.0

    def start(self, who, _command, _log):
        self.there[who] = Acting()

    def send(self, who, line):
        if who not in self.there:
            return  # the dead are told, too
        order = WORKER_COMMANDS.read(line)
        self.halts += [order] if isinstance(order, Halt) and order not in self.halts else []
        if isinstance(order, Begin):
            self.begun[who] = order.done
        elif not isinstance(order, Stop):
            self.there[who].obey(order)

    def signal(self, who, _):
        self.kill(who)

    def kill(self, who):
        del self.there[who]
        self.dead.append(Death(who, "signal 9", time.monotonic()))

    def deaths(self):
        dead, self.dead = self.dead, []
        return dead

    def received(self, _):
        time.sleep(0.001)
        for member in self.there.values():
            member.act()
        heard = [(who, *member.said.popleft()) for who, member in self.there.items() for _ in range(len(member.said))]
        return [ReceivedLine(who, WORKER_MESSAGES.line_of(kind, **said), time.monotonic()) for who, kind, said in heard]

    def wait_for(self, whom):
        for who in whom:
            self.there.pop(who, None)  # some were killed


class Kept:
    """Checkpoints: each takes so many turns."""

    newest, newest_is_complete, unsaved = None, False, None

    def __init__(self, turns):
        self.turns, self.asked, self.added = turns, [], 0

    @property
    def newest_loadable(self):
        return self.newest

    @property
    def is_busy(self):
        if self.asked and self.turns:
            self.turns -= 1
            self.newest = self.newest if self.turns else self.asked[0]
        return bool(self.asked and self.turns)

    def add(self, snapshot, *, is_full):
        assert is_full
        self.asked.append(snapshot.stamp.step)

    def set_processes(self, *_):
        pass

    def load(self, *_):
        pass

    def on(self, _):
        return ()

    def tick(self, **_):
        return ()


class Told:
    """A reporter."""

    def __init__(self):
        self.written, self.texts, self.has_failed = 0, [], False

    def record(self, record):
        self.written = max(self.written, record["step"])

    def show_line(self, text):
        self.texts.append(text)

    def fault_injected(self, *_):
        pass

    def note(self, _event, _step, text, **_):
        self.texts.append(text)

    def on(self, *_):
        pass

    def show(self, _):
        pass

    def check(self):
        pass

    def raise_failed(self):
        if self.has_failed:
            raise RunError("the record of the run cannot be written")


class Run:
    """A run of two members that is told to stop after some iterations."""

    def __init__(
        self, monkeypatch, *, saved=None, turns=20, stopping=60.0, chaos=(), recovery="live", mend=lambda: False
    ):
        monkeypatch.setattr(
            supervisor, "CoordinationService", lambda *_: SimpleNamespace(address="", close=lambda: None)
        )
        monkeypatch.setattr(run_files, "_LOOK_S", 0.01)
        self.stage, self.kept, self.told = Stage(), Kept(turns), Told()
        self.kept.newest = saved
        none = SimpleNamespace(
            request=lambda _: None,
            send_request=lambda: None,
            kill_if_silent=lambda: False,
            is_compiled=lambda _: self.is_compiled,
            has_ended=False,
        )
        self.is_compiled = False
        run_spec = RunSpec(
            processes=PROCESSES,
            command=lambda _: [],
            logs=Path("logs"),
            deadlines=Deadlines(stopping=stopping),
            policy=RecoveryPolicy(recovery),
            faults=parse_chaos(chaos, TOPOLOGY, PROCESSES, num_steps=99),
        )
        self.supervisor = Supervisor(
            RunContext(
                spec=run_spec,
                children=self.stage,
                checkpoints=self.kept,
                programs=none,
                reporter=self.told,
                mend=mend,
            )
        )

    def stops_after(self, step, meanwhile=lambda: None):
        calls = []

        def is_stop_requested():
            if self.told.written >= step and not calls:
                calls.append(meanwhile())
            return bool(calls)

        with self.supervisor:
            self.supervisor.run(is_stop_requested)
        return self
