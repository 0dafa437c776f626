"""`swift compile`: what a person and a program get, and how a mistake, a crash and Ctrl-C end."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from swift.cli.compile import _ask, _stderr_tail
from swift.pod_compile.compile import REFUSED, TOO_LARGE

TINY = ("compile", "tiny.gin", "--topology")


@pytest.mark.slow
def test_a_program_gets_one_document(tell):
    told = tell(*TINY, "cpu:2", "--format", "json")
    assert (told.code, told.new) == (0, [])
    assert told.err == "compiled 1/1: all live, fits\n"
    facts = json.loads(told.out)
    (report,) = facts["configurations"]
    assert facts["topology"]["devices"] == report["devices"] == 2
    assert report["result"] == "fits"
    assert report["exchange"]["compiled_bytes"] == report["exchange"]["formula_bytes"] > 0
    assert report["memory"]["needed_bytes"] > report["memory"]["arguments_bytes"] > 0
    assert report["flops"] > 0


def test_what_does_not_fit_is_told_and_then_ends_with_code_3(tell, monkeypatch):
    memory = {"needed_bytes": 3 << 30, "capacity_bytes": 1 << 30}
    canned = {"failed": [], "lost_ranks": [], "result": TOO_LARGE, "memory": memory, "compile_s": 1.0}
    asked = []
    monkeypatch.setattr("swift.cli.compile._ask", lambda request: asked.append(request) or canned)
    told = tell(*TINY, "cpu:2", "--format", "json")
    assert (told.code, told.new) == (3, [])
    assert json.loads(told.out)["configurations"] == [canned]
    last = told.err.splitlines()[-1]
    assert last == "swift: 1 of 1 configurations cannot run on cpu:2: all live"
    (row,) = [line for line in tell(*TINY, "cpu:2").out.splitlines() if line.startswith("all live")]
    assert row.split() == ["all", "live", "too", "large", "3", "1", "-", "-", "-", "1.0"]
    assert [(request["topology"], request["workers"], request["ranks"]) for request in asked] == [("cpu:2", [], [])] * 2


@pytest.mark.slow
def test_neighbours_of_one_pipeline_have_a_rank_less(tell):
    told = tell(*TINY, "cpu:2", "--neighbours", "--jobs", "2")
    assert (told.code, told.new) == (0, [])
    assert "all live" in told.out
    assert "1 rank(s) lost" in told.out
    assert sorted(line.partition(":")[0] for line in told.err.splitlines()) == ["compiled 1/2", "compiled 2/2"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tpu:4",), "--topology = 'tpu:4': must be such as v5e:4x4"),
        (("cpu:4",), "has 4 devices, and Topology's 1 x 1 x 2"),
        (("cpu:2", "--set", "Experiment.ranks=virtual"), "Experiment.ranks = 'virtual': runs on one device only"),
        (("cpu:2", "--fail", "0-1"), "--fail = '0-1': must be PIPELINE:STAGE"),
        (("cpu:2", "--fail", "1:0"), "--fail = 1:0: no such worker"),
        (("cpu:2", "--fail", "0:0"), "--fail = 0:0: stage 0 has no live worker"),
        (("cpu:2", "--jobs", "0"), "--jobs = 0: must be a whole number of at least 1"),
    ],
)
def test_a_mistake_costs_one_line(refusal, arguments, words):
    assert words in refusal(*TINY, *arguments)


def test_a_process_that_ends_without_a_report_is_a_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = _ask({"config": "", "topology": "nothing", "workers": [[1, 2]], "ranks": []})
    assert (told["result"], told["failed"]) == (REFUSED, ["1:2"])
    assert told["reason"].startswith("its compiler ended with code 2: swift: --topology = 'nothing'")


def test_of_what_a_compiler_says_before_it_ends_its_check_is_told():
    log = "warming up\nF1122 emitter.cc:7] Check failed: total % 6 == 0 (2 vs. 0)\n*** stack trace: ***\n  at 0x1\n"
    assert _stderr_tail(log, -6) == (
        "its compiler ended with code -6: F1122 emitter.cc:7] Check failed: total % 6 == 0 (2 vs. 0)"
    )
    assert _stderr_tail("", -9) == "its compiler ended with code -9: no word"


@pytest.mark.slow
def test_ctrl_c_ends_all_processes(here):
    command = [sys.executable, "-m", "swift", *TINY, "cpu:2"]
    with subprocess.Popen(command, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        listed = Path(f"/proc/{process.pid}/task")
        child = None
        while child is None:
            time.sleep(0.1)
            children = " ".join(file.read_text() for file in listed.glob("*/children")).split()
            child = Path(f"/proc/{children[0]}") if children else None
        time.sleep(2)  # in the midst of its imports, or of its work
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
        assert (process.returncode, out, err) == (-signal.SIGINT, b"", b"")
        deadline = time.monotonic() + 60
        while child.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not child.exists()
