"""Output that nobody takes is dropped: no write blocks, fails or ends a process, whatever its streams are."""

import fcntl
import os
import pty
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from swift.output import end_patient, patient_stream

LINE = "a line of a run\n"


def drained(reader: int) -> bytes:
    """All that a pipe holds."""
    os.set_blocking(reader, False)
    content = b""
    with suppress(BlockingIOError):
        while piece := os.read(reader, 65536):
            content += piece
    return content


def test_what_is_read_comes_whole_and_in_order():
    reader, writer = os.pipe()
    stream = patient_stream(writer)
    for number in range(500):
        stream.write(f"{number}\n")
    assert end_patient(stream, 60.0)
    assert drained(reader).decode() == "".join(f"{number}\n" for number in range(500))
    os.close(reader)
    os.close(writer)


def test_a_reader_that_stands_still_costs_lines_and_no_time():
    """All lines are taken while nobody reads, although each asks for a flush: 1.6 MB, and a pipe holds 64 KB."""
    reader, writer = os.pipe()
    stream = patient_stream(writer)
    taken = threading.Thread(target=lambda: [stream.write(LINE) for _ in range(100_000)], daemon=True)
    taken.start()
    taken.join(120)
    assert not taken.is_alive()
    assert not end_patient(stream, 0.0)
    os.close(reader)


def test_lines_that_were_dropped_are_counted_once_somebody_reads_again():
    reader, writer = os.pipe()
    stream, num_lines = patient_stream(writer), 50_000
    for _ in range(num_lines):
        stream.write(LINE)
    content, until = b"", time.monotonic() + 120
    while b"were not shown" not in content:
        assert time.monotonic() < until, content[-200:]
        content += drained(reader)
    *lines, told = content.decode().splitlines(keepends=True)
    assert set(lines) == {LINE}
    assert told == f"swift: {num_lines - len(lines):,} lines were not shown: nobody read them\n"
    stream.write("again\n")
    assert end_patient(stream, 60.0)
    assert drained(reader) == b"again\n"
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("where", ["closed pipe", "full disk", "closed descriptor"])
def test_a_write_that_fails_is_no_error(where):
    reader, writer = os.pipe()
    os.close(reader)
    if where == "full disk":
        os.dup2(os.open("/dev/full", os.O_WRONLY), writer)
    stream = patient_stream(writer)
    if where == "closed descriptor":
        os.close(writer)
    for _ in range(3):
        print(LINE, file=stream, flush=True)
    assert end_patient(stream, 60.0)
    print(LINE, file=stream, flush=True)  # as late words of an interpreter that exits


def test_characters_that_an_encoding_lacks_are_written_otherwise():
    reader, writer = os.pipe()
    stream = patient_stream(writer, "ascii")
    stream.write("├─ ümlaut\n")
    assert end_patient(stream, 60.0)
    assert drained(reader) == b"\\u251c\\u2500 \\xfcmlaut\n"
    os.close(reader)
    os.close(writer)


PROTECTED = """
import os, sys, threading
from swift.output import finish, open_closed, protect
open_closed()
protect(["stdout", "stderr"])
"""


def protected(code: str, **more) -> subprocess.Popen:
    """A process with patient streams that runs some code."""
    return subprocess.Popen([sys.executable, "-c", PROTECTED + code], stdin=subprocess.DEVNULL, **more)


def full_pipe() -> tuple[int, int]:
    """Both ends of a pipe that has no room for another byte."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b".")
    os.set_blocking(writer, True)
    return reader, writer


def test_what_libraries_in_c_write_past_python_does_not_block_either():
    reader, writer = full_pipe()
    code = """
for _ in range(1000):
    try:
        os.write(2, b"from a library" * 100)
    except BlockingIOError:
        pass
    print("from us" * 100, file=sys.stderr, flush=True)
finish(0.1)
"""
    with protected(code, stdout=subprocess.DEVNULL, stderr=writer) as process:
        assert process.wait(60) == 0
    os.set_blocking(writer, False)  # the description that this process has is as it was
    with pytest.raises(BlockingIOError):
        os.write(writer, b"x" * 5000)
    os.close(reader)
    os.close(writer)


def test_a_child_of_a_process_writes_too():
    code = """
if os.fork() == 0:
    print("the child", flush=True)
    finish()
    os._exit(0)
os.wait()
print("the parent")
finish()
"""
    with protected(code, stdout=subprocess.PIPE) as process:
        assert process.stdout.read() == b"the child\nthe parent\n"


def test_the_last_words_of_a_process_are_written():
    code = "print(1)\nprint(2, file=sys.stderr)\nraise ValueError('x')"
    with protected(code, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        lines = process.stdout.read().decode().splitlines()
    assert (process.returncode, lines[:2], lines[-1]) == (1, ["1", "2"], "ValueError: x")


def test_descriptors_that_the_caller_has_closed_are_no_file_of_ours(tmp_path):
    code = f"""
with open({str(tmp_path / "file")!r}, "w") as file:
    print("said", file=sys.stderr, flush=True)
    os.write(2, b"a library says")
    file.write("the file")
finish()
"""
    command = 'exec "$0" -c "$1" 0<&- 2>&-'
    told = subprocess.run(["sh", "-c", command, sys.executable, PROTECTED + code], capture_output=True, check=True)
    assert told.stdout == b""
    assert (tmp_path / "file").read_text() == "the file"


def test_a_terminal_that_hangs_up_ends_nothing_by_itself():
    """The signal of the kernel is another matter; here it is ignored, as by ``nohup``."""
    master, terminal = pty.openpty()
    go, told = os.pipe()
    code = f"""
import signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
print("begun", flush=True)
os.read({go}, 1)
for _ in range(100):
    print("more", flush=True)
    print("more", file=sys.stderr, flush=True)
finish()
os._exit(7)
"""
    with protected(code, stdout=terminal, stderr=terminal, pass_fds=[go]) as process:
        os.close(terminal)
        assert os.read(master, 100) == b"begun\r\n"
        os.close(master)
        os.write(told, b"+")
        assert process.wait(60) == 7
    os.close(go)
    os.close(told)
