"""Runs whose tokens' losses have weights: failures change nothing, and a run resumes."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from swift.data.config import DataConfig
from swift.data.loader import SourceBatches
from swift.data.pipeline import Pipeline
from swift.data.records import Rows
from swift.pipeline.step.metrics import Sums
from swift.train.records import validation_record
from tests.train.runs import measured, run, two_stages

pytestmark = pytest.mark.usefixtures("double_precision")


def half_of(sample):
    """Weights of 0, 0.5 and 1 by the letter."""
    return {"weights": [(ord(letter) % 3) / 2 for letter in sample["text"]]}


def experiment(**settings):
    texts = [f"{number} sheep and {number * 7} goats" for number in range(60)]
    records = Pipeline(Rows([{"text": text} for text in texts]))
    data = DataConfig(records.map(half_of, reads=("text",), writes=("weights",)), validation_share=0.2)
    return replace(two_stages(data, 2, 1, num_steps=6, window=2), eval_every=2, **settings)


def test_failures_change_no_loss(tmp_path):
    failures = ("step 3: fail 0:1", "step 5: rejoin 0:1")
    plain, failing = (
        run(experiment(failures=listed), tmp_path / str(len(listed)), prepare="none") for listed in ((), failures)
    )
    assert [step["live_workers"] for step in failing.metrics] == [4, 4, 3, 3, 4, 4]
    for ours, expected in zip(failing.metrics, plain.metrics, strict=True):
        np.testing.assert_allclose(ours["loss"], expected["loss"], rtol=1e-10)
        assert ours["loss_weight"] == expected["loss_weight"]
        assert 0 < ours["loss_weight"] < ours["tokens"] == 32
    validation = [[e["validation_loss"] for e in r.metrics if "validation_loss" in e] for r in (failing, plain)]
    np.testing.assert_allclose(*validation, rtol=1e-10)
    assert len(validation[0]) == 3


def test_validation_is_the_mean_of_the_weighted_losses():
    """Of two batches, one of which has no weight."""
    part = SourceBatches("", 1.0, range(2))
    batches = SimpleNamespace(parts=[part], batch=lambda index: index, num_bytes=lambda _: 8)
    sums = [Sums(6.0, 0.0, 8, 1.5, None), Sums(0.0, 0.0, 8, 0.0, None)]
    assert validation_record(sums.__getitem__, batches, 2) == {"validation_loss": 4}  # bits of a part of the text: none
    assert validation_record(sums[1:].__getitem__, batches, 1) == {"validation_loss": 0}
    unweighted = validation_record([Sums(6.0, 0.0, 8, None, None)].__getitem__, batches, 1)
    assert unweighted == {"validation_loss": 0.75, "validation_bits_per_byte": 0.75 / np.log(2)}


def test_a_run_with_weights_resumes(tmp_path):
    whole = run(experiment(), tmp_path / "whole")
    run(experiment(), tmp_path / "parts", stop_at=4)
    resumed = run(experiment(), tmp_path / "parts", resume=True)
    assert measured(resumed) == measured(whole)
