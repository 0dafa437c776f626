"""A platform of which JAX finds no device costs one line, whichever command asks for it."""

import json
import os
import subprocess
import sys

import pytest

EACH = """
import contextlib, io, json, sys
from swift.cli.main import main
for words in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            code = main(words)
        except BaseException as error:
            code = repr(error)
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""
"""Runs commands one after the other in one process, in which JAX never starts."""


def refusals(where, platform, commands):
    """The lines of the commands, each of which has to be refused without any other output and with nothing left."""
    before = sorted(where.rglob("*"))
    environment = os.environ | {"JAX_PLATFORMS": platform}
    told = subprocess.run(
        [sys.executable, "-c", EACH],
        input=json.dumps(commands),
        cwd=where,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    lines = []
    for words, line in zip(commands, told.stdout.splitlines(), strict=True):
        code, out, err = json.loads(line)
        assert (code, out, err.count("\n")) == (2, "", 1), (words, code, out, err)
        lines.append(err)
    assert sorted(where.rglob("*")) == before
    return lines


@pytest.mark.parametrize("platform", ["cuda", "nonsense"])
def test_one_line_for_each_command_that_starts_jax(half, platform):
    on_devices = ["--set", "Experiment.ranks=virtual"]
    commands = [
        ["train", "tiny.gin", "--run-dir", "new", *on_devices],
        ["train", "tiny.gin", "--run-dir", "new", "--set", "Experiment.ranks=devices"],
        ["train", "tiny.gin", "--run-dir", "half", "--resume", *on_devices],
        ["compare", "tiny.gin", "--run-dir", "new", *on_devices],
    ]
    for line in refusals(half.parent, platform, commands):
        assert line.startswith(f"swift: JAX_PLATFORMS = '{platform}': must name platforms whose devices JAX finds here")
        assert "swift doctor --host" in line
