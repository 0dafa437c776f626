"""Command lines of processes: executables are edited only where ``launch`` is asked to."""

from pathlib import Path

import pytest

from swift.cli.console import command_line
from swift.cli.launch import Nodes, ProcessCommands
from swift.elastic.membership import Process
from swift.elastic.state import RunFiles


@pytest.mark.parametrize("flags", [[], ["--trim-executables"]])
def test_the_option_reaches_the_process_that_prepares(flags):
    launch = command_line().parse_args(["launch", "--processes", "4", "tiny.gin", *flags])
    files = RunFiles(Path("files"), Path("memory"))
    commands = ProcessCommands(
        scratch=files,
        processes=[],
        nodes=Nodes(),
        by_rank=False,
        copy_every=0,
        forming_s=30.0,
        trims=launch.trim_executables,
    )
    _, _, _, *words = commands.compile_service()
    assert command_line().parse_args(words).trim_executables == bool(flags)
    assert "--trim-executables" not in commands.checkpoint_service(Path("run"))
    _, _, _, *words = commands.member(Process((1, 2), 3))
    member = command_line().parse_args(words)
    assert (member.pipeline, member.stage, member.rank) == (1, 2, 3)
