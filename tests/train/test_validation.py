"""Validation of each source of a mixture, and bits per byte, in the record of a run and in its report."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from swift.checkpoint.config import CheckpointConfig
from swift.data.config import DataConfig, Mixture
from swift.data.loader import SourceBatches
from swift.data.sources import InMemory
from swift.report.compare import validation_table
from swift.runlog.observers import grouped_scalars
from swift.train.records import validation_record
from tests.train.partial_runs import saving_one_expert
from tests.train.runs import run

PARTS = (SourceBatches("web", 3.0, range(4)), SourceBatches("code", 1.0, range(4, 6)))


class Stand:
    """Batch i has i + 1 tokens, a loss of i nats each, and two bytes for each token of the first source."""

    def __init__(self, parts, bytes_of):
        self.parts, self.num_bytes = parts, bytes_of

    def batch(self, step):
        return step

    @staticmethod
    def evaluate(step):
        return SimpleNamespace(loss=step * (step + 1), tokens=step + 1, weight=None)


def test_the_total_is_the_mean_by_weight():
    stand = Stand(PARTS, lambda step: (step + 1) * (2 if step < 4 else 5))
    record = validation_record(stand.evaluate, stand, 3)
    web, code = (0 * 1 + 1 * 2 + 2 * 3) / 6, (4 * 5 + 5 * 6) / 11
    assert record == pytest.approx(
        {
            "validation_loss": (3 * web + code) / 4,
            "validation_bits_per_byte": (3 * web + code) / (3 * 2 + 5) / math.log(2),
            "validation_loss/web": web,
            "validation_bits_per_byte/web": web / 2 / math.log(2),
            "validation_loss/code": code,
            "validation_bits_per_byte/code": code / 5 / math.log(2),
        }
    )


def test_without_known_bytes_there_are_no_bits():
    stand = Stand(PARTS, lambda step: None if step == 4 else 1)
    record = validation_record(stand.evaluate, stand, 1)
    assert sorted(record) == [
        "validation_bits_per_byte/web",
        "validation_loss",
        "validation_loss/code",
        "validation_loss/web",
    ]


def test_one_source_has_one_loss():
    stand = Stand((SourceBatches("", 1.0, range(3)),), lambda _: None)
    assert validation_record(stand.evaluate, stand, 8) == {"validation_loss": 8 / 6}


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    texts = (InMemory(["one two three " * 40] * 9), InMemory(["0123456789" * 40] * 9))
    data = DataConfig(Mixture(texts, (1.0, 2.0), ("words", "digits")), validation_share=0.3)
    experiment = replace(saving_one_expert(data), num_steps=4, eval_every=4, checkpoint=CheckpointConfig(every=0))
    return run(experiment, tmp_path_factory.mktemp("mixture") / "run")


def test_a_run_records_each_source(record):
    last = record.metrics[-1]
    assert last["validation_loss"] == pytest.approx(
        (last["validation_loss/words"] + 2 * last["validation_loss/digits"]) / 3
    )
    assert last["validation_loss/words"] != last["validation_loss/digits"]
    for name in ("", "/words", "/digits"):  # a token is a byte, but for the separator of a document
        share = last[f"validation_bits_per_byte{name}"] * math.log(2) / last[f"validation_loss{name}"]
        assert 1 <= share < 1.05
    assert record.summary["validation_bits_per_byte"] == last["validation_bits_per_byte"]
    assert "validation_loss/words" not in record.metrics[0]
    tags = grouped_scalars(last)
    assert tags["train/validation_loss/words"] == last["validation_loss/words"]
    assert tags["train/validation_bits_per_byte"] == last["validation_bits_per_byte"]


def test_the_report_has_a_row_for_each_source(record):
    table = validation_table([record])
    last = record.metrics[-1]
    assert [row[1] for row in table.rows] == ["all", "words", "digits"]
    for row in table.rows:
        suffix = "" if row[1] == "all" else f"/{row[1]}"
        loss = f"{last[f'validation_loss{suffix}']:.4f}"
        assert row[2:] == [loss, loss, f"{last[f'validation_bits_per_byte{suffix}']:.4f}"]
