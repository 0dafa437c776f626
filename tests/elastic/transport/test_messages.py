"""Messages between the supervisor and a process arrive as they were sent, and faults are read as they were written."""

import pytest

from swift.elastic.coordinator.fault_injection import parse_chaos
from swift.elastic.membership.messages import (
    ActivateGeneration,
    Connect,
    Departed,
    Done,
    Formed,
    FormGeneration,
    Heartbeat,
    Member,
    PhaseTimed,
    Process,
    Ready,
    RecutFailed,
    StartGeneration,
    StateId,
    processes_of,
)
from swift.elastic.transport.messages import (
    CHECKPOINT_ANSWERS,
    WORKER_COMMANDS,
    WORKER_MESSAGES,
    Begin,
    DataUnreadable,
    FormGroup,
    Halt,
    Hang,
    Planned,
    Record,
    SnapshotKept,
    SnapshotMissed,
    Stop,
)
from swift.errors import RunError, SettingError
from swift.topology import Topology

MEMBER = Member(Process((1, 2)), 3)
OTHER = Member(Process((0, 0), rank=1), 0)


@pytest.mark.parametrize(
    "order",
    [
        FormGroup(FormGeneration(4, (MEMBER, OTHER), after=None), "127.0.0.1:7"),
        FormGroup(FormGeneration(5, (OTHER,), after=17), "127.0.0.1:7"),
        Connect(4, (MEMBER, OTHER)),
        StartGeneration(ActivateGeneration(4, StateId(3, 16), (MEMBER,)), written=15, is_restored=True),
        StartGeneration(ActivateGeneration(1, None, ())),
        Begin(40),
        Halt(2, 9),
        Hang(),
        Stop(),
    ],
)
def test_a_command_comes_through(order):
    assert WORKER_COMMANDS.read(WORKER_COMMANDS.line(order)) == order


@pytest.mark.parametrize(
    "news",
    [
        Ready(MEMBER, 2.5, 7),
        Departed(MEMBER, 4, 2.5),
        Formed(MEMBER, 4, frozenset({StateId(3, 7), StateId(3, 8)}), 2.5),
        Formed(MEMBER, 4, frozenset(), 2.5),
        Formed(
            MEMBER, 4, frozenset(), 2.5, frozenset({(MEMBER.process, StateId(3, 7)), (OTHER.process, StateId(2, 7))})
        ),
        Heartbeat(MEMBER, 4, 9, 8, 2.5),
        PhaseTimed(MEMBER, 4, "connect", 0.25, 2.5),
        Record({"step": 4, "loss": 2.5}),
        Planned(4, {"failed": ["0:1"], "plan": {"version": 1}}),
        SnapshotKept(MEMBER, StateId(4, 9), 2.5),
        SnapshotKept(MEMBER, StateId(4, 9), None),
        SnapshotMissed(MEMBER, StateId(4, 9), "No space left on device"),
        RecutFailed(MEMBER, 4, "the plan is missing", 2.5),
        Done(MEMBER, 4, 2.5),
        DataUnreadable(MEMBER, 4, "t.bin has shrunk"),
    ],
)
def test_what_a_member_says_comes_through(news):
    said = {name: value for name, value in news._asdict().items() if name not in ("member", "time")}
    line = WORKER_MESSAGES.line_of(type(news), **said)
    assert line.endswith("\n")
    assert WORKER_MESSAGES.read(line, member=MEMBER, time=2.5) == news


