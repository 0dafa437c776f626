"""Runs that are extended, that begin with another's weights, and comparisons that continue."""

import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from swift.config.gin_reader import load_experiment
from swift.experts.optimizer import learning_rate
from swift.runlog.lease import this_process
from swift.runlog.reading import read_run
from swift.train.model_directory import load_exported

UNCHANGED = ("Experiment.num_steps=1", "OptimizerConfig.warmup_steps=0", "OptimizerConfig.peak_learning_rate=0")


def options(*settings):
    return [word for setting in settings for word in ("--set", setting)]


def weights(path, *settings):
    _, found = load_exported(load_experiment(Path("tiny.gin"), settings), Path(path))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(found)]


def test_a_run_is_extended_and_says_what_becomes_of_the_learning_rate(tell, refusal, half):
    longer = ("train", "tiny.gin", "--run-dir", "half", "--resume", *options("Experiment.num_steps=8"))
    told = tell(*longer, "--log-every", "1")
    assert told.code == 0, told.err
    assert "resumed with Experiment.num_steps = 8 (before: 6)" in told.err
    assert [f"step {step}/8" in told.err for step in (4, 5, 6, 7, 8)] == [False, True, True, True, True]
    run = read_run(half)
    assert [record["step"] for record in run.metrics] == [*range(1, 9)]
    assert run.summary["num_steps"] == 8
    rates = [record["learning_rate"] for record in run.metrics]
    for steps, of in ((6, slice(0, 4)), (8, slice(4, 8))):
        planned = learning_rate(load_experiment(Path("tiny.gin")).optimizer, steps)
        np.testing.assert_allclose(rates[of], [float(planned(step)) for step in range(of.start, of.stop)], rtol=1e-5)
    (event,) = (event for event in run.events if event["event"] == "settings_changed")
    assert event["changed"] == {"Experiment.num_steps": ["6", "8"]}
    np.testing.assert_allclose(event["learning_rate"], rates[4], rtol=1e-5)
    assert f"the learning rate of iteration 5 is {rates[4]:.3g}" in told.err

    line = refusal(*longer)
    assert line.endswith("is at iteration 8; set Experiment.num_steps above that to extend it")


@pytest.mark.usefixtures("half")
def test_a_run_is_extended_with_the_warm_up_that_follows_from_its_new_length(tell):
    """A run of 20 iterations or fewer has a shorter one by default."""
    settings = ("Experiment.num_steps=24", "OptimizerConfig.warmup_steps=None")
    told = tell("train", "tiny.gin", "--run-dir", "half", "--resume", "--stop-at", "5", *options(*settings))
    assert told.code == 0, told.err
    assert "OptimizerConfig.warmup_steps = 20 (before: 2)" in told.err
    peak = load_experiment(Path("tiny.gin")).optimizer.peak_learning_rate
    assert f"the learning rate of iteration 5 is {peak * 4 / 20:.3g}" in told.err
    assert read_run(Path("half")).metrics.steps_T[-1] == 5


@pytest.mark.slow
def test_a_run_from_before_a_setting_existed_is_resumed(tell, half):
    config = (half / "config.gin").read_text()
    for line in ("OptimizerConfig.decay_steps = None\n", "OptimizerConfig.decayed = 'all'\n"):
        assert line in config
        config = config.replace(line, "")
    (half / "config.gin").write_text(config)
    told = tell("train", "tiny.gin", "--run-dir", "half", "--resume", *options("OptimizerConfig.decay_steps=6"))
    assert told.code == 0, told.err
    assert "resumed with OptimizerConfig.decay_steps = 6 (before: not a setting)" in told.err
    assert "OptimizerConfig.decayed" not in told.err


@pytest.mark.long
@pytest.mark.usefixtures("half")
def test_a_run_begins_with_the_weights_of_another(tell, refusal):
    fork = ("train", "tiny.gin", "--init-from", "half", "--run-dir", "fork")
    line = refusal(*fork, *options("ModelConfig.ffn_dim=16"))
    assert line.startswith("--init-from = 'half': is of another model: its ModelConfig is ModelConfig(")
    assert "is for a new run" in refusal(*fork[:-1], "half", "--resume")
    launched = ("launch", "tiny.gin", "--processes", "1", "--init-from", "half", "--run-dir", "half", "--resume")
    assert "is for a new run" in refusal(*launched)
    assert refusal("train", "tiny.gin", "--init-from", "corpus").startswith(
        "--init-from = 'corpus': has no config.json"
    )

    told = tell(*fork, *options(*UNCHANGED, "Experiment.seed=7", "Topology.num_expert_ranks=1"))
    assert told.code == 0, told.err
    assert "begins with the weights of half, iteration 4" in told.err
    run = read_run("fork")
    assert [record["step"] for record in run.metrics] == [1]
    (event,) = (event for event in run.events if event["event"] == "init_from")
    assert (event["run"], event["of_step"], event["step"]) == ("half", 4, 0)
    for path in ("half", "fork"):
        assert tell("export", path, "--out", f"{path}-model").code == 0
    for ours, theirs in zip(weights("fork-model"), weights("half-model"), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.long
def test_a_comparison_continues_and_keeps_the_report_of_a_run(tell, refusal, half, here):
    both = here / "both"
    shutil.copytree(half, both / "tiny")
    (here / "other.gin").write_text("include 'tiny.gin'\nExperiment.placement = @Static()\nExperiment.num_steps = 3\n")
    (both / "other").mkdir()
    dead = replace(this_process(), started=1)  # Ctrl-C, before the run had begun
    (both / "other/.lease-1.json").write_bytes(dead.encode())
    command = ("compare", "tiny.gin", "other.gin", "--run-dir", "both")
    assert "add --resume to continue it" in refusal(*command)
    told = tell(*command, "--resume", "--log-every", "1")
    assert told.code == 0, told.err
    assert "tiny (1 of 2): step 5/6" in told.err
    assert "other (2 of 2): step 3/3" in told.err
    (line,) = (line for line in told.err.splitlines() if "tiny (1 of 2): step 6/6" in line)
    assert line.endswith(" in all")
    assert (both / "report.html").exists()

    shutil.copy(half / "config.gin", both)  # as in the directory of a run
    (both / "report.html").write_text("a run's own")
    told = tell(*command, "--resume")
    assert told.code == 0, told.err
    assert "tiny (1 of 2): has ended already" in told.err
    assert (both / "report.html").read_text() == "a run's own"
    assert "tiny" in (both / "comparison.html").read_text()
