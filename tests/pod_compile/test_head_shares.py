"""Programs with the sharded head: bytes beside closed forms, written out again here."""

import math
from dataclasses import replace

import pytest

from swift.pod_compile.compile import compile_one
from swift.pod_compile.pods import Pod
from swift.topology import Topology
from swift.train.emulated import FailedSet
from tests.pod_compile.conftest import NOBODY, experiment

WIDTH, LENGTH, VOCABULARY = 16, 8, 256


def message(ranks: int) -> int:
    """Numbers to each rank: the rows that a slice of norm and matrix touches, of each its columns, and the norm."""
    norm = 2 * WIDTH
    slice_size = math.ceil((norm + WIDTH * VOCABULARY) / ranks)
    rows = [
        {(position - norm) // VOCABULARY for position in range(rank * slice_size, (rank + 1) * slice_size)}
        for rank in range(ranks)
    ]
    return max(map(len, rows)) * math.ceil(VOCABULARY / ranks) + norm


def assert_bytes(report, *, ranks, updates, microbatches):
    group, moved = report["exchange"]["groups"]["head"], updates * 2 * ranks * ranks * message(ranks) * 4
    assert group["compiled_bytes"] == group["formula_bytes"] == moved
    # Of each token, on each rank: stream, gradient, label, whether it counts, the largest logit and two sums.
    token = 2 * 4 * WIDTH + 4 + 1 + 3 * 4
    scored = microbatches * ranks * ranks * 2 * LENGTH * token
    assert report["head"]["formula_bytes"] == report["head"]["compiled_bytes"] == scored
    assert report["tokens"]["compiled_bytes"] == report["tokens"]["formula_bytes"]


def test_bytes_of_a_lone_worker(lone):
    """The head is exchanged once, not once for each rank; all else as with a whole head."""
    one, whole = lone
    report = compile_one(replace(one, head="sharded"), Pod.parse("cpu:4"), NOBODY)
    assert_bytes(report, ranks=4, updates=1, microbatches=3)
    assert report["tokens"] == whole["tokens"]
    assert "head" not in whole


@pytest.mark.slow
def test_bytes_of_a_pipeline_that_has_lost_a_worker():
    """Two of three workers of the last stage are left; they score the tokens of six micro-batches."""
    one = experiment(Topology(3, 2, 2), num_microbatches=2, window=2, head="sharded")
    report = compile_one(one, Pod.parse("cpu:12"), FailedSet(frozenset({(1, 1)}), frozenset()))
    assert_bytes(report, ranks=2, updates=2, microbatches=6)
