"""The keeper counts an iteration once its record is there, however long the run has been."""

import json
import os
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift.checkpoint import Ledger
from swift.errors import RunError
from swift.launch.counts import counted, lines_from_end


def line(step):
    return json.dumps({"step": step, "popularity": [[step, 2]], "dropped": [[1, 0]]}) + "\n"


@pytest.fixture
def metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(map(line, range(1, 8))))
    return path


@pytest.fixture
def nothing():
    return Ledger.first(1, 2, 1)


@given(lines=st.lists(st.binary(max_size=9).map(lambda text: text.replace(b"\n", b"")), max_size=9), torn=st.booleans())
def test_lines_from_the_end_are_the_whole_lines_whatever_is_read_at_once(tmp_path_factory, lines, torn):
    path = tmp_path_factory.mktemp("lines") / "file"
    path.write_bytes(b"".join(text + b"\n" for text in lines) + b"torn" * torn)
    for block_bytes in (1, 2, 3, 7, 1000):
        assert list(lines_from_end(path, block_bytes)) == lines[::-1]


def test_only_the_end_of_a_long_file_is_read(metrics, nothing):
    """Of one with more than any memory holds, most of which is a hole."""
    records = metrics.read_bytes()
    with metrics.open("wb") as file:
        file.truncate(2**40)
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + records)
    assert counted(nothing, metrics, 1, 7, 0).tally.routed_L.tolist() == [sum(range(2, 8)) + 2 * 6]


def test_iterations_of_an_interval_are_counted(metrics, nothing):
    tally = counted(nothing, metrics, 3, 5, 0).tally
    assert tally.routed_L.tolist() == [4 + 5 + 2 * 2]
    assert tally.contained_LE.tolist() == [[3 + 4, 2 * 2]]
    assert counted(nothing, metrics, 5, 5, 0) is nothing


def test_a_record_that_is_being_written_is_waited_for(metrics, nothing):
    whole = line(8)

    def write(text):
        with metrics.open("a") as file:
            file.write(text)

    write(whole[:20])
    threading.Timer(0.2, write, [whole[20:]]).start()
    tally = counted(nothing, metrics, 7, 8, 20).tally
    np.testing.assert_array_equal(tally.routed_L, [10])


@pytest.mark.parametrize(("after", "step", "there"), [(5, 9, "2 of the 4"), (7, 8, "0 of the 1")])
def test_a_record_that_does_not_come_is_told(metrics, nothing, after, step, there):
    with pytest.raises(RunError, match=rf"has {there} iterations up to {step}"):
        counted(nothing, metrics, after, step, 0.1)


def test_without_a_file_no_iteration_is_there(tmp_path, nothing):
    with pytest.raises(RunError, match="has 0 of the 1 iterations up to 1"):
        counted(nothing, tmp_path / "metrics.jsonl", 0, 1, 0.1)
