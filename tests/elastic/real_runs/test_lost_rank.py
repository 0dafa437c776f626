"""One pipeline with a process for each expert rank, some of which are killed: the others continue with fewer ranks.

No token is ever dropped here, so the number of ranks changes nothing but the order of sums.
"""

import os
import shutil
import signal
import time

import numpy as np
import pytest

from swift.runlog.reading import read_run
from tests.elastic.runs import (
    NO_CHECKPOINTS,
    go_on,
    launched,
    losses,
    members,
    scratch,
    tell,
    wait_for,
    wait_for_steps,
    whole,
    write_config,
)

pytestmark = pytest.mark.slow
DROPLESS = {"SlotCapacity__factor": None, "Experiment__sequences_per_microbatch": 4}
EXACT = "rank 2 is lost: dense and experts 0-3: snapshot of rank 3, 0 steps old"


def config_for(tmp_path, steps, **settings):
    return write_config(tmp_path, (1, 1, 4), steps, **DROPLESS, **settings)


def run(config, *arguments):
    """Runs to the end: what was said, and the run."""
    run_dir = config.parent / "run"
    code, said = tell(config, "--processes", 4, "--run-dir", run_dir, *arguments)
    assert code == 0, said
    return said, read_run(run_dir)


def live_ranks(found):
    """The ranks of the iterations, each number once in a row."""
    ranks = [record["live_ranks"] for record in found.metrics]
    return [count for nth, count in enumerate(ranks) if ranks[nth - 1 : nth] != [count]]


def test_the_others_go_on_without_a_killed_rank_and_nothing_is_lost(tmp_path):
    config = config_for(tmp_path, 40, CheckpointConfig__snapshot_every=1, CheckpointConfig__every=30)
    said, found = run(config, "--chaos", "step 10: kill 0:0 rank 2")
    assert EXACT in said
    assert live_ranks(found) == [4, 3]
    np.testing.assert_allclose(losses(tmp_path / "run"), whole(config, *NO_CHECKPOINTS), rtol=1e-8)
    (reshard,) = [event for event in found.events if event["event"] == "reshard"]
    assert (reshard["lost"], reshard["updates_lost"], reshard["plt"]) == (["0:0 rank 2"], [0, 0], 0.0)
    saved = [event for event in found.events if event["event"] == "checkpoint"]
    assert [(event["step"], event["experts"]) for event in saved] == [(30, "all"), (40, "all")]


def test_a_rank_that_comes_back_is_taken_in_again(tmp_path):
    config = config_for(tmp_path, 10**6, CheckpointConfig__snapshot_every=1)
    with launched(config, "--prepare", "none", processes=4) as process:
        wait_for(process, "running with 4 processes")
        wait_for_steps(process, config, 3)
        before = members(config)
        for rank in (" rank 2", ""):
            os.kill(members(config)[f"0:0{rank}"], signal.SIGKILL)
            wait_for(process, "on 3 ranks instead of 4")
            wait_for(process, "on 4 ranks instead of 3")
            wait_for(process, "with 4 processes")
        assert members(config)["0:0 rank 1"] == before["0:0 rank 1"]
        go_on(process, config)
    found = read_run(tmp_path / "run")
    assert live_ranks(found) == [4, 3, 4, 3, 4]
    reshards = [event for event in found.events if event["event"] == "reshard"]
    assert [event.get("lost", []) for event in reshards] == [["0:0 rank 2"], [], ["0:0"], []]


def test_what_a_rank_and_its_neighbour_had_comes_from_replicas_and_storage(tmp_path):
    config = config_for(tmp_path, 40, CheckpointConfig__snapshot_every=1, CheckpointConfig__every=10)
    chaos = ["--chaos", "step 23: kill 0:0 rank 2", "step 23: kill 0:0 rank 3"]
    said, found = run(config, "--prepare", "none", *chaos)
    assert "rank 2 is lost: weights of dense" in said
    assert "their moments: storage, step 20" in said
    assert live_ranks(found) == [4, 2]
    control = whole(config, *NO_CHECKPOINTS)
    np.testing.assert_allclose(losses(tmp_path / "run")[:23], control[:23], rtol=1e-8)
    np.testing.assert_allclose(losses(tmp_path / "run"), control, rtol=0.05)  # of two ranks' moments three are lost


def test_the_copy_is_all_it_takes_where_the_memory_of_the_dead_is_gone(tmp_path):
    """A loss as with its node."""
    config = config_for(tmp_path, 10**6, CheckpointConfig__snapshot_every=1)
    with launched(config, "--prepare", "none", "--restarts", "0", processes=4) as process:
        wait_for(process, "running with 4 processes")
        wait_for_steps(process, config, 3)
        os.kill(members(config)["0:0 rank 2"], signal.SIGKILL)
        for directory in scratch(process.pid):
            for mine in directory.rglob("0-0-2"):
                if "copies" not in mine.parts:
                    shutil.rmtree(mine)
        wait_for(process, "on 3 ranks instead of 4")
        assert EXACT in process.stderr.readline()
        wait_for(process, "with 3 processes")
        go_on(process, config)


@pytest.mark.parametrize("delay_s", [0.0, 0.5, 2.0])
def test_another_rank_is_killed_while_the_others_recover(tmp_path, delay_s):
    config = config_for(tmp_path, 10**6, CheckpointConfig__snapshot_every=1)
    with launched(config, "--prepare", "none", processes=4) as process:
        wait_for(process, "running with 4 processes")
        wait_for_steps(process, config, 3)
        there = members(config)
        os.kill(there["0:0 rank 2"], signal.SIGKILL)
        wait_for(process, "rank 2 died")
        time.sleep(delay_s)
        os.kill(there["0:0"], signal.SIGKILL)
        wait_for(process, "on 4 ranks instead of")
        wait_for(process, "with 4 processes")
        go_on(process, config)


def test_without_copies_and_checkpoints_the_run_stops_in_one_line(tmp_path):
    config = config_for(tmp_path, 40)
    chaos = ["--chaos", "step 10: kill 0:0 rank 2"]
    code, said = tell(config, "--processes", 4, "--run-dir", tmp_path / "run", "--prepare", "none", *chaos)
    assert code == 3
    assert "rank 2 is lost, and no memory and no checkpoint has" in said.splitlines()[-1]


@pytest.mark.parametrize("processes", [1, 4])
def test_snapshots_that_nobody_would_go_on_from_are_refused(tmp_path, processes):
    """One process for all ranks, and a pipeline of two stages."""
    ranks = {1: (1, 1, 4), 4: (1, 2, 2)}[processes]
    config = write_config(tmp_path, ranks, 5, **DROPLESS, CheckpointConfig__snapshot_every=1)
    code, said = tell(config, "--processes", processes, "--run-dir", tmp_path / "run")
    assert code == 2
    assert "CheckpointConfig.snapshot_every = 1: must be 0, unless" in said
    assert len(said.splitlines()) == 1
