"""Runs that are to stop: they still recover, and admit only processes without which they could not end."""

import pytest

from swift.elastic.membership.messages import FormGeneration, Ready, RestartAll, StageLost, StopRequested, processes_of
from swift.topology import Topology
from tests.elastic.membership.script import A, B, C, D, found, lost, once, script_live


@pytest.mark.parametrize("policy", [{}, {"recovery": "restart", "joins_once": True}])
def test_a_run_that_is_to_stop_admits_nobody_and_still_recovers(policy):
    script = once() if policy else script_live()
    if not policy:
        script.die(D)
        assert script.tick() == [FormGeneration(2, script.now(A, B, C))]
    else:
        script.start(A, B, C)
        script.ready(A, B, C)
        script.tick()
    script.formed({process: {4} for process in (A, B, C)}, of=1)
    script.tick()
    script.start(D)
    script.membership, commands = script.membership.on(StopRequested(script.time))
    assert commands == ()
    script.ready(D)
    script.beat(dict.fromkeys([A, B, C], 6))
    assert script.tick() == []
    expected = [RestartAll("0:0 died")] if policy else []
    assert script.die(A) == expected
    assert script.tick() == ([] if policy else [FormGeneration(3, script.now(B, C))])


def test_a_run_that_is_to_stop_admits_who_is_the_last_of_a_stage():
    """Without it the run could not end: nobody has its part of the state."""
    script = script_live()
    script.die(D)
    script.tick()
    script.formed({process: {4} for process in (A, B, C)}, of=1)
    script.tick()
    script.membership, _ = script.membership.on(StopRequested(script.time))
    script.start(D)
    script.ready(D)
    script.die(B)
    assert script.tick() == [StageLost((1,))]
    assert script.tick() == [FormGeneration(3, script.now(A, C, D))]


def test_a_run_that_is_to_stop_admits_no_part_of_a_worker():
    """One of a worker's two processes has died and is back."""
    processes = processes_of(Topology(2, 1, 2), by_rank=True)
    script = script_live(processes)
    script.membership, _ = script.membership.on(StopRequested(script.time))
    script.die(processes[3])
    assert script.tick() == [FormGeneration(2, script.now(*processes[:2]))]
    script.start(processes[3])
    script.ready(processes[3])
    script.tell(Ready, processes[0], 0, 2)
    assert script.tick() == [FormGeneration(3, script.now(*processes[:2]))]


def test_blocks_do_not_move_in_a_run_that_is_to_stop():
    script = lost()
    script.membership, _ = script.membership.on(StopRequested(script.time))
    assert found(script) == []
