"""Runs that resume with another batch, or with the state laid out otherwise; and the distance from another run."""

import json
import shutil

import numpy as np
import pytest

from swift.checkpoint.manifest import checkpoint_path, read_manifest
from swift.runlog.reading import read_run, scalars

RESUME = ("train", "tiny.gin", "--run-dir", "half", "--resume")


def position(run, step):
    return read_manifest(checkpoint_path(run / "checkpoints", step), "checkpoint").extra["loader"]


def events(run, name):
    return [event for event in read_run(run).events if event["event"] == name]


def test_the_batch_changes_and_the_run_says_where_it_goes_on(tell, half):
    assert position(half, 4)["next_sequence"] == 16
    told = tell(*RESUME, "--set", "Experiment.sequences_per_microbatch=6", "--stop-at", "5")
    assert told.code == 0, told.err
    line = (
        "iterations have 6 sequences from 5 on (before: 4), beginning with the run's sequence 17; the schedule of the "
        "learning rate still counts iterations"
    )
    assert line in told.err
    assert "resumed with Experiment.sequences_per_microbatch = 6 (before: 4)" in told.err
    (changed,), (data,) = events(half, "settings_changed"), events(half, "data_changed")
    assert changed["changed"] == {"Experiment.sequences_per_microbatch": ["4", "6"]}
    assert (data["step"], data["text"]) == (4, line)
    assert position(half, 5)["next_sequence"] == 22
    tokens = scalars(read_run(half), "tokens_routed")
    assert tokens[4] == 1.5 * tokens[3]

    told = tell(*RESUME, "--set", "Experiment.sequences_per_microbatch=6")
    assert told.code == 0, told.err
    assert position(half, 6)["next_sequence"] == 28
    assert len(events(half, "data_changed")) == 1


def test_more_pipelines_alone_do_not_change_the_batch_unnoticed(refusal, half):
    told = refusal(*RESUME, "--set", "Topology.num_pipelines=2")
    assert told == (
        "Topology.num_pipelines = 2: would change the sequences of an iteration: set Experiment.num_microbatches to "
        "keep them, or Experiment.microbatches = (1, 1) to change them"
    )
    assert position(half, 4)["next_sequence"] == 16


@pytest.mark.parametrize(
    "settings",
    [
        ("Experiment.head='sharded'",),
        ("Experiment.embedding='sharded'",),
        pytest.param(("OptimizerConfig.memory='pinned_host'",), marks=pytest.mark.slow),
        pytest.param(("Experiment.head='sharded'", "Experiment.embedding='sharded'"), marks=pytest.mark.slow),
    ],
    ids=",".join,
)
def test_a_run_goes_on_with_its_state_laid_out_otherwise_and_comes_back(tell, half, settings):
    whole = shutil.copytree(half, half.with_name("whole"))
    assert tell("train", "tiny.gin", "--run-dir", "whole", "--resume").code == 0
    told = tell(*RESUME, "--stop-at", "5", *(word for setting in settings for word in ("--set", setting)))
    assert told.code == 0, told.err
    (event,) = events(half, "settings_changed")
    assert event["changed"].keys() == {setting.partition("=")[0] for setting in settings}
    told = tell(*RESUME, "--compare-loss-to", "whole")
    assert told.code == 0, told.err
    np.testing.assert_allclose(scalars(read_run(half), "loss"), scalars(read_run(whole), "loss"), rtol=1e-5)


def test_the_loss_is_compared_with_another_runs(tell, refusal, half):
    shutil.copytree(half, half.with_name("other"))
    assert refusal(*RESUME, "--compare-loss-to", "none").startswith("--compare-loss-to = 'none': holds no run")
    told = tell(*RESUME, "--compare-loss-to", "other", "--format", "json")
    assert told.code == 0, told.err
    assert json.loads(told.out)["num_steps"] == 6
    assert told.err.splitlines()[-1] == (
        "half: with 2 of 2 expert ranks at the least, its loss is at most 0.0e+00 from that of other, and 0.0e+00 in "
        "the end"
    )
