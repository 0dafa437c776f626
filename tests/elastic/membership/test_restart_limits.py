"""Restarts of all processes that do not help: a process that is broken is left out, and a run without progress ends."""

import pytest

from swift.elastic.membership.messages import (
    AbortRun,
    ExcludeProcess,
    FormGeneration,
    Kill,
    Ready,
    RestartAll,
    Retire,
    StartProcess,
    StopRun,
    processes_of,
)
from swift.topology import Topology
from tests.elastic.membership.script import (
    LIMITS,
    RANKS,
    A,
    B,
    C,
    D,
    Script,
    after_go,
    may_restart,
    script_live,
)

ALL = A, B, C, D
THRICE = "died 3 times in a row before it had finished an iteration: killed"
PLATFORMS = pytest.mark.parametrize("joins_once", [False, True])
"""On CPU, and on accelerators."""
# Commands are compared by what is printed of them: tuples of two kinds are equal where their fields are.


def restarting(processes=ALL, **policy):
    """A run whose processes are all started again after a death, and which has done some iterations."""
    return script_live(processes, recovery="restart", **policy)


def form(script, *processes):
    """All but the dead are started again, and form a generation."""
    script.start(*processes)
    script.ready(*processes)
    assert [type(command) for command in script.tick()] == [FormGeneration]
    return script


def go(script, *processes):
    """The same, and the generation runs."""
    form(script, *processes).formed(dict.fromkeys(processes, (4,)), of=1)
    script.tick()
    after_go(script)
    return script


def end(script, who, *others):
    """One dies, and unless that ends the run the others are killed with it; the commands that follow.

    At its start it is found out before whether others fail with it.
    """
    commands = script.die(who) or soon(script)
    if not isinstance(commands[0], AbortRun):
        assert script.die(*others) == []
    script.tick()
    return commands


def soon(script, after=1.1):
    script.time += after
    script.alive()
    return script.tick()


def fails_at_its_start(script, who, others, times=1, begin=form):
    """So often in a row; the commands that follow the last."""
    for _ in range(times):
        commands = end(begin(script, who, *others), who, *others)
    return commands


@PLATFORMS
@pytest.mark.parametrize("begin", [form, go])
def test_the_others_go_on_without_one_that_fails_three_times_before_its_first_iteration(joins_once, begin):
    script = restarting(joins_once=joins_once)
    assert end(script, D, A, B, C) == [RestartAll("1:1 died")], "it has worked"
    assert fails_at_its_start(script, D, (A, B, C), 2, begin) == [RestartAll("1:1 died")]
    commands = fails_at_its_start(script, D, (A, B, C), 1, begin)
    assert repr(commands) == repr([ExcludeProcess(D, THRICE), RestartAll("1:1 died")])
    assert may_restart(script) == [StartProcess(A), StartProcess(B), StartProcess(C)]
    script.start(A, B, C)
    script.ready(A, B, C)
    assert script.tick() == [FormGeneration(script.membership.number, script.now(A, B, C))]


@PLATFORMS
def test_several_are_left_out_one_after_the_other_and_the_last_of_a_stage_ends_the_run(joins_once):
    script = restarting(joins_once=joins_once)
    end(script, D, A, B, C)
    fails_at_its_start(script, D, (A, B, C), 3)
    assert repr(fails_at_its_start(script, A, (B, C), 3)[0]) == repr(ExcludeProcess(A, THRICE))
    assert repr(fails_at_its_start(script, B, (C,), 3, begin=go)) == repr([AbortRun(B, THRICE)])


def test_who_finishes_an_iteration_in_between_is_not_left_out():
    script = restarting()
    end(script, D, A, B, C)
    fails_at_its_start(script, D, (A, B, C), 2)
    go(script, *ALL)
    script.beat(dict.fromkeys(ALL, 5))
    script.beat(dict.fromkeys(ALL, 6))
    assert end(script, D, A, B, C) == [RestartAll("1:1 died")]
    assert fails_at_its_start(script, D, (A, B, C), 2) == [RestartAll("1:1 died")]


def test_who_was_killed_with_another_is_not_left_out():
    script = restarting()
    end(script, D, A, B, C)
    for who in (D, C, B, A):
        assert fails_at_its_start(script, who, {*ALL} - {who}, 2) == [RestartAll(f"{who} died")]


@pytest.mark.parametrize("needs_all", [False, True])
def test_without_another_worker_of_its_stage_the_run_ends(needs_all):
    """In the second run, each stage has another one, but none can be missing."""
    processes = ALL if needs_all else processes_of(Topology(1, 2))
    script = restarting(processes, needs_all=needs_all, joins_once=needs_all)
    who, *others = processes
    end(script, who, *others)
    assert repr(fails_at_its_start(script, who, others, 3)) == repr([AbortRun(who, THRICE)])


def test_one_pipeline_goes_on_with_fewer_ranks():
    script = restarting(RANKS, is_elastic=True)
    *others, who = RANKS
    end(script, who, *others)
    assert repr(fails_at_its_start(script, who, others, 3)[0]) == repr(ExcludeProcess(who, THRICE))
    script.start(*others)
    script.ready(*others)
    assert script.tick() == [FormGeneration(script.membership.number, script.now(*others))]


def fails_before_it_is_ready(script, who, times):
    for _ in range(times):
        script.start(who)
        commands = script.die(who)
    return commands


