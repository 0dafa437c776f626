"""Runs from the command line: stopped, resumed, exported, not finite any more, interrupted."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from swift.checkpoint.manifest import checkpoint_steps
from swift.runlog.reading import read_run


def test_a_stopped_run_goes_on_from_an_older_checkpoint_and_its_model_writes(tell, half):
    shutil.rmtree(half / "checkpoints/step-00000004")
    before = read_run(half).metrics
    told = tell("train", "tiny.gin", "--run-dir", "half", "--resume", "--format", "json")
    assert told.code == 0, told.err
    assert json.loads(told.out)["num_steps"] == 6
    after = read_run(half)
    assert [record["step"] for record in after.metrics] == [1, 2, 3, 4, 5, 6]
    assert [record["loss"] for record in after.metrics[:4]] == [record["loss"] for record in before]
    assert checkpoint_steps(half / "checkpoints") == [4, 6]
    assert not list(half.glob(".lease*"))

    assert tell("export", "half", "--out", "model").out.startswith("model: the model of iteration 6")
    texts = [tell("generate", "model", "--prompt", "al", "--tokens", "8", "--seed", seed).out for seed in "01"]
    assert texts[0].startswith("al")
    assert texts[0] == tell("generate", "model", "--prompt", "al", "--tokens", "8", "--seed", "0").out != texts[1]
    assert tell("generate", "model", "--prompt", "", "--tokens", "4", "--top-k", "99999").code == 0
    for option, value in (("--tokens", "-1"), ("--top-k", "0"), ("--temperature", "nan"), ("--seed", "-1")):
        refused = tell("generate", "model", option, value)
        assert (refused.code, refused.out, refused.new) == (2, "", [])
        assert refused.err.startswith(f"swift: {option} = {value}: must be ")


@pytest.mark.long
@pytest.mark.usefixtures("compiled_well")
def test_a_run_as_a_user_compiles_it_learns_what_the_others_do(tell, half):
    told = tell("train", "tiny.gin", "--run-dir", "new", "--stop-at", "4")
    assert told.code == 0, told.err
    ours, others = ([record["loss"] for record in read_run(path).metrics] for path in ("new", half))
    assert len(ours) == 4
    np.testing.assert_allclose(ours, others, rtol=1e-5)


TOO_FAST = ("OptimizerConfig.peak_learning_rate=1e20", "OptimizerConfig.clip_norm=None")


def options(*settings):
    return [word for setting in settings for word in ("--set", setting)]


@pytest.mark.long
@pytest.mark.parametrize("checkpoint_every", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_loss_that_is_not_finite_stops_the_run_and_says_how_to_go_on(tell, here, checkpoint_every):
    every = f"CheckpointConfig.every={checkpoint_every}"
    resume = []
    if checkpoint_every:
        begun = tell("train", "tiny.gin", "--run-dir", "new", "--stop-at", "2", *options(every))
        assert begun.code == 0, begun.err
        resume = ["--resume"]
    told = tell("train", "tiny.gin", "--run-dir", "new", *resume, *options(*TOO_FAST, every))
    line = told.err.splitlines()[-1]
    assert told.code == 3, told.err
    assert "Traceback" not in told.err
    assert line.startswith("swift: loss")
    steps, run = checkpoint_steps(here / "new/checkpoints"), read_run(here / "new")
    step = run.events[-1]["step"]
    assert run.events[-1]["event"] == "non_finite"
    assert f" at iteration {step}: stopped; " in line
    if checkpoint_every:
        assert steps == [1, 2][-len(steps) :]
        assert "the checkpoint of iteration 2 is kept; continue with --run-dir new --resume and a lower" in line
        assert tell("train", "tiny.gin", "--run-dir", "new", "--resume", *options(every)).code == 0
    else:
        assert steps == []
        assert "there is no checkpoint yet; start again in another --run-dir with a lower" in line


@pytest.mark.slow
def test_ctrl_c_leaves_a_run_that_can_be_resumed(tell, here):
    settings = ["--set", "Experiment.num_steps=100000", "--set", "CheckpointConfig.every=1"]
    command = [sys.executable, "-m", "swift", "train", "tiny.gin", "--run-dir", "new", *settings]
    with subprocess.Popen(command, cwd=here, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        while "step 1/" not in process.stderr.readline():
            assert process.poll() is None
        while not checkpoint_steps(here / "new/checkpoints"):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(timeout=30) == 130
    assert "Traceback" not in rest
    assert "interrupted after iteration" in rest
    run = read_run(here / "new")
    assert run.events[-1]["event"] == "interrupt"
    done = checkpoint_steps(here / "new/checkpoints")[-1]
    told = tell("train", "tiny.gin", "--run-dir", "new", *settings, "--resume", "--stop-at", str(done + 2))
    assert told.code == 0, told.err
    assert read_run(here / "new").metrics[-1]["step"] == done + 2


def test_a_reader_that_closes_the_pipe_is_no_error(half_run):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "swift", "report", str(half_run)]
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}  # then it is not before the end that anything is written
    ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False, env=buffered)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.mark.parametrize(
    ("file", "line", "told"),
    [
        ("events.jsonl", '{"event": "stop", "step": 4}', "must have a time, and has None"),
        ("events.jsonl", "{}{}", "is damaged: not a JSON object"),
        (
            "events.jsonl",
            '{"time": "2026-01-01T00:00:00+00:00", "event": "plan", "step": 4, "plan": {}}',
            "has no 'problem'",
        ),
        ("metrics.jsonl", '{"step": 5, "time": "noon"}', "must have a time, and has 'noon'"),
        ("metrics.jsonl", '{"step": 5, "loss": "low"}', "must be a number"),
    ],
)
def test_a_damaged_record_is_told_in_a_line(refusal, half, file, line, told):
    page = (half / "report.html").read_bytes()
    with (half / file).open("a") as lines:
        lines.write(line + "\n")
    assert told in refusal("report", "half")
    assert (half / "report.html").read_bytes() == page


def test_the_page_of_a_run_that_was_stopped_says_what_it_knows(tell, half):
    told = tell("report", "half", "--out", "page.html")
    assert (told.code, told.new) == (0, ["page.html"]), told.err
    text = (half.parent / "page.html").read_text()
    for line in (
        "No failures.",
        "Every checkpoint has all experts.",
        "No schedule is recorded; a single worker has none.",
    ):
        assert line in text
    assert "4 steps, not ended" in text
