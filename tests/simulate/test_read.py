"""Traces in files: what is read, what is sorted, and what is refused with its line."""

import sys

import pytest

from swift.errors import SettingError
from swift.simulate.traces import Event, read_trace

EVENTS = "0,add,node1\r\n0,add,node2\n\n60000,remove,node1\n60000,add,node3\n90500,remove,node2\n"
AVAILABILITY = "2021-12-11, 23:59:30, 3\n2021-12-12, 00:00:10, 1\n2021-12-12, 00:01:10, 4\n2021-12-12, 00:01:30, 4\n"


@pytest.fixture
def read(tmp_path):
    """Reads a text, and says what was warned of."""

    def run(text, seed=0):
        path, told = tmp_path / "trace.csv", []
        path.write_text(text)
        return read_trace(path, told.append, seed), told

    return run


def test_events(read):
    trace, told = read(EVENTS)
    assert told == []
    assert trace.events[2:] == (
        Event(60.0, "remove", "node1"),
        Event(60.0, "add", "node3"),
        Event(90.5, "remove", "node2"),
    )
    assert (trace.initial, trace.horizon_s, trace.num_failures, trace.most_nodes) == (("node1", "node2"), 90.5, 2, 2)
    assert [change.time_s for change in trace.changes] == [60.0, 90.5]


def counts_of(trace):
    live, counts = set(trace.initial), {0.0: len(trace.initial)}
    for time_s, removed, added in trace.changes:
        assert set(removed) <= live
        assert not set(added) & live
        live = live - set(removed) | set(added)
        counts[time_s] = len(live)
    return counts


def test_availability(read):
    trace, told = read(AVAILABILITY)
    assert told == []
    assert counts_of(trace) == {0.0: 3, 40.0: 1, 100.0: 4}
    assert (trace.horizon_s, trace.num_failures) == (120.0, 2)


def test_who_goes_is_chosen_by_the_seed(read):
    text = "2021-12-11, 10:00:00, 30\n2021-12-11, 10:01:00, 9\n2021-12-11, 10:02:00, 9\n"
    assert read(text, 5)[0] == read(text, 5)[0]
    assert read(text, 5)[0] != read(text, 6)[0]


def test_rows_out_of_order_are_sorted_and_told(read):
    rows = AVAILABILITY.splitlines()
    trace, told = read("\n".join([rows[0], rows[3], rows[1], rows[2]]))
    assert trace == read(AVAILABILITY)[0]
    (line,) = told
    assert line.endswith("trace.csv: 2 rows are out of order, the first in line 3; they are sorted")
    rows = EVENTS.replace("\r", "").split("\n")
    trace, (line,) = read("\n".join([rows[5], *rows[:5]]))
    assert trace == read(EVENTS)[0]
    assert line.endswith("trace.csv: 4 rows are out of order, the first in line 2; they are sorted")


def test_of_rows_of_one_time_the_last_count_holds(read):
    text = "2021-12-11, 10:00:00, 3\n2021-12-11, 10:01:00, 8\n2021-12-11, 10:01:00, 2\n2021-12-11, 10:02:00, 2\n"
    assert counts_of(read(text)[0]) == {0.0: 3, 60.0: 2}


REFUSED = {
    "": "has no rows",
    "0,add,node1\n-5,remove,node1": "line 2, '-5,remove,node1': the time is negative",
    "0,add,node1\n\n5,kill,node1": "line 3, '5,kill,node1': there is no event 'kill'; must be "
    "MILLISECONDS,add|remove,NODE",
    "0,add,node1\n5,remove": "line 2, '5,remove': must be MILLISECONDS,add|remove,NODE",
    "0,add,node1\nsoon,remove,node1": "line 2, 'soon,remove,node1': must be MILLISECONDS,add|remove,NODE",
    "0,add,node1\n5,remove,node2": "line 2, 'remove,node2': node2 is not present at that time",
    "0,add,node1\n5,add,node1": "line 2, 'add,node1': node1 is already present at that time",
    "0,add,node1\n0,add,node2": "has no length: all its rows have the same time",
    "2021-12-11, 10:00:00, 3\n2021-12-11, 25:00:00, 3": "line 2, '2021-12-11, 25:00:00, 3': must be YYYY-MM-DD, "
    "HH:MM:SS, COUNT",
    "2021-12-11, 10:00:00, 3\n2021-12-11, 10:00:10, -3": "line 2, '2021-12-11, 10:00:10, -3': the count must be 0 to "
    "100,000",
    "2021-12-11, 10:00:00, 3\n2021-12-11, 10:00:10, many": "line 2, '2021-12-11, 10:00:10, many': must be YYYY-MM-DD, "
    "HH:MM:SS, COUNT",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_row_that_cannot_be_is_told_by_its_line(read, text):
    with pytest.raises(SettingError) as told:
        read(text)
    assert told.value.allowed == REFUSED[text]


def test_a_trace_that_would_take_gigabytes_is_told(read):
    whole = [f"2021-12-11, 10:00:{second:02}, {100_000 * (second % 2)}" for second in range(20)]
    with pytest.raises(SettingError, match="at most 1,000,000 rows and changes of nodes, in 64 MB"):
        read("\n".join(whole))
    assert read("\n".join(whole[:3]))[0].most_nodes == 100_000


@pytest.mark.parametrize(("limit", "most"), [("_MAX_EVENTS", 5), ("_MAX_BYTES", 100)])
def test_a_long_file_is_told(read, monkeypatch, limit, most):
    monkeypatch.setattr(sys.modules[read_trace.__module__], limit, most)
    with pytest.raises(SettingError, match="must have at most"):
        read(EVENTS * 2)


def test_a_file_that_cannot_be_read_is_told(tmp_path):
    with pytest.raises(SettingError, match="cannot be read: No such file"):
        read_trace(tmp_path / "none.csv", print)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingError, match="cannot be read: it is not text"):
        read_trace(tmp_path / "binary.csv", print)


def test_a_byte_order_mark_is_none_of_the_first_row(read):
    for text in (EVENTS, AVAILABILITY):
        assert read("\ufeff" + text)[0] == read(text)[0]
