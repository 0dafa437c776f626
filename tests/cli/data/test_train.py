"""A run that trains from a pipeline of a gin file: its configuration has all of it, and it resumes exactly."""

import json
from dataclasses import dataclass

import gin
import pytest

from swift.cli import main
from swift.cli.configuration import load_stored
from swift.runlog import read_run, scalars


@gin.configurable
@dataclass(frozen=True)
class HasManyWords:
    least: int = 20

    def __call__(self, sample) -> bool:
        return len(sample["text"].split()) >= self.least


PIPED = """
include 'tiny.gin'
DataConfig.source = @Pipeline()
Pipeline.source = @JsonLines()
JsonLines.pattern = 'texts.jsonl'
Pipeline.operators = (@DropDuplicates(), @many/Filter())
many/Filter.function = @HasManyWords()
many/Filter.reads = ('text',)
HasManyWords.least = 50
"""


@pytest.fixture
def here(home, tmp_path, monkeypatch):
    (tmp_path / "tiny.gin").write_text((home / "tiny.gin").read_text().replace("TextFiles.pattern", "# "))
    texts = [path.read_text() for path in sorted((home / "corpus").iterdir())]
    lines = [json.dumps({"text": text}) + "\n" for text in [*texts, "too short", texts[0]]]
    (tmp_path / "texts.jsonl").write_text("".join(lines))
    (tmp_path / "piped.gin").write_text(PIPED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_run_trains_from_a_pipeline_and_resumes(here, capsys):
    assert main(["train", "piped.gin", "--run-dir", "whole"]) == 0
    assert main(["train", "piped.gin", "--run-dir", "halves", "--stop-at", "4"]) == 0
    texts = (here / "texts.jsonl").read_text()
    (here / "texts.jsonl").write_text(texts.replace("alpha", "omega"))
    capsys.readouterr()
    assert main(["train", "piped.gin", "--run-dir", "halves", "--resume"]) == 2
    assert "a run resumes with the data and settings that it began with" in capsys.readouterr().err
    (here / "texts.jsonl").write_text(texts)
    assert main(["train", "piped.gin", "--run-dir", "halves", "--resume"]) == 0
    whole, halves = (read_run(here / name) for name in ("whole", "halves"))
    assert scalars(whole, "loss").tolist() == scalars(halves, "loss").tolist()
    assert all(one > 0 for one in scalars(whole, "input_ms"))
    stored = load_stored(here / "whole", "RUN_DIR", here / "piped.gin")
    assert [type(one).__name__ for one in stored.data.source.operators] == ["DropDuplicates", "Filter"]
    assert stored.data.source.operators[1].function == HasManyWords(50)
