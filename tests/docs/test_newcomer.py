"""Commands of README, tutorial and guide work for a newcomer, one after the other, in one directory."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "docs/tutorial.md", "docs/guide.md")
NOT_HERE = {
    "Experiment.ranks=devices": "needs an accelerator",
    "gpt_small": "needs a GPU",
    "--topology v5e": "needs a TPU's compiler",
}
"""Commands that this machine cannot run, by a part of each."""
SMALL = """
Experiment.model = @ModelConfig()
ModelConfig.num_layers = 4
ModelConfig.model_dim = 16
ModelConfig.num_heads = 2
ModelConfig.ffn_dim = 32
ModelConfig.sequence_length = 32
ModelConfig.moe_pattern = (True,)
"""
"""Settings that make the demo's model so small that thirty commands take minutes; all that is typed stays as it is."""


class Typed(NamedTuple):
    """Action of a reader: types a command, or writes a file that is shown."""

    command: str = ""
    name: str = ""
    text: str = ""


def typed(document: str) -> Iterator[Typed]:
    """Lists the actions of a reader of a document, in order."""
    text = (ROOT / document).read_text().replace("\\\n", " ")
    block: list[str] | None = None
    for line in text.splitlines():
        if line.startswith("```"):
            name = re.fullmatch(r"# ([\w.]+)", block[0]) if block else None
            if block and name:
                # The name is a comment in Python and in gin, and no part of other files.
                lines = block if name[1].endswith((".py", ".gin")) else block[1:]
                yield Typed(name=name[1], text="\n".join(lines) + "\n")
            block = [] if block is None else None
        elif block is not None:
            block.append(line)
        elif re.match(r"    +python -m swift ", line):
            yield Typed(command=" ".join(line.split("#")[0].split()))


STEPS = [step for document in DOCUMENTS for step in typed(document)]
COMMANDS = [step.command for step in STEPS if step.command]
RUN_HERE = [command for command in COMMANDS if not any(part in command for part in NOT_HERE)]


def test_a_newcomer_types_thirty_commands_at_least():
    assert len(RUN_HERE) >= 30
    assert all(any(part in command for command in COMMANDS) for part in NOT_HERE)


@pytest.mark.slow
def test_all_commands_work_in_order(tmp_path):
    for folder in ("experiments", "examples"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for path in (tmp_path / "experiments" / name for name in ("demo.gin", "recycle/kill.gin")):
        path.write_text(path.read_text() + SMALL)
    (tmp_path / "corpus" / "deep").mkdir(parents=True)
    names = [f"corpus/deep/{number}.txt" for number in range(12)]
    for name in (*names, "train.txt", "validation.txt"):  # texts of the reader's own
        (tmp_path / name).write_text(f"a line of {name}\n" * 2000)
    environment = os.environ | {
        "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    for step in STEPS:
        if step.name:
            (tmp_path / step.name).write_text(step.text)
        elif step.command in RUN_HERE:
            words = [sys.executable, *shlex.split(_expanded(step.command, tmp_path))[1:]]
            told = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
            assert told.returncode == 0, f"{step.command}\n{told.stderr[-3000:]}"


def _expanded(command: str, directory: Path) -> str:
    """A command after the shell has put names in place of a pattern."""
    return re.sub(
        r"(?<= )[\w./]+\*\.gin",
        lambda found: " ".join(str(path.relative_to(directory)) for path in sorted(directory.glob(found[0]))),
        command,
    )