def test_the_first_generation_does_not_wait_for_one_that_never_comes():
    script = Script(recovery="restart")
    script.start(A, B, C)
    script.ready(A, B, C)
    assert repr(fails_before_it_is_ready(script, D, 3)) == repr([ExcludeProcess(D, THRICE)])
    assert script.tick() == [FormGeneration(1, script.now(A, B, C))]


def test_where_others_fail_too_before_the_first_iteration_of_the_run_it_ends():
    script = Script(recovery="restart")
    assert fails_before_it_is_ready(script, A, 2) == fails_before_it_is_ready(script, B, 1) == []
    assert repr(fails_before_it_is_ready(script, D, 3)) == repr([AbortRun(D, THRICE)])


def stalls(script, processes=ALL, entered=5):
    """Members begin an iteration that none ends; the commands that follow."""
    for _ in range(4):
        script.beat(dict.fromkeys(processes, entered))
        assert script.tick(1.5) == []
    script.beat(dict.fromkeys(processes, entered))
    return script.tick(0.5)


WAITED = "no process finished an iteration for 6 s, and all are in 5"
IN_VAIN = "3 generations in a row of the same members finished no iteration"
STOP = StopRun(f"{IN_VAIN}: {WAITED} (where it takes longer: --deadline progress=SECONDS)")


def again(script, *processes):
    """All have been killed, and run again from the same state."""
    script.die(*processes)
    script.tick()
    return go(script, *processes)


def first_stall(script):
    """A generation that has done something, and then hangs."""
    assert stalls(script) == [RestartAll(WAITED)]
    return again(script, *ALL)


def test_three_generations_of_the_same_processes_without_an_iteration_end_the_run():
    script = first_stall(restarting(joins_once=True))
    for _ in range(2):
        assert stalls(script) == [RestartAll(WAITED)]
        again(script, *ALL)
    assert stalls(script) == [STOP]


@pytest.mark.parametrize("recovery", ["live", "restart"])
def test_on_cpu_a_new_generation_is_tried_and_then_a_restart(recovery):
    script = script_live(recovery=recovery)
    for stop in ([RestartAll(WAITED)], [STOP]):
        assert stalls(script) == [FormGeneration(script.membership.number, script.now(*ALL))]
        script.formed(dict.fromkeys(ALL, (4,)), of=1)
        script.tick()
        after_go(script)
        assert stalls(script) == stop
        if stop != [STOP]:
            again(script, *ALL)


@pytest.mark.parametrize("dies", [False, True])
def test_an_iteration_in_between_counts(dies):
    script = first_stall(restarting(joins_once=True))
    for _ in range(2):
        assert stalls(script) == [RestartAll(WAITED)]
        again(script, *ALL)
    script.beat(dict.fromkeys(ALL, 5))
    script.beat({A: 6, B: 5, C: 5, D: 5})
    script.beat(dict.fromkeys(ALL, 6))
    if dies:
        end(script, D, A, B, C)
        go(script, *ALL)
    else:
        assert [type(command) for command in stalls(script, entered=6)] == [RestartAll]
        again(script, *ALL)
    for _ in range(2):
        assert stalls(script) == [RestartAll(WAITED)]
        again(script, *ALL)
    assert stalls(script) == [STOP]


def test_other_members_are_given_three_generations_of_their_own():
    script = first_stall(restarting(joins_once=True))
    for _ in range(2):
        assert stalls(script) == [RestartAll(WAITED)]
        again(script, *ALL)
    end(script, D, A, B, C)
    go(script, A, B, C)
    for _ in range(2):
        assert stalls(script, (A, B, C)) == [RestartAll(WAITED)]
        again(script, A, B, C)
    assert stalls(script, (A, B, C)) == [STOP]


def test_processes_that_cannot_continue_again_and_again_end_the_run():
    script = first_stall(restarting(joins_once=True))
    for _ in range(2):
        script.tell(Ready, A, 0, script.membership.number)
        assert script.tick() == [RestartAll("a process could not continue")]
        again(script, *ALL)
    script.tell(Ready, A, 0, script.membership.number)
    (stop,) = script.tick()
    assert stop.reason.endswith("finished no iteration: a process could not continue")


@pytest.mark.parametrize("others", [(), (A, B, C)])
def test_who_alone_does_not_leave_or_does_not_connect_is_the_one_that_fails(others):
    """Also one that forms a generation by itself."""
    script = restarting(processes_of(Topology(2, 1))[:1] if not others else ALL)
    who = script.membership.processes[-1]
    end(script, who, *others)
    form(script, who, *others).left(who if not others else A)
    for _ in range(4):
        script.alive()
        assert script.tick(1.0) == []
    script.alive()
    late = (who,) if not others else (B, C, D)
    assert script.tick(0.1) == [Kill(member, "did not form generation 2 in 4 s") for member in script.now(*late)]


def test_a_generation_that_has_lost_a_member_has_not_stalled():
    """D can neither be heard nor killed."""
    script = first_stall(restarting(joins_once=True))
    for seconds, expected in [(LIMITS.heartbeat, Kill), (LIMITS.dying, Retire), (0.0, RestartAll)]:
        script.time += seconds + 0.1
        script.beat(dict.fromkeys([A, B, C], 5))
        assert [type(command) for command in script.tick()] == [expected]
    assert script.membership.stalled == ()
