"""Commands in the documents are understood, and what they point at is there."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from swift.cli.options import command_line
from swift.config.gin_reader import load_experiment

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "experiments").rglob("*.md"))
)
SETTINGS_ONLY = ("train", "compare", "launch")
MADE_BY_THE_READER = ("CONFIG.gin", "mine.gin", "chats.gin", "averaging.gin", "routed.gin", "planned.gin", "ranks.gin")


def commands(document: str, spec: str) -> Iterator[list[str]]:
    """The arguments of every command of a program that a document has, in code blocks, lines or between backticks."""
    text = (ROOT / document).read_text().replace("\\\n", " ")
    for line in text.splitlines():
        for piece in line.split("`"):
            _, found, arguments = piece.partition(f"{spec} ")
            if arguments.count('"') % 2:  # the command is itself within quotation marks, an argument of another
                arguments = arguments.rpartition('"')[0]
            arguments = arguments.replace("$JOB_COMPLETION_INDEX", "0")
            words = [word for word in shlex.split(arguments, comments=True) if word != "$@"] if found else []
            words = ["0" if word == "$SLURM_ARRAY_TASK_ID" else word for word in words]
            if words and "..." not in words:
                yield words


def documented(spec: str) -> list:
    return [
        pytest.param(words, id=f"{document}: {' '.join(words)}")
        for document in DOCUMENTS
        for words in commands(document, spec)
    ]


@pytest.mark.parametrize("words", documented("python -m swift"))
def test_a_documented_command_is_understood(words):
    options = command_line().parse_args(words)
    if options.command not in SETTINGS_ONLY:
        return
    paths = [options.config] if "config" in options else options.configs
    for pattern in map(str, paths):
        if pattern in MADE_BY_THE_READER:
            continue
        found = sorted(ROOT.glob(pattern))
        assert found, f"{pattern} is not there"
        for path in found:
            load_experiment(path, options.set)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_file_that_a_command_reads_is_there_or_is_said_to_be_the_readers(document):
    text = (ROOT / document).read_text()
    prose = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("    "))
    for words in commands(document, "python -m swift"):
        options = command_line().parse_args(words)
        settings = [setting for setting in getattr(options, "set", []) if "pattern=" in setting]
        patterns = [setting.partition("=")[2].strip("'") for setting in settings]
        for name in filter(None, (*patterns, getattr(options, "trace", None))):
            is_said = f"`{name}`" in prose or f"```\n# {name}\n" in text
            assert list(ROOT.glob(str(name))) or is_said, f"where does a reader find {name}?"


@pytest.mark.parametrize("words", documented("python benchmarks/"))
def test_a_documented_program_is_there(words):
    path, *arguments = words
    text = (ROOT / "benchmarks" / path).read_text()
    for word in arguments:
        if re.fullmatch(r"--?[a-z-]+|[a-z]+-?[a-z]*", word):
            assert f'"{word}"' in text, f"{path} does not know {word}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_has_every_documented_target(document):
    makefile = (ROOT / "Makefile").read_text()
    for words in re.findall(r"(?:^    |`)make ([a-z-]+)", (ROOT / document).read_text(), re.MULTILINE):
        assert f"\n{words}:" in makefile, f"make {words}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_link_leads_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / document).read_text()):
        if not target.startswith(("http:", "https:")):
            assert ((ROOT / document).parent / target).exists(), f"{target} is not there"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_in_a_document_runs(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    for block in blocks:
        exec(compile(block, document, "exec"), {"__name__": "document"})
