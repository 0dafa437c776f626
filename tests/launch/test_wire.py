"""What the supervisor and a process say to each other comes through as it was meant, and chaos is what was written."""

import pytest

from swift.errors import SettingError
from swift.launch.chaos import parse_chaos
from swift.launch.wire import (
    Done,
    Order,
    Stop,
    beat_line,
    done_line,
    formed_line,
    order_line,
    read_message,
    read_order,
    ready_line,
)
from swift.mesh.epochs import Beat, Form, Formed, Go, Member, Process, Ready
from swift.topology import Topology

MEMBER = Member(Process((1, 2)), 3)
OTHER = Member(Process((0, 0), rank=1), 0)


@pytest.mark.parametrize(
    "order",
    [
        Order(Form(4, (MEMBER, OTHER), after=None), "127.0.0.1:7"),
        Order(Form(5, (OTHER,), after=17), "127.0.0.1:7"),
        Go(4, 16, (MEMBER,)),
        Go(1, None, ()),
        Stop(),
    ],
)
def test_a_command_comes_through(order):
    assert read_order(order_line(order)) == order


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (ready_line(), Ready(MEMBER, 2.5)),
        (formed_line(4, {7, 8}), Formed(MEMBER, 4, frozenset({7, 8}), 2.5)),
        (formed_line(4, []), Formed(MEMBER, 4, frozenset(), 2.5)),
        (beat_line(4, 9, 8), Beat(MEMBER, 4, 9, 8, 2.5)),
        (done_line(), Done(MEMBER)),
    ],
)
def test_what_a_member_says_comes_through(line, message):
    assert line.endswith("\n")
    assert read_message(line, MEMBER, 2.5) == message


@pytest.mark.parametrize(
    "line",
    ["kill 1:1", "step 3: kill", "step -1: kill 1:1", "step 3: stop 1:1", "step 3: kill 2:0", "step 9: kill 1:1"],
)
def test_a_chaos_line_that_means_nothing_is_told(line):
    with pytest.raises(SettingError, match="--chaos") as told:
        parse_chaos([line], Topology(2, 2), 9)
    assert line in str(told.value)


def test_who_is_not_killed_before_cannot_come_back():
    with pytest.raises(SettingError, match=r"step 3: restart 1:1.*not killed"):
        parse_chaos(["step 3: kill 1:1", "step 3: restart 1:1"], Topology(2, 2), 9)


def test_who_is_killed_twice_comes_back_twice():
    lines = ["step 9: restart 1:1", "step 2: kill 1:1", "step 4: restart 1:1", "step 6: kill 1:1", "step 6: kill 0:0"]
    chaos = parse_chaos(lines, Topology(2, 2), 99)
    one, other = Process((1, 1)), Process((0, 0))
    assert not chaos.keeps_down(one, 1)  # who dies of itself is started again at once
    assert chaos.to_kill(3) == [one]
    assert [chaos.keeps_down(one, step) for step in (3, 4, 5)] == [True, False, False]
    assert chaos.to_kill(7) == [other, one]
    assert [chaos.keeps_down(one, step) for step in (7, 9)] == [True, False]
    assert chaos.keeps_down(other, 10**9)
    assert chaos.to_kill(10**9) == []
