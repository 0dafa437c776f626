"""Files that grow, are cut and are replaced while they are followed, compared with the whole file; and leases."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift.runlog.following import FollowedLines, LeaseWatch
from swift.runlog.lease import SILENCE_S, Owner, ProcessTable, Verdict, acquire_lease, this_process


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def append(path, text: bytes) -> None:
    with path.open("ab") as file:
        file.write(text)


def test_only_what_is_new_is_read(path):
    followed = FollowedLines(path)
    assert followed.read().lines == []
    append(path, b"one\ntwo\n")
    assert followed.read().lines == [b"one", b"two"]
    assert followed.read().lines == []
    append(path, b"three\n")
    new = followed.read()
    assert (new.lines, new.is_restarted, new.bytes_left) == ([b"three"], False, 0)


def test_what_was_read_is_not_read_again(path, monkeypatch):
    append(path, b"x" * 99 + b"\n")
    path.write_bytes(path.read_bytes() * 1000)
    followed = FollowedLines(path)
    assert len(followed.read().lines) == 1000
    read, real = [], os.pread
    monkeypatch.setattr(os, "pread", lambda *words: read.append(real(*words)) or read[-1])
    append(path, b"new\n")
    assert followed.read().lines == [b"new"]
    assert sum(map(len, read)) < 200


def test_half_a_line_waits_for_its_end(path):
    followed = FollowedLines(path)
    append(path, b'{"step": 1}\n{"st')
    new = followed.read()
    assert (new.lines, new.bytes_left) == ([b'{"step": 1}'], 4)
    assert followed.read().lines == []
    append(path, b'ep": 2}\n')
    assert followed.read().lines == [b'{"step": 2}']


def test_a_line_longer_than_a_read_is_one_line(path):
    followed = FollowedLines(path, max_bytes=10)
    append(path, b"a" * 1000)
    assert followed.read().lines == []
    append(path, b"\nb\nc")
    lines = followed.read().lines + followed.read().lines
    assert lines == [b"a" * 1000, b"b"]


def test_much_is_read_in_parts(path):
    append(path, b"".join(b"%d\n" % number for number in range(1000)))
    followed, lines, parts = FollowedLines(path, max_bytes=100), [], 0
    while (new := followed.read()).lines:
        lines, parts = lines + new.lines, parts + 1
    assert lines == [b"%d" % number for number in range(1000)]
    assert parts > 10


def test_a_file_that_was_cut_and_is_as_long_again_is_read_anew(path):
    append(path, b"1 first\n2 first\n3 first\n")
    followed = FollowedLines(path)
    followed.read()
    os.truncate(path, 8)
    append(path, b"2 later\n3 later\n4 later\n")
    new = followed.read()
    assert new.is_restarted
    assert new.lines == [b"1 first", b"2 later", b"3 later", b"4 later"]


def test_another_file_of_the_same_name_is_read_anew(path, tmp_path):
    append(path, b"same\n")
    followed = FollowedLines(path)
    followed.read()
    (tmp_path / "other").write_bytes(b"same\nmore\n")
    os.replace(tmp_path / "other", path)
    new = followed.read()
    assert (new.is_restarted, new.lines) == (True, [b"same", b"more"])


def test_a_file_that_is_gone_and_comes_back_is_read_anew(path):
    append(path, b"one\n")
    followed = FollowedLines(path)
    followed.read()
    path.unlink()
    assert followed.read().is_restarted
    assert not followed.read().is_restarted
    append(path, b"two\n")
    assert followed.read().lines == [b"two"]


def test_a_named_pipe_is_refused_and_not_waited_for(path):
    os.mkfifo(path)
    with pytest.raises(OSError, match="is not a regular file"):
        FollowedLines(path).read()


changes = st.lists(st.binary(min_size=1, max_size=12) | st.integers(0, 60), max_size=12)


@given(changes, st.integers(1, 40))
def test_lines_read_are_those_of_the_file_whatever_happens_to_it(tmp_path_factory, changes, max_bytes):
    """A change appends bytes, each time other ones, or cuts the file as a resume does."""
    path = tmp_path_factory.mktemp("followed") / "lines"
    path.touch()
    followed, lines = FollowedLines(path, max_bytes), []
    for number, change in enumerate(changes):
        if isinstance(change, bytes):
            append(path, b"%d " % number + change + b"\n" * (number % 2))
        else:
            os.truncate(path, min(change, path.stat().st_size))
        for _ in range(1 + number % 3):
            new = followed.read()
            lines = new.lines if new.is_restarted else lines + new.lines
    while (new := followed.read()).lines:
        lines = new.lines if new.is_restarted else lines + new.lines
    assert lines == path.read_bytes().split(b"\n")[:-1]


def test_an_owner_on_this_machine_lives_as_long_as_its_process(tmp_path):
    watch = LeaseWatch(tmp_path)
    assert watch.look(0.0, 0.0) == (Verdict.DEAD, None)
    with acquire_lease(tmp_path) as lease:
        assert watch.look(1e6, 1e9) == (Verdict.LIVES, lease.owner)
    assert watch.look(2e6, 1e9) == (Verdict.DEAD, None)
    ended = Owner(this_process().place, this_process().pid, 1, "2026-01-01T00:00:00+00:00", "token")
    (tmp_path / ".lease-1.json").write_bytes(ended.encode())
    assert watch.look(3e6, 1e9) == (Verdict.DEAD, ended)


def test_an_owner_on_another_machine_lives_as_long_as_its_heart_beats(tmp_path):
    """Its clock is an hour ahead, and nothing depends on it."""
    owner = Owner(ProcessTable("there", "boot", "pid:[1]"), 7, 70, "2026-01-01T00:00:00+00:00", "token")
    path, watch = tmp_path / ".lease-2.json", LeaseWatch(tmp_path)
    path.write_bytes(owner.encode())

    def look(beat: float, time: float) -> Verdict:
        os.utime(path, (beat + 3600, beat + 3600))
        return watch.look(time, 1000.0 + time)[0]

    assert look(1000, 0) is Verdict.UNSURE
    assert look(1005, 5) is Verdict.LIVES
    assert look(1005, 5 + SILENCE_S - 1) is Verdict.UNSURE
    assert look(1005, 5 + SILENCE_S) is Verdict.DEAD
    assert look(1070, 5 + SILENCE_S + 5) is Verdict.LIVES


def test_a_line_that_is_too_long_is_an_empty_one(path):
    followed = FollowedLines(path, max_bytes=10, most_in_line=100)
    append(path, b"one\n" + b"x" * 1000)
    lines = [*followed.read().lines, *followed.read().lines]
    assert followed.offset > 800
    append(path, b"y" * 50 + b"\ntwo\n")
    for _ in range(20):
        lines += followed.read().lines
    assert lines == [b"one", b"", b"two"]
