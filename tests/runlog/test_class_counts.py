"""Counts by expert class beside the metrics: what is sound comes back, however the files end, and damage is known."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swift.errors import SettingError
from swift.runlog.expert_counts import CLASS_COUNTS, KINDS, ClassCounts, CountsWriter
from swift.runlog.files import EVENTS, METRICS
from swift.runlog.reading import read_run
from swift.runlog.run_directory import RunDirectory

SHAPE = (2, 3)
STEPS = 6
HEADER, ROW = 512, 8 + 3 * 2 * 3 * 4 + 4


def counts(step):
    return {kind: np.full(SHAPE, 10 * step + nth, np.int32) for nth, kind in enumerate(KINDS)}


def record(step):
    return {"step": step, "loss": 1 / step} | {kind: values.tolist() for kind, values in counts(step).items()}


def log(path, steps, opened=RunDirectory.create, *more):
    with opened(path, "", *more) as directory:
        for step in steps:
            directory.log_step({"step": step, "loss": 1 / step} | counts(step))
            directory.log_event("checkpoint", step)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "run"
    log(path, range(1, STEPS + 1))
    return path


@pytest.fixture
def copy(run_dir, tmp_path):
    return shutil.copytree(run_dir, tmp_path / "run")


def records(path):
    return [{name: value for name, value in one.items() if name != "time"} for one in read_run(path).metrics]


def test_counts_are_in_a_file_of_their_own_and_come_back(run_dir):
    assert not set(KINDS) & set(json.loads((run_dir / METRICS).read_text().splitlines()[0]))
    assert (run_dir / CLASS_COUNTS).stat().st_size == HEADER + STEPS * ROW
    assert records(run_dir) == [record(step) for step in range(1, STEPS + 1)]


def whole_lines(path, name, size):
    return (path / name).read_bytes()[:size].count(b"\n")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_nothing_sound_is_lost_wherever_the_files_end(run_dir, tmp_path_factory, data):
    """Ends as a power failure or a full disk may leave them, each file by itself."""
    path = shutil.copytree(run_dir, tmp_path_factory.mktemp("torn") / "run")
    sizes = {name: data.draw(st.integers(0, (path / name).stat().st_size)) for name in (METRICS, CLASS_COUNTS, EVENTS)}
    for name, size in sizes.items():
        with (path / name).open("r+b") as file:
            file.truncate(size)
    step = data.draw(st.integers(0, STEPS))
    num_lines = min(step, whole_lines(run_dir, METRICS, sizes[METRICS]))
    num_rows = min(num_lines, max(0, sizes[CLASS_COUNTS] - HEADER) // ROW)
    num_events = whole_lines(run_dir, EVENTS, sizes[EVENTS])

    log(path, [STEPS + 1], RunDirectory.resume, step)
    run = read_run(path)
    expected = [record(one) for one in range(1, num_lines + 1)]
    for one in expected[num_rows:]:
        for kind in KINDS:
            del one[kind]
    assert records(path) == [*expected, record(STEPS + 1)]
    steps_R = np.concatenate([steps_R for steps_R, _ in run.metrics.counts.blocks()])
    assert steps_R.tolist() == [*range(1, num_rows + 1), STEPS + 1]
    assert run.metrics.missing == [range(num_lines + 1, STEPS + 1)] * (num_lines < STEPS)
    assert len(run.events) == num_events + 1


@settings(max_examples=60, deadline=None)
@given(bad=st.sets(st.integers(0, STEPS - 1)), byte=st.integers(0, ROW - 1), step=st.integers(0, STEPS + 1))
@example(bad=set(range(STEPS)), byte=0, step=3)
@example(bad={2, 3, 4, 5}, byte=0, step=1)
def test_a_damaged_row_costs_itself_alone(run_dir, tmp_path_factory, bad, byte, step):
    path = shutil.copytree(run_dir, tmp_path_factory.mktemp("damaged") / "run")
    content = bytearray((path / CLASS_COUNTS).read_bytes())
    for row in bad:
        content[HEADER + row * ROW + byte] ^= 0x40
    (path / CLASS_COUNTS).write_bytes(content)
    found, sound = ClassCounts.open(path / CLASS_COUNTS), [row + 1 for row in range(STEPS) if row not in bad]
    assert [one for steps_R, _ in found.blocks() for one in steps_R.tolist()] == sound
    assert found.num_upto(step) == max([one for one in sound if one <= step], default=0)
    assert [row for row, _ in found.after(step, STEPS - 1)] == [one for one in sound if step < one < STEPS]
    for one in range(1, STEPS + 1):
        for hint in (one - 1, one, -1, STEPS):
            counts_KLE = found.at(one, hint)
            assert (None if counts_KLE is None else counts_KLE[1, 0, 0]) == (10 * one + 1 if one in sound else None)


@pytest.mark.parametrize("damage", [b"[", b"\0", json.dumps({"layers": 2, "classes": 3}).encode()])
def test_a_damaged_header_is_told_in_a_line_and_nothing_is_changed(copy, damage):
    content = (copy / CLASS_COUNTS).read_bytes()
    (copy / CLASS_COUNTS).write_bytes(damage + content[len(damage) :])
    before = {name: (copy / name).read_bytes() for name in (METRICS, CLASS_COUNTS)}
    for read in (lambda: read_run(copy), lambda: RunDirectory.resume(copy, "", 3)):
        with pytest.raises(SettingError, match=r"class_counts.bin.*is damaged, or of another version") as told:
            read()
        assert "\n" not in str(told.value)
    assert before == {name: (copy / name).read_bytes() for name in (METRICS, CLASS_COUNTS)}
    (copy / CLASS_COUNTS).unlink()
    log(copy, [4], RunDirectory.resume, 3)
    assert [KINDS[0] in one for one in records(copy)] == [False, False, False, True]


def test_a_row_that_could_not_be_written_whole_shifts_none(tmp_path, monkeypatch):
    writer = CountsWriter.open(tmp_path / CLASS_COUNTS)
    values = np.ones((3, *SHAPE), int)
    writer.write(1, values)
    with monkeypatch.context() as patch:
        write = __import__("os").pwrite

        def full(descriptor, content, offset):
            write(descriptor, content[:7], offset)
            raise OSError(28, "No space left on device")

        patch.setattr("swift.runlog.expert_counts.os.pwrite", full)
        with pytest.raises(OSError, match="No space"):
            writer.write(2, values)
    writer.write(3, values)
    writer.close()
    assert [steps_R.tolist() for steps_R, _ in ClassCounts.open(tmp_path / CLASS_COUNTS).blocks()] == [[1, 3]]


def test_counts_of_another_shape_do_not_go_into_a_file(copy):
    with RunDirectory.resume(copy, "", 3) as directory, pytest.raises(SettingError, match="2 layers of 3 classes"):
        directory.log_step({"step": 4} | {kind: [[1]] for kind in KINDS})


def test_steps_without_a_record_are_known(tmp_path):
    log(tmp_path / "run", [1, 2, 5, 7])
    run = read_run(tmp_path / "run")
    assert run.metrics.missing == [range(3, 5), range(6, 7)]
    assert records(tmp_path / "run") == [record(step) for step in (1, 2, 5, 7)]
