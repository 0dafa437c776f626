"""Programs with the sharded embedding: bytes beside closed forms, written out again here."""

import math
from dataclasses import replace

import pytest

from swift.pod_compile.compile import compile_one
from swift.pod_compile.pods import Pod
from swift.topology import Topology
from swift.train.emulated import FailedSet
from tests.pod_compile.conftest import NOBODY, experiment

WIDTH, LENGTH, VOCABULARY = 16, 8, 256
POSITIONS = LENGTH * WIDTH


def looked_up_bytes(*, ranks, microbatches, wire=4):
    """(rounds, bytes) of F and B, whose numbers have 4 and ``wire`` bytes: in each round a request and a row."""
    tokens = 2 * LENGTH
    places = math.ceil(tokens / (64 * ranks))
    rounds = math.ceil(math.ceil(min(tokens, VOCABULARY) / ranks) / places)
    # To every rank; and in F and in B once the number of rounds.
    return rounds, microbatches * ranks * (rounds * ranks * places * (8 + (4 + wire) * WIDTH) + 8)


def assert_bytes(report, *, ranks, updates, microbatches):
    """Positions are whole on every rank, rows are not exchanged; an op sends a request's number and a row."""
    group, moved = report["exchange"]["groups"]["embedding"], updates * 2 * ranks * POSITIONS * 4
    assert group["compiled_bytes"] == group["formula_bytes"] == moved
    rounds, looked_up = looked_up_bytes(ranks=ranks, microbatches=microbatches)
    assert report["embedding"] == {"rounds": rounds, "compiled_bytes": looked_up, "formula_bytes": looked_up}
    assert report["tokens"]["compiled_bytes"] == report["tokens"]["formula_bytes"]


def test_bytes_of_a_lone_worker(lone):
    one, whole = lone
    report = compile_one(replace(one, embedding="sharded"), Pod.parse("cpu:4"), NOBODY)
    assert_bytes(report, ranks=4, updates=1, microbatches=3)
    assert report["tokens"] == whole["tokens"]
    assert "embedding" not in whole


def test_gradients_of_rows_on_a_narrow_wire():
    """By the closed form, as a wire that is narrower is: XLA:CPU widens bfloat16 before it sends it."""
    one = experiment(Topology(num_expert_ranks=4), num_microbatches=2, wire_dtype="bfloat16", embedding="sharded")
    report = compile_one(one, Pod.parse("cpu:4"), NOBODY)["embedding"]
    assert report["formula_bytes"] == looked_up_bytes(ranks=4, microbatches=2, wire=2)[1]
    assert report["compiled_bytes"] == looked_up_bytes(ranks=4, microbatches=2, wire=4)[1]


@pytest.mark.slow
def test_bytes_of_a_pipeline_that_has_lost_a_worker():
    """Two of three workers of the first stage are left; they look up the tokens of six micro-batches."""
    one = experiment(Topology(3, 2, 2), num_microbatches=2, window=2, embedding="sharded", head="sharded")
    report = compile_one(one, Pod.parse("cpu:12"), FailedSet(frozenset({(1, 0)}), frozenset()))
    assert_bytes(report, ranks=2, updates=2, microbatches=6)
