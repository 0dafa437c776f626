"""A run that is told to stop: what it waits for, for how long, and what it says; without processes."""

import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest

from swift.deadlines import Deadlines
from swift.elastic.coordinator import membership_driver, parse_chaos
from swift.elastic.coordinator.run_spec import RunContext, RunSpec
from swift.elastic.coordinator.supervisor import Supervisor
from swift.elastic.membership import (
    Departed,
    Enter,
    Formed,
    Heartbeat,
    Member,
    PhaseTimed,
    Ready,
    RecoveryPolicy,
    Stamp,
    processes_of,
)
from swift.elastic.transport.checkpoint_messages import SaveCheckpoint
from swift.elastic.transport.child_processes import Death, ReceivedLine
from swift.elastic.transport.worker_messages import (
    WORKER_COMMANDS,
    WORKER_MESSAGES,
    Begin,
    Done,
    FormGroup,
    Halt,
    Record,
    SnapshotKept,
    SnapshotMissed,
    StartGeneration,
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
            case Enter(number):
                self.send(PhaseTimed, number=number, phase="link", seconds=0.0)
                self.send(Formed, number=number, held=self.held, found=[])
            case StartGeneration(go):
                self.runs, self.done, self.halt = True, go.stamp.step if go.stamp else 0, None
            case Halt():
                self.halt = order

    def act(self):
        if not self.runs:
            return
        self.done += 1
        self.held = {Stamp(self.number, self.done)}
        self.send(Record, record={"step": self.done, "loss": 1.0, "grad_norm": 1.0, "step_ms": 1000 * self.step_s})
        self.send(Heartbeat, number=self.number, entered=self.done, finished=self.done)
        if self.halt is not None and self.done >= self.halt.after:
            self.runs = False
            stamp = Stamp(self.number, self.done)
            if self.has_room:
                self.send(SnapshotKept, stamp=stamp, loss=None)
            else:
                self.send(SnapshotMissed, stamp=stamp, why="[Errno 28] No space left on device")
            self.send(Done, number=self.number)


class Stage:
    """Children, of which members act."""

    def __init__(self):
        self.there, self.dead, self.halts, self.begun, self.held = {}, [], [], {}, set()

    def __contains__(self, who):
        return who in self.there

    def away_s(self, _):
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
            del self.there[who]


class Kept:
    """Checkpoints: each takes so many turns."""

    newest, newest_is_full, kill_if_late, died = None, False, lambda _: False, lambda _: True
    unsaved = None

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

    def start(self):
        pass

    def send_if_due(self):
        pass


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

    def __init__(self, monkeypatch, *, saved=None, turns=20, stopping=60.0, chaos=(), recovery="live"):
        monkeypatch.setattr(
            membership_driver, "CoordinationService", lambda *_: SimpleNamespace(address="", close=lambda: None)
        )
        self.stage, self.kept, self.told = Stage(), Kept(turns), Told()
        self.kept.newest = saved
        none = SimpleNamespace(
            request=lambda _: None,
            send_request=lambda: None,
            kill_if_silent=lambda: False,
            is_prepared=lambda _: self.is_prepared,
            has_ended=False,
        )
        self.is_prepared = False
        run_spec = RunSpec(
            processes=PROCESSES,
            command=lambda _: [],
            logs=Path("logs"),
            deadlines=Deadlines(stopping=stopping),
            policy=RecoveryPolicy(recovery),
            faults=parse_chaos(chaos, TOPOLOGY, PROCESSES, num_steps=99),
        )
        self.supervisor = Supervisor(
            RunContext(spec=run_spec, children=self.stage, checkpoints=self.kept, programs=none, reporter=self.told)
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


def test_the_last_iteration_is_saved_whole_however_long_it_takes(monkeypatch):
    run = Run(monkeypatch, turns=200).stops_after(5)
    (halt,) = run.stage.halts
    assert run.kept.asked == [halt.after, halt.after]
    assert run.kept.newest == run.told.written == halt.after
    assert run.told.texts[-2:] == [
        f"stopping: waiting for iteration {halt.after}, which is to be the last",
        "stopping: waiting for the checkpoint",
    ]


def test_all_have_a_second_to_hear_which_iteration_is_the_last(monkeypatch):
    (halt,) = Run(monkeypatch).stops_after(5).stage.halts
    assert halt.after >= 5 + 1 / STEP_S


def runs_until_started_again(run, process):
    """Kills a process after five iterations, and asks the run to stop once it is started again."""

    def is_started():
        if run.told.written >= 5 and Member(process, 0) in run.stage.there:
            run.stage.kill(Member(process, 0))
        return Member(process, 1) in run.stage.there

    with run.supervisor:
        run.supervisor.run(is_started)


def test_who_starts_again_is_told_how_far_the_run_is(monkeypatch):
    run, (killed, _) = Run(monkeypatch), PROCESSES
    runs_until_started_again(run, killed)
    assert run.stage.begun[Member(killed, 0)] == 0
    assert 5 <= run.stage.begun[Member(killed, 1)] <= run.told.written


@pytest.mark.parametrize("recovery", ["live", "restart"])
def test_where_all_are_restarted_the_process_that_follows_each_is_held_ready_once_all_run(monkeypatch, recovery):
    run = Run(monkeypatch, recovery=recovery)

    def hold(who, *_):
        assert not run.supervisor._driver.membership.is_recovering, "the processes that run need the cores"
        run.stage.held.add(who)

    run.stage.hold = hold
    run.stops_after(5)
    assert run.stage.held == ({Member(process, 1) for process in PROCESSES} if recovery == "restart" else set())


MISSED = "--chaos 'step 3: kill 0:0' waited until the run ended, and did not happen: "


@pytest.mark.parametrize(
    ("chaos", "why"),
    [
        ((), f"{MISSED}the programs for it were not prepared by then"),
        (("step 2: kill 1:0", "step 90: restart 1:0"), f"{MISSED}no process would have been left in its stage"),
    ],
)
def test_a_fault_that_waited_to_the_end_is_told_of(monkeypatch, chaos, why):
    run = Run(monkeypatch, chaos=["step 3: kill 0:0 once prepared", *chaos])
    run.stops_after(5, meanwhile=lambda: run.told.texts.append("the end"))
    texts = [text for text in run.told.texts if "--chaos" in text or text == "the end"]
    assert texts == ["the end", why]


def test_a_record_that_fails_while_its_save_waits_ends_the_run(monkeypatch):
    """The last save of a run waits for a record that nobody else will be told cannot be written."""
    run = Run(monkeypatch, turns=10**9)
    run.told.has_failed = True
    with run.supervisor, pytest.raises(RunError, match="the record of the run cannot be written"):
        run.supervisor.run()


def test_it_waits_no_longer_than_it_was_told_to(monkeypatch):
    run = Run(monkeypatch, saved=3, turns=10**9, stopping=0.5)
    with pytest.raises(RunError) as caught:
        run.stops_after(5)
    (halt,) = run.stage.halts
    assert str(caught.value) == (
        "has not stopped within 0.5 s, and waited for the checkpoint: stopped without saving iteration "
        f"{halt.after}; resume from the checkpoint of iteration 3 with --resume"
    )


def test_a_stop_that_cannot_keep_the_last_iteration_is_none_in_order(monkeypatch):
    run = Run(monkeypatch, saved=3)

    def is_full():
        for member in run.stage.there.values():
            member.has_room = False

    with pytest.raises(
        RunError, match=r"cannot be saved: [01]:0 has no room for its part: .* of iteration 3 with --res"
    ):
        run.stops_after(5, meanwhile=is_full)
    assert run.kept.asked == []


def test_an_older_state_that_could_not_be_kept_does_not_matter_in_the_end(monkeypatch):
    run = Run(monkeypatch)
    member = Member(PROCESSES[0], 0)
    line = WORKER_MESSAGES.line_of(SnapshotMissed, stamp=Stamp(1, 4), why="full")
    run.stops_after(5, meanwhile=lambda: run.supervisor._driver.take_from_worker(line, member, 0.0))
    assert run.kept.newest == run.told.written


def test_where_saving_fails_half_of_the_time_is_for_keeping_the_state_elsewhere(monkeypatch):
    run, begun = Run(monkeypatch, turns=10**9, stopping=4.0), time.monotonic()
    run.kept.unsaved = SaveCheckpoint(Stamp(1, 9), ())
    run.stops_after(5)
    assert 2 <= time.monotonic() - begun < 4


def test_a_directory_that_is_another_s_is_not_tidied_up(monkeypatch):
    def is_lost():
        raise RunError("no longer belongs to this process")

    run = Run(monkeypatch)
    run.kept.unsaved, run.told.check = SaveCheckpoint(Stamp(1, 9), ()), is_lost
    assert run.supervisor.keep_unsaved() is None


def test_one_slow_iteration_does_not_make_the_time_to_hear_shorter(monkeypatch):
    run = Run(monkeypatch)

    def slow(step_s):
        for member in run.stage.there.values():
            member.step_s = step_s

    def has_waited():
        slow(60.0)
        run.supervisor._turn()

    (halt,) = run.stops_after(5, meanwhile=has_waited).stage.halts
    assert halt.after >= 5 + 1 / STEP_S


def test_there_is_nothing_to_wait_for_where_all_is_saved(monkeypatch):
    run = Run(monkeypatch, saved=10**6).stops_after(5)
    assert (run.stage.halts, run.kept.asked, run.told.texts) == ([], [], [])


def test_before_the_first_iteration_it_stops_at_once(monkeypatch):
    run = Run(monkeypatch).stops_after(0)
    assert (run.stage.halts, run.told.texts) == ([], [])


def test_who_is_starting_is_not_waited_for(monkeypatch):
    """It is ready at once, and would end the generation of the others to join them."""
    run, victim = Run(monkeypatch), PROCESSES[1]
    runs_until_started_again(run, victim)
    assert [halt.number for halt in run.stage.halts] == [2]
    assert run.kept.newest == run.told.written


def test_who_dies_meanwhile_costs_the_others_nothing(monkeypatch):
    run = Run(monkeypatch)
    victim = Member(PROCESSES[1], 0)
    run.stops_after(5, meanwhile=lambda: run.stage.kill(victim))
    numbers = [halt.number for halt in run.stage.halts]
    assert numbers[-1] > 1, "those who are left are in a generation of their own, and are told again"
    assert run.kept.newest == run.told.written
    assert [who for who in run.stage.there if who.process == PROCESSES[1]] == [], "nobody is started for nothing"
