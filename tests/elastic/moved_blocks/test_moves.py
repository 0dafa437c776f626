"""Real processes that take over blocks of a lost one, and give them back when it returns."""

import numpy as np
import pytest

from tests.elastic.moved_blocks.runs_with_moves import MOVING, SMALL, moving_run
from tests.elastic.runs import EVERY, NO_CHECKPOINTS, losses, newest_checkpoint, wait_for_steps, whole, write_config

pytestmark = pytest.mark.slow


def assert_losses_are_those_without_failures(config):
    found = losses(config.parent / "run")
    np.testing.assert_allclose(found, whole(config, "--stop-at", len(found), *NO_CHECKPOINTS), rtol=1e-8)


@pytest.mark.parametrize(("ranks", "lost_then"), [(1, ()), (1, ("0:0", "1:0")), (2, ())])
def test_survivors_take_over_blocks_and_give_them_back(marks, ranks, lost_then):
    """A process for each worker, or one for each expert rank; a checkpoint of moved blocks is one like any other."""
    config = write_config(marks, (2, 2, ranks), 10**6, **SMALL, **MOVING, **EVERY)
    with moving_run(config, processes=4 * ranks) as run:
        wait_for_steps(run.process, config, 5)
        run.mark("away", "0:1")
        run.kill("0:1")
        run.wait_for_going_on(3 * ranks, 0, "recut")
        saved = newest_checkpoint(config) or 0
        run.wait(lambda: (newest_checkpoint(config) or 0) > saved, "a checkpoint of moved blocks")
        if lost_then:  # at once: a survivor of the first death would keep its state where its successor finds it
            run.kill(*lost_then)
            run.wait(lambda: run.events("restore"), "the checkpoint is restored")
        begun = run.num_events
        run.mark("away")
        run.wait_for_going_on(4 * ranks, begun)
        run.stop()
    moves = run.events("recut")
    assert all(
        move["connect_s"] is move["load_program_s"] is None for move in moves
    )  # connections stay, programs were loaded
    assert [move["cuts"] for move in moves] == len(moves) * [[[2, 0], [1, 1]]]
    assert len(run.events("restore")) == bool(lost_then)
    assert_losses_are_those_without_failures(config)


def test_sixty_steps_with_two_failures_two_moves_and_two_returns(marks):
    """Killed processes of three pipelines; while both are away no blocks move, as that would save no time."""
    config = write_config(marks, (3, 2, 1), 60, **SMALL, **MOVING)

    (marks / "gate").write_text("10")
    with moving_run(config, processes=6) as run:
        wait_for_steps(run.process, config, 10)
        run.mark("away", "0:1")
        run.kill("0:1")
        run.go_to(15, 5, "recovery")
        run.go_to(25, 5, "recut")
        run.mark("away", "0:1 2:0")
        run.kill("2:0")
        run.go_to(39, 4, "recovery")
        run.mark("away", "2:0")
        run.go_to(45, 5, "rejoin")
        run.go_to(51, 5, "recut")
        run.mark("away")
        run.go_to(51, 6, "rejoin")
        run.mark("gate")
        assert run.process.wait(timeout=120) == 0
    changes = run.events("process_died", "recovery", "recut", "rejoin", "restore")
    assert [event["event"] for event in changes] == [
        *("process_died", "recovery", "recut"),
        *("process_died", "recovery", "rejoin", "recut", "rejoin"),
    ]
    assert [event["cuts"] for event in run.events("recut")] == [[[2, 0], [1, 1], [1, 1]], [[1, 1], [1, 1], [0, 2]]]
    assert len(losses(marks / "run")) == 60
    assert_losses_are_those_without_failures(config)


def test_sixty_steps_in_which_processes_take_the_places_of_others(marks):
    """First roles move within a pipeline; then, cut anew, a process goes to the other pipeline; both are undone."""
    settings = SMALL | MOVING | {"ModelConfig__num_layers": 4, "Experiment__adapt": "auto"}
    config = write_config(marks, (2, 3, 1), 60, **settings, Experiment__expected_downtime=1e9)
    (marks / "gate").write_text("10")
    with moving_run(config, processes=6) as run:
        wait_for_steps(run.process, config, 10)
        run.mark("away", "0:1")
        run.kill("0:1")
        run.go_to(15, 5, "recovery")
        run.go_to(25, 5, "recut")
        run.mark("away", "0:1 0:2")
        run.kill("0:2")
        run.go_to(31, 4, "recovery")
        run.go_to(41, 4, "recut")
        run.mark("away")
        run.go_to(51, 6, "rejoin")
        run.mark("gate")
        assert run.process.wait(timeout=120) == 0
    assert [event["positions"] for event in run.events("recut")] == [{"0:0": "0:1"}, {"1:2": "0:2"}]
    assert run.events("restore") == []
    assert len(losses(marks / "run")) == 60
    assert_losses_are_those_without_failures(config)


def test_a_process_that_does_not_know_the_cut_is_told_in_a_sentence_and_blocks_stay(marks):
    config = write_config(marks, (2, 2, 1), 10**6, **SMALL, **MOVING)
    (marks / "forgetful").write_text("1:0")
    with moving_run(config, processes=4) as run:
        wait_for_steps(run.process, config, 5)
        run.mark("away", "0:1")
        run.kill("0:1")
        run.wait(lambda: run.events("recut_failed"), "a refusal")
        begun = run.num_events
        run.mark("away")
        run.wait_for_going_on(4, begun)
        run.stop()
    assert [event["process"] for event in run.events("process_died")] == ["0:1"]
    assert run.events("recut", "restore") == []
    assert not [event for event in run.events("compiled", after=begun) if "cuts" in event]  # nobody seeks cuts any more
    reason = "the plan for it is missing among the programs of the run"
    assert f"process 1:0 cannot move blocks: {reason}; keeping the current layer assignment" in "".join(run.said)
    assert_losses_are_those_without_failures(config)
