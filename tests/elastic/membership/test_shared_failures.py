"""Failures that several processes share: none of them is taken to be the one that fails, and the run has a limit."""

import pytest

from swift.elastic.membership.messages import FormGeneration, Kill, PhaseTimed, Ready, RestartAll, StopRun
from tests.elastic.membership.script import A, B, C, D, Script
from tests.elastic.membership.test_restart_limits import (
    ALL,
    IN_VAIN,
    PLATFORMS,
    end,
    form,
    go,
    restarting,
    soon,
)

TOGETHER = "0:0, 1:0 died at the same time"


def deaths(script):
    """Deaths of each process that count, and those at its start."""
    return {process: (status.deaths, status.quick_deaths) for process, status in script.membership.statuses.items()}


def connects(script, *processes):
    """All have left the generation before and none gets connected; the commands that follow."""
    form(script, *processes).left(*processes)
    for _ in range(4):
        script.alive()
        assert script.tick(1.0) == []
    script.alive()
    return script.tick(0.1)


def all_are_restarted_twice(script, attempt, reason, deadline):
    """Three attempts of all fail, for which nobody is blamed: then the run ends and names the deadline to raise."""
    before = deaths(script)
    for _ in range(2):
        assert attempt(script, *ALL) == [RestartAll(reason)]
        script.die(*ALL)
        script.tick()
    assert attempt(script, *ALL) == [
        StopRun(f"{IN_VAIN}: {reason} (where it takes longer: --deadline {deadline}=SECONDS)")
    ]
    assert deaths(script) == before


@PLATFORMS
def test_where_none_gets_connected_none_is_taken_to_be_the_one_that_fails(joins_once):
    script = restarting(joins_once=joins_once)
    end(script, D, A, B, C)
    all_are_restarted_twice(script, connects, "no process was connected to all others in 4 s", "forming")


def compiles(script, *processes):
    """All are connected, and none gets its program; the commands that follow."""
    form(script, *processes).left(*processes)
    for process in processes:
        script.tell(PhaseTimed, process, script.membership.number, "connect", 0.1, 0)
    for _ in range(5):
        assert soon(script, 1.2) == []
    return soon(script, 0.1)


@PLATFORMS
def test_where_none_gets_its_program_none_is_taken_to_be_the_one_that_fails(joins_once):
    """From the very first generation of the run, in which nothing is known of anybody."""
    script = Script(recovery="restart", joins_once=joins_once)
    all_are_restarted_twice(script, compiles, "no process had its program in 6 s", "progress")


def test_who_alone_does_not_get_its_program_is_the_one_that_fails():
    script = restarting()
    end(script, D, A, B, C)
    form(script, *ALL).formed(dict.fromkeys([A, B, C], (4,)), of=1)
    script.tell(PhaseTimed, D, 2, "connect", 0.1, 0)
    for _ in range(5):
        assert soon(script, 1.2) == []
    assert soon(script, 0.1) == [Kill(*script.now(D), "did not form generation 2 in 6 s")]
    assert script.die(D) == []
    assert soon(script) == [RestartAll("1:1 died")]
    assert script.membership.statuses[D].quick_deaths == 1


@PLATFORMS
@pytest.mark.parametrize("begin", [form, go])
@pytest.mark.parametrize("first", [True, False])
def test_of_several_that_fail_at_the_same_time_none_is_to_blame(joins_once, begin, first):
    """All meet the same trouble in a new configuration, as too little memory, also in the first one of the run."""
    script = restarting(joins_once=joins_once)
    if first:
        script = Script(recovery="restart", joins_once=joins_once)
    else:
        end(script, D, A, B, C)
    before = deaths(script)
    for expected in [RestartAll(TOGETHER), RestartAll(TOGETHER), StopRun(f"{IN_VAIN}: {TOGETHER}")]:
        begin(script, *ALL)
        assert script.die(C) == []
        assert soon(script, 0.5) == script.die(A) == []
        assert soon(script, 0.6) == [expected]
        script.die(B, D)
        script.tick()
    assert deaths(script) == before


def test_who_dies_after_another_that_failed_alone_was_killed_with_it():
    script = restarting()
    end(script, D, A, B, C)
    form(script, *ALL)
    assert script.die(C) == []
    assert soon(script) == [RestartAll("1:0 died")]
    assert script.die(A, B, D) == []
    assert {process: script.membership.statuses[process].quick_deaths for process in ALL} == {A: 0, B: 0, C: 1, D: 0}


def test_those_that_are_killed_because_they_are_late_together_are_not_to_blame():
    script = restarting()
    end(script, D, A, B, C)
    form(script, *ALL).left(A)
    for _ in range(4):
        assert soon(script, 1.0) == []
    assert [type(command) for command in soon(script, 0.1)] == [Kill] * 3
    assert script.die(B) == []
    assert soon(script) == [], "the others have not died yet"
    assert script.die(C, D) == []
    assert script.tick() == [RestartAll("0:1, 1:0, 1:1 died at the same time")]
    assert [script.membership.statuses[process].quick_deaths for process in ALL] == [0, 0, 0, 0]
    assert len(script.membership.stalled) == 1


def breaks(script, after):
    """All leave, and one cannot connect to the others; the commands that follow."""
    script.left(*ALL)
    assert soon(script, after) == []
    script.tell(Ready, A, 0, script.membership.number)
    return script.tick()


def test_connections_that_fail_for_a_while_do_not_end_a_run():
    """On CPU, where processes live on and try again; at last the limit is the same."""
    script = restarting()
    end(script, D, A, B, C)
    form(script, *ALL)
    for _ in range(6):
        assert [type(command) for command in breaks(script, 1.0)] == [FormGeneration]
    assert len(script.membership.stalled) == 1, "the first, and then none for 6 s"
    assert [type(command) for command in breaks(script, 1.0)] == [FormGeneration]
    stop = StopRun(f"{IN_VAIN}: a process could not continue")
    assert breaks(script, 1.0) == [stop]
    assert deaths(script)[A] == (0, 0)


def test_a_live_generation_in_which_one_cannot_continue_counts_at_once():
    script = restarting()
    end(script, D, A, B, C)
    form(script, *ALL)
    for expected in (FormGeneration, FormGeneration, StopRun):
        script.formed(dict.fromkeys(ALL, (4,)), of=1)
        script.tick()
        script.tell(Ready, A, 0, script.membership.number)
        assert [type(command) for command in script.tick()] == [expected]
