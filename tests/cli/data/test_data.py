"""``swift data``: a profile, a plan and a measurement, of an experiment's documents or of a pipeline alone."""

import json

import pytest

from swift.cli import main

PIPELINE = """
Pipeline.source = @JsonLines()
JsonLines.pattern = 'texts.jsonl'
Pipeline.operators = (@DropDuplicates(), @Tokenize(), @Pack(), @Shuffle(), @Stack())
Tokenize.tokenizer = @ByteTokenizer()
Pack.length = 16
Stack.size = 2
"""
TRAINED = """
Experiment.data = @DataConfig()
DataConfig.source = @Pipeline()
Pipeline.source = @JsonLines()
JsonLines.pattern = 'texts.jsonl'
Pipeline.operators = (@DropDuplicates(),)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    lines = [json.dumps({"text": f"text {number % 40} " * 9}) + "\n" for number in range(60)]
    (tmp_path / "texts.jsonl").write_text("".join(lines))
    (tmp_path / "pipeline.gin").write_text(PIPELINE)
    (tmp_path / "trained.gin").write_text(TRAINED)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told(capsys, *words: str) -> dict:
    assert main(["data", *words, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("config", ["pipeline.gin", "trained.gin"])
def test_a_profile_has_each_operator(capsys, config):
    facts = told(capsys, "profile", config)
    names = {"pipeline.gin": "tokenize", "trained.gin": "tokenize the documents"}
    assert [one["name"] for one in facts["operators"]] == ["drop_duplicates", names[config]]
    assert facts["num_records"] == facts["num_profiled"] == 60
    assert all(0 < one["cpu_s"] <= one["seconds"] for one in facts["operators"])
    assert main(["data", "profile", config]) == 0
    assert capsys.readouterr().out.startswith("60 of 60 records\n")


@pytest.mark.usefixtures("here")
def test_a_plan_says_what_it_chose_and_what_else_there_was(capsys):
    facts = told(capsys, "plan", "pipeline.gin", "--epochs", "50", "--cache-dir", "kept")
    assert [reason.partition(":")[0] for reason in facts["reasons"]] == ["order", "cache", "workers", "prefetch"]
    assert facts["alternatives"]["chosen"] == min(facts["alternatives"].values())
    assert main(["data", "plan", "pipeline.gin"]) == 0
    assert "as written: drop_duplicates -> tokenize\n" in capsys.readouterr().out


@pytest.mark.usefixtures("here")
def test_a_bench_measures_both(capsys):
    facts = told(capsys, "bench", "pipeline.gin", "--seconds", "0.1")
    assert set(facts) == {"as written", "planned"}
    assert all(one["samples"] > 0 for one in facts.values())


def test_an_experiment_whose_data_are_no_documents_is_refused(here, capsys):
    (here / "tokens.gin").write_text(
        "Experiment.data = @DataConfig()\nDataConfig.source = @TokenFile()\nTokenFile.path='x'"
    )
    assert main(["data", "profile", "tokens.gin"]) == 2
    assert "DataConfig.source = TokenFile(" in capsys.readouterr().err
    assert main(["data", "plan", "pipeline.gin", "--epochs", "0"]) == 2
    assert "--epochs = 0.0: must be a number above 0" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["plan", "bench"])
@pytest.mark.parametrize("directory", ["/dev/full", "texts.jsonl", "texts.jsonl/kept", "/proc/kept"])
def test_a_place_where_nothing_can_be_kept_is_refused_whatever_the_plan(here, capsys, action, directory):
    before = sorted(here.iterdir())
    assert main(["data", action, "pipeline.gin", "--cache-dir", directory]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"--cache-dir = '{directory}': samples cannot be kept there: " in err
    assert sorted(here.iterdir()) == before
