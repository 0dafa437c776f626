"""Real processes of pipelines that are cut differently, or twice: killed, back, and going back to a checkpoint."""

import itertools

import numpy as np
import pytest

from swift.runlog.reading import read_run
from tests.elastic.runs import NO_CHECKPOINTS, losses, tell, whole, write_config

pytestmark = pytest.mark.slow
APART = {"Experiment__cut": ((3, 1), (1, 3)), "Experiment__microbatches": (1, 3)}
"""One pipeline has stages of three layers and one, the other, which runs most micro-batches, of one and three."""
TWICE = {"Experiment__planner": "v"}
"""Two runs of layers a worker: the first and the last on stage 0, those between them on stage 1."""
SMALL = {"ModelConfig__num_layers": 4, "ModelConfig__model_dim": 16, "ModelConfig__sequence_length": 16}


def config_of(tmp_path, ranks, steps, **settings):
    """Four layers in two pipelines of two stages; with ``APART``, no two workers hold the same of three chunks."""
    return write_config(tmp_path, (2, 2, ranks), steps, **SMALL, **settings)


@pytest.mark.parametrize(
    ("cut", "ranks", "who"),
    [(APART, 1, "0:0"), (APART, 1, "1:1"), (APART, 2, "1:1"), (TWICE, 1, "0:0"), (TWICE, 2, "1:1")],
)
def test_who_is_killed_gets_its_blocks_back_from_others(tmp_path, cut, ranks, who):
    """A process for each worker, or one for each expert rank; the others continue, and then all do."""
    config, run_dir = config_of(tmp_path, ranks, 400, **cut), tmp_path / "run"
    chaos = ["--chaos", f"step 20: kill {who}", f"step 21: restart {who}"]
    code, said = tell(config, "--processes", 4 * ranks, "--run-dir", run_dir, *chaos)
    assert code == 0, said
    np.testing.assert_allclose(losses(run_dir), whole(config), rtol=1e-8)
    run = read_run(run_dir)
    live = [count for count, _ in itertools.groupby(record["live_workers"] for record in run.metrics)]
    assert live == [4, 3, 4]
    assert [event["event"] for event in run.events].count("recovery") == 1


def survives(tmp_path, cut, *killed):
    """Kills workers at iteration 15 of a run that saves every tenth, and checks its losses; returns what it said."""
    config, run_dir = config_of(tmp_path, 1, 30, **cut, CheckpointConfig__every=10), tmp_path / "run"
    chaos = [f"step 15: kill {worker}" for worker in killed]
    code, said = tell(config, "--processes", 4, "--run-dir", run_dir, "--chaos", *chaos, "--prepare", "none")
    assert code == 0, said
    np.testing.assert_allclose(losses(run_dir), whole(config, *NO_CHECKPOINTS), rtol=1e-8)
    return said


def test_a_chunk_that_nobody_has_comes_from_a_checkpoint(tmp_path):
    """Both workers that hold the middle chunk die at once, while each stage has a live worker."""
    said = survives(tmp_path, APART, "0:0", "1:1")
    assert "layers of stages 0 and 1 have no live process; waiting for one to rejoin" in said


def test_two_runs_a_worker_of_which_a_whole_stage_dies_come_from_a_checkpoint(tmp_path):
    """Its file has the cut of one run a worker; the new processes get two from it."""
    said = survives(tmp_path, TWICE, "0:0", "1:0")
    assert "stage 0 has no live process; waiting for one to rejoin" in said
    assert any(event["event"] == "restore" for event in read_run(tmp_path / "run").events)
