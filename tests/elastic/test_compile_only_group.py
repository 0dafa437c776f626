"""Programs that one process compiles for a group that is not there: a real group runs them."""

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from swift.elastic.jax_group import CoordinationService

WAIT_S = 120


def start(*arguments):
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    command = [sys.executable, str(Path(__file__).parent / "compile_only_member.py"), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def said(process):
    output, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, errors
    return output.splitlines()


def run_group(sockets, programs, count, num_local):
    """Values on every device of a real group after the program."""
    service = CoordinationService(count, sockets)
    try:
        members = [start("join", num_local, programs, service.address, index, count) for index in range(count)]
        return [ast.literal_eval(said(member)[-1]) for member in members]
    finally:
        for member in members:
            member.kill()
        service.close()


def expected(count, num_local):
    sums = [sum(10.0 * index + rank for rank in range(num_local)) for index in range(count)]
    return [[sums[index] + 1000 * sums[index - 1] + 0.5 * count * num_local] * num_local for index in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("num_local", [1, 2])
def test_a_real_group_runs_what_was_compiled_in_a_rehearsal(tmp_path, sockets, num_local):
    counts = [3, 2, 3]
    said(start("rehearse", num_local, sockets, tmp_path, *counts))
    assert run_group(sockets, tmp_path / "2", 3, num_local) == expected(3, num_local)  # the last: others went before it
    assert run_group(sockets, tmp_path / "1", 2, num_local) == expected(2, num_local)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("_PUBLISHED", "cpu:elsewhere/", "0 of 2 processes have published"),
        ("_TIMEOUT", "jax_no_such_setting", "jax_no_such_setting"),
    ],
)
def test_an_unknown_jax_is_told_at_once_and_leaves_nothing_behind(sockets, name, value, told):
    begun = time.monotonic()
    error, shape = said(start("tell", 1, sockets, name, value))
    assert "forms groups in a way in which one process cannot pose as all" in error
    assert told in error
    assert error.count("pose as all") == 1
    assert shape == "(3, 1)"
    minutes = jax.config.jax_cpu_get_global_topology_timeout_minutes  # for which a group is waited for
    assert time.monotonic() - begun < 60 * minutes
