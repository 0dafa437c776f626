"""Real processes of which some are killed in the midst of a move of blocks, and the compile service with them."""

import random
from itertools import cycle
from typing import NamedTuple

import numpy as np
import pytest

from tests.elastic.moved_blocks.runs_with_moves import COMPILE_SERVICE, MOVING, PHASES, SMALL, Moment, moving_run
from tests.elastic.runs import EVERY, NO_CHECKPOINTS, losses, wait_for_checkpoint, whole, write_config

pytestmark = pytest.mark.slow


class Cast(NamedTuple):
    """The processes of a move: ``giver`` alone still has the blocks of ``lost``, and ``taker`` is to hold some."""

    giver: str
    taker: str
    lost: str


CASTS = {"recut": Cast("1:1", "0:0", "0:1"), "reassign": Cast("1:0", "0:1", "0:0")}
"""In a recut the first worker of a pipeline takes over the blocks of the second one. Where roles move, the second
worker takes the place of the first one, and leaves its own."""
KEPT, LEFT, ALL_KEPT = "newest written", "left", {"move": "formed", "return": "enter"}
"""Phases from which on the process that reaches them has kept its state in shared memory; which a process that returns
goes through, too; and from which on all have kept their states."""


def moments(seed, every, cast):
    """A moment in each phase of a move and in half of those of a return, half of them a little later than its start.

    Which processes die there is drawn by the seed, as is the moment of the compile service's death. Of all these one
    in ``every``.
    """
    draw = random.Random(seed)
    dying_of = (cast.giver,), (cast.taker,), (cast.giver, cast.taker)
    roles = cycle(draw.sample(dying_of, len(dying_of)))
    found = []
    for kind, phases in PHASES.items():
        number = len(phases) if kind == "move" else len(phases) // 2
        for index, dying in zip(sorted(draw.sample(range(len(phases)), number)), roles, strict=False):
            if kind == "return" and index >= phases.index(LEFT):
                dying = tuple(cast.lost if who == cast.taker else who for who in dying)
            delay_s = draw.choice((0.0, round(draw.uniform(0.001, 0.1), 3)))
            found.append(Moment(kind, phases[index], dying[-1], dying, delay_s))
    phases = PHASES["move"]
    found.append(Moment("move", draw.choice(phases), cast.taker, (COMPILE_SERVICE,)))
    late = draw.choice(phases[phases.index(LEFT) :])
    found.append(Moment("move", late, cast.taker, (COMPILE_SERVICE, cast.giver)))
    return draw.sample(found, len(found) // every)


def may_go_back(moment, cast):
    """Whether all that have the state of a block may die before any of them has kept it in shared memory."""
    phases = PHASES[moment.kind]
    kept = KEPT if moment.dying == (moment.who,) else ALL_KEPT[moment.kind]
    is_kept = phases.index(moment.phase) >= phases.index(kept)
    if not {cast.giver, cast.taker} <= set(moment.dying):
        return moment.kind == "move" and cast.giver in moment.dying and not is_kept
    # Both die. What they had before the move is kept until they have run an iteration after it.
    return not is_kept or moment.delay_s > 0 or moment.phase in ("iterated", "running")


@pytest.mark.parametrize(("adapt", "stages", "every"), [("recut", 2, 1), ("recut", 3, 3), ("reassign", 3, 3)])
def test_who_gives_or_takes_blocks_is_killed_in_the_midst_of_it(marks, adapt, stages, every):
    """The run goes back to a checkpoint, the newest, only where a state may be nowhere else; no loss changes."""
    cast = CASTS[adapt]
    settings = SMALL | MOVING | EVERY | {"ModelConfig__num_layers": stages, "Experiment__adapt": adapt}
    config, num_processes = write_config(marks, (2, stages, 1), 10**6, **settings), 2 * stages
    chosen = moments(stages, every, cast)
    assert len(chosen) == 25 // every
    (marks / "pace").write_text("0.1")
    with moving_run(config, processes=num_processes) as run:
        wait_for_checkpoint(run.process, config)
        for moment in chosen:
            begun = run.num_events
            dies(run, moment, cast, num_processes)
            assert may_go_back(moment, cast) or not run.events("restore", after=begun), moment
            died = {event["process"] for event in run.events("process_died", after=begun)}
            assert died == {cast.lost, *moment.dying} - {COMPILE_SERVICE}, (
                moment
            )  # nobody waits for the dead until it ends
        run.stop()
    assert_newest_is_restored(run)
    found = losses(marks / "run")
    np.testing.assert_allclose(found, whole(config, "--stop-at", len(found), *NO_CHECKPOINTS), rtol=1e-8)


def dies(run, moment, cast, num_processes):
    """Loses a worker, has blocks moved to the survivors and back, and processes killed at a moment of it."""
    begun = run.num_events
    run.mark("away", cast.lost)
    if moment.kind == "move":
        run.arm(moment)
        run.kill(cast.lost)
        run.wait_for_moment(moment, begun)
        if moment.dying == (COMPILE_SERVICE,):
            run.wait_for_going_on(num_processes - 1, begun, "recut")
        run.mark("away")
    else:
        run.kill(cast.lost)
        run.wait_for_going_on(num_processes - 1, begun, "recut")
        run.arm(moment)
        begun = run.num_events
        run.mark("away")
        run.wait_for_moment(moment, begun)
    run.wait_for_going_on(num_processes, last_death(run))


def last_death(run):
    """Number of events up to the last death."""
    return max(number for number, event in enumerate(run.events(), 1) if event["event"] == "process_died")


def assert_newest_is_restored(run):
    """Each return to a checkpoint names it, and there was no newer one."""
    newest, said = 0, "".join(run.said)
    for event in run.events("checkpoint", "restore"):
        if event["event"] == "restore":
            assert event["step"] == newest
            assert f"all resume from the checkpoint of iteration {newest}" in said
        else:
            newest = event["step"]