def test_a_line_that_is_not_ours_is_an_error():
    for line in ("Segmentation fault\n", "[1]\n", '{"kind": "song"}\n'):
        with pytest.raises(RunError, match="not a message between processes"):
            WORKER_MESSAGES.read(line, member=MEMBER, time=0.0)
        with pytest.raises(RunError, match="not a message between processes"):
            WORKER_COMMANDS.read(line)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"kind": "Halt", "number": 2}', "Halt has the fields number, after"),
        ('{"kind": "Halt", "number": 2, "after": 3, "at": 4}', "Halt has the fields number, after"),
        ('{"kind": "Halt", "number": "2", "after": 3}', "number is '2', not of type int"),
        ('{"kind": "Halt", "number": true, "after": 3}', "number is True, not of type int"),
        ('{"kind": "Halt", "number": 2.0, "after": 3}', "number is 2.0, not of type int"),
        ('{"kind": "Connect", "number": 2, "members": [[[1, 2], 3]]}', "members is 1, not a list"),
        ('{"kind": "Connect", "number": 2, "members": {}}', "members is {}, not a list"),
        ('{"kind": "Connect", "number": 2, "members": [[[[1], 0], 3]]}', r"members is \[1\], not a list of 2"),
        ('{"kind": ["Halt"]}', "not of type str"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_a_line_that_does_not_fit_is_refused_and_the_error_says_why(line, reason):
    with pytest.raises(RunError, match=reason) as caught:
        WORKER_COMMANDS.read(line)
    assert len(str(caught.value)) < 500


def test_only_the_kinds_of_a_codec_are_read_and_written():
    with pytest.raises(RunError, match="unknown type"):
        WORKER_MESSAGES.read(WORKER_COMMANDS.line(Stop()), member=MEMBER, time=0.0)
    with pytest.raises(RunError, match="what is 'drop', not one of"):
        CHECKPOINT_ANSWERS.read(
            '{"kind": "CommandFailed", "what": "drop", "step": null, "reason": "", "generation": 0}'
        )
    with pytest.raises(AssertionError, match="not a message of this codec"):
        WORKER_COMMANDS.line_of(Done, number=1)


def test_a_line_cannot_say_who_it_is_from():
    line = '{"kind": "Done", "number": 1, "member": [[[0, 0], 0], 0]}'
    assert WORKER_MESSAGES.read(line, member=MEMBER, time=0.0).member == MEMBER


WORKERS = processes_of(Topology(2, 2))


@pytest.mark.parametrize(
    "line",
    [
        *("kill 1:1", "step 3: kill", "step -1: kill 1:1", "step 3: stop 1:1", "step 3: kill 2:0", "step 9: kill 1:1"),
        "step 3: kill 1:1 rank 1",
    ],
)
def test_a_chaos_line_that_means_nothing_is_told(line):
    with pytest.raises(SettingError, match="--chaos") as told:
        parse_chaos([line], Topology(2, 2), WORKERS, 9)
    assert line in str(told.value)


def test_who_is_not_harmed_before_cannot_come_back():
    with pytest.raises(SettingError, match=r"step 3: restart 1:1.*no fault"):
        parse_chaos(["step 3: kill 1:1", "step 3: restart 1:1"], Topology(2, 2), WORKERS, 9)


def test_a_rank_is_named_where_it_is_a_process():
    topology = Topology(1, 1, 4)
    chaos = parse_chaos(["step 3: freeze 0:0 rank 2"], topology, processes_of(topology, by_rank=True), 9)
    assert chaos.due(3) == [(3, "freeze", Process((0, 0), rank=2))]


def test_who_is_killed_twice_comes_back_twice():
    lines = ["step 9: restart 1:1", "step 2: kill 1:1", "step 4: restart 1:1", "step 6: kill 1:1", "step 6: hang 0:0"]
    chaos = parse_chaos(lines, Topology(2, 2), WORKERS, 99)
    one, other = Process((1, 1)), Process((0, 0))
    assert not chaos.keeps_down(one, 1)  # who dies of itself is started again at once
    assert [fault.process for fault in chaos.due(3)] == [one]
    assert [chaos.keeps_down(one, step) for step in (3, 4, 5)] == [True, False, False]
    assert [fault.process for fault in chaos.due(7)] == [other, one]
    assert [chaos.keeps_down(one, step) for step in (7, 9)] == [True, False]
    assert chaos.keeps_down(other, 10**9)
    assert chaos.due(10**9) == []
