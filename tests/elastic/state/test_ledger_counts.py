"""An iteration counts once its record is there, however long the run has been, and whatever is missing."""

import json
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.checkpoint.manifest import Ledger
from swift.checkpoint.selection import TokenUpdateCounter
from swift.elastic.state.ledger_counts import counted, counted_so_far
from swift.runlog.expert_counts import CLASS_COUNTS, KINDS
from swift.runlog.files import METRICS
from swift.runlog.run_directory import RunDirectory

MOST = 1000
"""More updates than an expert gets in any of the iterations."""


def popularity(step):
    return np.array([[step, 2]])


def log(directory, steps):
    for step in steps:
        directory.log_step({"step": step} | dict(zip(KINDS, [popularity(step), [[1, 1]], [[1, 0]]], strict=True)))


@pytest.fixture
def run_dir(tmp_path):
    with RunDirectory.create(tmp_path / "run", "") as directory:
        log(directory, range(1, 8))
    return tmp_path / "run"


@pytest.fixture
def nothing():
    return Ledger.first(1, 2, 1)


def test_iterations_of_an_interval_are_counted(run_dir, nothing):
    tally = counted(nothing, run_dir, 3, 5, MOST, 0).tally
    assert tally.routed_L.tolist() == [4 + 5 + 2 * 2]
    assert tally.contained_LE.tolist() == [[3 + 4, 2 * 2]]
    assert tally.num_uncounted == 0
    assert counted(nothing, run_dir, 5, 5, MOST, 0) is nothing


def test_a_record_that_is_being_written_is_waited_for(run_dir, nothing):
    with RunDirectory.resume(run_dir, "", 7) as directory:
        torn = (run_dir / METRICS).open("ab", buffering=0)
        log(directory, [8])
        whole = (run_dir / METRICS).read_bytes()
        with (run_dir / METRICS).open("r+b") as file:
            file.truncate(len(whole) - 9)
    threading.Timer(0.2, lambda: (torn.write(whole[-9:]), torn.close())).start()
    tally = counted(nothing, run_dir, 7, 8, MOST, 20).tally
    np.testing.assert_array_equal(tally.routed_L, [10])
    assert tally.num_uncounted == 0


@pytest.mark.parametrize(("after", "step", "known", "unknown"), [(5, 9, [6, 7], 2), (7, 8, [], 1)])
def test_a_record_that_does_not_come_is_counted_as_unknown(run_dir, nothing, after, step, known, unknown):
    tally = counted(nothing, run_dir, after, step, MOST, 0.1).tally
    assert tally.num_uncounted == unknown
    assert tally.routed_L.tolist() == [sum(known) + 2 * len(known)]
    assert tally.contained_LE.tolist() == [
        [sum(known) - len(known) + MOST * unknown, (2 * len(known)) + MOST * unknown]
    ]


def test_without_a_record_no_iteration_is_known(tmp_path, nothing):
    assert counted(nothing, tmp_path, 0, 1, MOST, 0.1).tally.num_uncounted == 1


def without(run_dir, name, step):
    """Removes what is recorded of a step from the metrics, or damages it in the counts."""
    path = run_dir / name
    if name == METRICS:
        path.write_text("".join(line for line in path.read_text().splitlines(True) if json.loads(line)["step"] != step))
    else:
        content = bytearray(path.read_bytes())
        content[512 + (step - 1) * (8 + 3 * 2 * 4 + 4) + 9] ^= 1
        path.write_bytes(content)


@pytest.mark.parametrize("name", [METRICS, CLASS_COUNTS])
def test_a_hole_before_a_later_record_is_not_waited_for(run_dir, nothing, name):
    without(run_dir, name, 4)
    ledger, last = counted_so_far(nothing, run_dir, 2, 6, MOST)
    assert last == 6
    assert ledger.tally.num_uncounted == 1
    assert ledger.tally.routed_L.tolist() == [3 + 5 + 6 + 2 * 3]


@pytest.mark.parametrize("name", [METRICS, CLASS_COUNTS])
def test_a_file_that_is_damaged_altogether_blocks_nothing(run_dir, nothing, name):
    (run_dir / name).write_bytes(b"?" * 600 + b"\n" + b"?" * 600)
    assert counted(nothing, run_dir, 2, 6, MOST, 0.1).tally.num_uncounted == 4


def test_where_nothing_is_counted_only_the_record_is_waited_for(run_dir):
    dense = Ledger.first(0, 0, 1)
    without(run_dir, METRICS, 4)
    assert counted_so_far(dense, run_dir, 2, 9, MOST) == (dense, 7)


@settings(deadline=None)
@given(data=st.data())
def test_lost_tokens_are_never_told_fewer_than_they_are(data):
    """Any iterations are counted or not, any experts are saved or not, and a fault comes at any time."""
    num_steps = data.draw(st.integers(1, 8))
    numbers = st.lists(st.integers(0, 5), min_size=3, max_size=3)
    routed = [np.array([data.draw(numbers)]) for _ in range(num_steps)]
    is_known = data.draw(st.lists(st.booleans(), min_size=num_steps, max_size=num_steps))
    copied_at = [data.draw(st.integers(0, num_steps)) for _ in range(3)]
    true = bound = TokenUpdateCounter.none(1, 3)
    copies = {0: (true, bound)}
    for step, popularity_LE in enumerate(routed, start=1):
        true = true.count(popularity_LE, 0 * popularity_LE)
        bound = bound.count(popularity_LE, 0 * popularity_LE) if is_known[step - 1] else bound.uncounted(1, 5)
        copies[step] = true, bound
    of_copies = [np.array([[copies[copied_at[e]][nth].contained_LE[0, e] for e in range(3)]]) for nth in (0, 1)]
    assert bound.restored(of_copies[1]).plt >= true.restored(of_copies[0]).plt
    assert bound.restored(of_copies[1]).num_uncounted == is_known.count(False)
    again = TokenUpdateCounter.from_json(json.loads(json.dumps(bound.to_json())), 3)
    assert again.num_uncounted == bound.num_uncounted
