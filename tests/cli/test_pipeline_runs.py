"""Pipelines from the command line: compared with and without a failure, prepared or not, exported."""

import re

import pytest

from swift.runlog.reading import read_run

PIPELINE = """
include 'tiny.gin'
ModelConfig.moe_pattern = (True,)
Topology.num_pipelines = 2
Topology.num_stages = 2
Experiment.num_microbatches = 2
Experiment.sequences_per_microbatch = 2
"""


@pytest.fixture
def configs(here):
    (here / "whole.gin").write_text(PIPELINE)
    (here / "lost.gin").write_text(
        "include 'whole.gin'\nExperiment.failures = ['step 3: fail 0:1', 'step 5: rejoin 0:1']"
    )
    return "whole.gin", "lost.gin"


@pytest.mark.slow
def test_a_comparison_says_how_far_a_failure_is_from_none(tell, here, configs):
    told = tell("compare", *configs, "--run-dir", "both")
    assert told.code == 0, told.err
    (line,) = re.findall(r"^lost: .*$", told.out, re.MULTILINE)
    found = re.fullmatch(
        r"lost: with 3 of 4 workers at the least, its loss is at most (\S+) from that of whole, and (\S+) in the end",
        line,
    )
    lost, whole = (read_run(here / "both" / name).metrics for name in ("lost", "whole"))
    distances = [abs(a["loss"] - b["loss"]) for a, b in zip(lost, whole, strict=True)]
    assert float(found[1]) == float(f"{max(distances):.1e}") < 1e-4
    assert float(found[2]) == float(f"{distances[-1]:.1e}")
    assert [record["live_workers"] for record in lost] == [4, 4, 3, 3, 4, 4]
    assert "iteration 3: worker 0:1 failed; 3 live, period " in told.err
    assert "iteration 5: worker 0:1 rejoined; 4 live, period 1.00 x fault-free" in told.err
    assert "4 workers live, bubble " in told.err


@pytest.mark.slow
def test_a_pipelines_model_is_exported_whole(tell, configs):
    run = tell("train", configs[1], "--run-dir", "run", "--prepare", "none", "--set", "Experiment.num_steps=5")
    assert run.code == 0, run.err
    assert "not prepared" in run.err
    exported = tell("export", "run", "--out", "model")
    assert exported.out.startswith("model: the model of iteration 5"), exported.err
    assert tell("generate", "model", "--prompt", "al", "--tokens", "4").out.startswith("al")


def test_prepare_is_one_of_two(refusal, configs):
    assert "--prepare: invalid choice: 'all'" in refusal("train", configs[0], "--prepare", "all")
