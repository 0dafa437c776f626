"""Programs with the embedding in shares: bytes beside closed forms, written out again here."""

import math
from dataclasses import replace

import pytest

from swift.tools.pod_compile import Pod, compile_one
from swift.topology import Topology
from swift.train.emulated import Down
from tests.tools.pod_compile.conftest import NOBODY, experiment

WIDTH, LENGTH, VOCABULARY = 16, 8, 256
POSITIONS = LENGTH * WIDTH


def assert_bytes(report, *, ranks, updates, microbatches):
    """Positions are whole on every rank, rows are not exchanged; an op sends a request's number and a row."""
    group, moved = report["exchange"]["groups"]["embedding"], updates * 2 * ranks * POSITIONS * 4
    assert group["compiled_bytes"] == group["formula_bytes"] == moved
    tokens = 2 * LENGTH
    places = math.ceil(tokens / (32 * ranks))
    rounds = math.ceil(math.ceil(min(tokens, VOCABULARY) / ranks) / places)
    # F and B: in each round number and row, to every rank; and once the number of rounds.
    looked_up = microbatches * ranks * 2 * (rounds * ranks * places * (4 + 4 * WIDTH) + 4)
    assert report["embedding"] == {"rounds": rounds, "compiled_bytes": looked_up, "formula_bytes": looked_up}
    assert report["tokens"]["compiled_bytes"] == report["tokens"]["formula_bytes"]


def test_bytes_of_a_lone_worker(lone):
    one, whole = lone
    report = compile_one(replace(one, embedding="shares"), Pod.parse("cpu:4"), NOBODY)
    assert_bytes(report, ranks=4, updates=1, microbatches=3)
    assert report["tokens"] == whole["tokens"]
    assert "embedding" not in whole


@pytest.mark.slow
def test_bytes_of_a_pipeline_that_has_lost_a_worker():
    """Two of three workers of the first stage are left; they look up the tokens of six micro-batches."""
    one = experiment(Topology(3, 2, 2), num_microbatches=2, window=2, embedding="shares", head="shares")
    report = compile_one(one, Pod.parse("cpu:12"), Down(frozenset({(1, 0)}), frozenset()))
    assert_bytes(report, ranks=2, updates=2, microbatches=6)
