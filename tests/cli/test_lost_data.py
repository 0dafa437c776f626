"""A run whose data are lost on the way ends with a checkpoint of its last iteration, and says how to continue."""

import os

import numpy as np
import pytest

from swift.data.loader import Loader
from swift.runlog.reading import read_run

TOKENS = (np.arange(300_000) * 7919 % 250).astype("<u2")
SETTINGS = ["DataConfig.source=@TokenFile()", "TokenFile.path='tokens.bin'", "CheckpointConfig.every=0"]
TRAIN = ["train", "tiny.gin", "--run-dir", "run", *(word for text in SETTINGS for word in ("--set", text))]


@pytest.fixture
def tokens(here):
    """The file of tokens."""
    TOKENS.tofile(here / "tokens.bin")
    return here / "tokens.bin"


def before_batch(monkeypatch, split, step, harm):
    """Does harm before some batch is read."""
    real = Loader.batch

    def batch(self, number):
        if number == step and self.state()["data"]["split"] == split:
            harm()
        return real(self, number)

    monkeypatch.setattr(Loader, "batch", batch)


def test_a_token_file_that_shrinks(tell, tokens, monkeypatch):
    with monkeypatch.context() as patch:
        before_batch(patch, "train", 3, lambda: os.truncate(tokens, 1000))
        told = tell(*TRAIN)
    assert told.code == 3
    last = told.err.splitlines()[-1]
    assert "tokens.bin has shrunk from 600000 to 1000 bytes since the run opened it: stopped; the checkpoint of" in last
    assert last.endswith("iteration 3 is kept; continue with --run-dir run --resume, once the data are repaired")
    TOKENS.tofile(tokens)
    told = tell(*TRAIN, "--resume")
    assert told.code == 0
    assert f"{tokens.name} has been written to since the checkpoint" in told.err
    run = read_run(tokens.parent / "run")
    assert [record["step"] for record in run.metrics] == [1, 2, 3, 4, 5, 6]
    assert [event["event"] for event in run.events if "data" in event["event"]] == ["data_unreadable", "data_changed"]


@pytest.mark.slow
def test_validation_data_that_shrink(tell, tokens, monkeypatch):
    before_batch(monkeypatch, "validation", 0, lambda: os.truncate(tokens, 0))
    told = tell(*TRAIN, "--set", "Experiment.eval_every=2")
    assert told.code == 3
    assert "iteration 2 is kept; continue with --run-dir run --resume, once the data are repaired" in told.err
    assert len(read_run(tokens.parent / "run").metrics) == 2


def test_data_that_are_lost_before_the_first_iteration(tell, tokens, monkeypatch):
    before_batch(monkeypatch, "train", 0, lambda: os.truncate(tokens, 0))
    told = tell(*TRAIN)
    assert told.code == 3
    assert "there is no checkpoint yet; start again in another --run-dir, once the data are repaired" in told.err
