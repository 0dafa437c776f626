"""A fault that waits happens once the programs that follow it are prepared, and no earlier."""

import pytest

from swift.elastic.coordinator.fault_injection import parse_chaos
from swift.elastic.membership.messages import Process, processes_of
from swift.topology import Topology

TOPOLOGY = Topology(2, 2)
ONE, OTHER = Process((0, 0)), Process((1, 1))


@pytest.fixture
def chaos():
    lines = ["step 3: kill 0:0 once compiled", "step 4: restart 0:0", "step 3: kill 1:1"]
    return parse_chaos(lines, TOPOLOGY, processes_of(TOPOLOGY, by_rank=False), 99)


def test_a_fault_that_waits_is_due_once_its_programs_are_there(chaos):
    assert [fault.process for fault in chaos.due(3, lambda process: process == OTHER)] == [OTHER]
    assert not chaos.keeps_down(ONE, 50)
    assert chaos.due(50, lambda process: False) == []  # noqa: ARG005
    assert chaos.still_waiting(2) == []
    assert [str(fault) for fault in chaos.still_waiting(3)] == ["step 3: kill 0:0"]
    assert chaos.due(2, lambda process: True) == []  # noqa: ARG005
    assert [fault.process for fault in chaos.due(51, lambda process: process == ONE)] == [ONE]
    assert chaos.due(99, lambda process: True) == []  # noqa: ARG005
    assert chaos.still_waiting(99) == []
    assert not chaos.keeps_down(ONE, 51)  # it may come back at once
