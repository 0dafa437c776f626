"""A run of real processes that resumes with another batch, held against a run in one process that does the same."""

import subprocess

import numpy as np
import pytest

from swift.checkpoint.manifest import checkpoint_path, read_manifest
from swift.runlog.reading import read_run
from tests.elastic.runs import SWIFT, environment, losses, write_config

pytestmark = pytest.mark.long


def test_processes_go_on_with_another_batch_where_the_data_were_left(tmp_path):
    config = write_config(tmp_path, (2, 1, 1), 4, OptimizerConfig__decay_steps=8, CheckpointConfig__every=2)
    change = ("--resume", "--set", "Experiment.num_steps=8", "--set", "Experiment.sequences_per_microbatch=3")
    for command, *options in (("train",), ("launch", "--processes", "2")):
        for more in ((), change):
            words = [*SWIFT, command, *options, str(config), "--run-dir", str(tmp_path / command), *more]
            done = subprocess.run(words, capture_output=True, text=True, env=environment(config), check=False)
            assert done.returncode == 0, done.stderr
    of_one, of_several = tmp_path / "train", tmp_path / "launch"
    np.testing.assert_allclose(losses(of_several), losses(of_one), rtol=1e-8)
    texts = [[e["text"] for e in read_run(run).events if e["event"] == "data_changed"] for run in (of_one, of_several)]
    assert texts[0] == texts[1]
    assert texts[0][0].startswith(
        "iterations have 12 sequences from 5 on (before: 8), beginning with the run's sequence 33"
    )
    for run in (of_one, of_several):
        position = read_manifest(checkpoint_path(run / "checkpoints", 8), "checkpoint").extra["loader"]
        assert (position["next_step"], position["next_sequence"]) == (8, 4 * 8 + 4 * 12)
