"""A run that trains from a pipeline of a gin file: its configuration has all of it, and it resumes exactly."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from swift.cli.input_hosts import input_hosts_of_runs
from swift.cli.launch import LaunchJob
from swift.cli.main import main
from swift.cli.options import command_line
from swift.config.gin_reader import load_experiment, load_stored
from swift.data.index import find_index
from swift.runlog.reading import read_run, scalars
from tests.input.hosts import always_asked


@dataclass(frozen=True)
class HasManyWords:
    least: int = 20

    def __call__(self, sample) -> bool:
        return len(sample["text"].split()) >= self.least


PIPED = """
include 'tiny.gin'
import tests.cli.data.test_train
DataConfig.source = @Pipeline()
Pipeline.source = @JsonLines()
JsonLines.pattern = 'texts.jsonl'
Pipeline.operators = (@DropDuplicates(), @many/Filter())
many/Filter.function = @HasManyWords()
many/Filter.reads = ('text',)
HasManyWords.least = 50
"""

LAUNCHED = """
import sys
from swift.cli.main import main
from swift.data import corpus
from swift.input import optimizer

corpus._FEW, optimizer._OFFLOAD_GAIN, optimizer._OFFLOAD_LEAST_S = 1, 0.0, -1e9
sys.exit(main(sys.argv[1:]))
"""
"""A command that asks input hosts however little that saves; a launch needs a process where JAX has not begun."""


@pytest.fixture
def here(home, tmp_path, monkeypatch):
    (tmp_path / "tiny.gin").write_text((home / "tiny.gin").read_text().replace("TextFiles.pattern", "# "))
    texts = [path.read_text() for path in sorted((home / "corpus").iterdir())]
    lines = [json.dumps({"text": text}) + "\n" for text in [*texts, "too short", texts[0]]]
    (tmp_path / "texts.jsonl").write_text("".join(lines))
    (tmp_path / "piped.gin").write_text(PIPED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.long
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


@pytest.mark.long
def test_a_run_without_the_input_host_that_it_names_is_the_same(here, capsys):
    assert main(["train", "piped.gin", "--run-dir", "alone", "--stop-at", "2"]) == 0
    (here / ".cache").rename(here / "built before")
    (here / "key").write_text("k" * 32)
    (here / "key").chmod(0o600)
    words = ["--input-hosts", "127.0.0.1:1", "--key-file", "key"]
    capsys.readouterr()
    assert main(["train", "piped.gin", "--run-dir", "named", "--stop-at", "2", *words]) == 0
    said = capsys.readouterr().err
    assert "input host 127.0.0.1:1 cannot be reached (Connection refused): samples are made without it\n" in said
    alone, named = (read_run(here / name) for name in ("alone", "named"))
    assert scalars(alone, "loss").tolist() == scalars(named, "loss").tolist()


@pytest.mark.parametrize(
    "command", [["train", "piped.gin"], ["compare", "piped.gin"], ["launch", "piped.gin", "--processes", "1"]]
)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--input-hosts", "nonsense"), "--input-hosts = 'nonsense': must be HOST:PORT, or several of them"),
        (("--input-hosts", "10.1.2.3:7000"), "--input-hosts = '10.1.2.3': is a network, on which nothing is encrypted"),
        (("--input-hosts", "127.0.0.1:1"), "--key-file = (not set): the machines need a key"),
        (("--input-hosts", "127.0.0.1:1", "--key-file", "none"), "--key-file = 'none': cannot be read: No such file"),
        (("--key-file", "key"), "--key-file = 'key': goes with --input-hosts, which is not set"),
        (
            ("--set", "DataConfig.source=@TokenFile()", "--set", "TokenFile.path=x", "--input-hosts", "127.0.0.1:1"),
            "DataConfig.source = TokenFile(path='x', dtype='uint16', end_of_document=None, vocab_size=None): must be a "
            "pipeline or texts",
        ),
    ],
)
def test_input_hosts_that_cannot_be_used_are_refused(here, capsys, command, words, said):
    assert main([*command, "--run-dir", "refused", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err
    assert not (here / "refused").exists()


@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_network_is_permitted_to_nobody_where_there_are_no_input_hosts(here, capsys, command):
    assert main([command, "piped.gin", "--run-dir", "refused", "--insecure-network"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "--insecure-network = (set): goes with --input-hosts, which is not set" in err
    assert not (here / "refused").exists()


@pytest.mark.usefixtures("here")
def test_launch_has_a_network_of_its_own():
    words = ["launch", "piped.gin", "--processes", "1", "--run-dir", "launched", "--insecure-network"]
    assert LaunchJob.of(command_line().parse_args(words)).connect is None


MIXED = """
include 'tiny.gin'
DataConfig.source = @Mixture()
Mixture.sources = (@lines/Pipeline(), @whole/TextFiles())
Mixture.weights = (3.0, 1.0)
lines/Pipeline.source = @JsonLines()
JsonLines.pattern = 'texts.jsonl'
lines/Pipeline.operators = (@DropDuplicates(),)
whole/TextFiles.pattern = 'whole/*.txt'
"""


@pytest.fixture
def mixed(here):
    (here / "mixed.gin").write_text(MIXED)
    (here / "whole").mkdir()
    for number in range(9):
        (here / "whole" / f"{number}.txt").write_text(f"whole {number} " * 99)
    return here


@pytest.mark.usefixtures("mixed")
def test_one_source_of_a_mixture_is_planned_at_a_time(capsys):
    assert main(["data", "plan", "mixed.gin"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    said = "DataConfig.source = @Mixture(): has 2 sources of documents: name one, as with --set DataConfig.source=@"
    assert said in err
    assert main(["data", "plan", "mixed.gin", "--set", "DataConfig.source=@lines/Pipeline()"]) == 0
    assert "as written: drop_duplicates -> tokenize the documents" in capsys.readouterr().out


@pytest.mark.usefixtures("mixed")
def test_a_host_that_cannot_be_reached_costs_one_line_for_all_sources_of_a_mixture():
    Path("key").write_text("k" * 32)
    Path("key").chmod(0o600)
    words = ["train", "mixed.gin", "--run-dir", "run", "--input-hosts", "127.0.0.1:1", "--key-file", "key"]
    options = command_line().parse_args(words)
    data = load_experiment(options.config, options.set).data
    said = []
    find_index(data, Path("corpora"), said.append, connect=input_hosts_of_runs([data], options))
    assert said == ["input host 127.0.0.1:1 cannot be reached (Connection refused): samples are made without it"]


@pytest.mark.slow
def test_an_input_host_serves_the_sources_of_a_mixture(mixed, capsys, monkeypatch):
    always_asked(monkeypatch)
    serve = ["data", "serve", "mixed.gin", "--listen", "127.0.0.1:0", "--key-file", "key"]
    assert main(["train", "mixed.gin", "--run-dir", "alone"]) == 0
    (mixed / ".cache").rename(mixed / "built before")
    with subprocess.Popen(
        [sys.executable, "-m", "swift", *serve], cwd=mixed, stdout=subprocess.PIPE, text=True
    ) as host:
        try:
            assert host.stdout is not None
            words = ["--input-hosts", host.stdout.readline().split()[1], "--key-file", "key"]
            capsys.readouterr()
            assert main(["train", "mixed.gin", "--run-dir", "helped", "--stop-at", "4", *words]) == 0
            assert capsys.readouterr().err.count("offload: all up to ") == 2
        finally:
            host.kill()
    assert main(["train", "mixed.gin", "--run-dir", "helped", "--resume"]) == 0
    alone, helped = (scalars(read_run(mixed / name), "loss").tolist() for name in ("alone", "helped"))
    assert helped == alone
    built = [
        [path.read_bytes() for path in sorted(one.rglob("swift/corpora/*/train"))]
        for one in (mixed / "built before", mixed / ".cache")
    ]
    assert built[0] == built[1]
    assert len(built[0]) == 2


@pytest.mark.slow
def test_an_input_host_serves_runs_that_have_its_key_and_data(here, capsys, monkeypatch):
    always_asked(monkeypatch)
    (here / "own.gin").write_text(PIPED.replace("@many/Filter()", "").replace("many/", "# ").replace("Has", "# "))
    serve = ["data", "serve", "own.gin", "--listen", "127.0.0.1:0", "--key-file", "key"]
    assert main(["train", "own.gin", "--run-dir", "alone"]) == 0
    (here / ".cache").rename(here / "built before")
    with subprocess.Popen([sys.executable, "-m", "swift", *serve], cwd=here, stdout=subprocess.PIPE, text=True) as host:
        try:
            assert host.stdout is not None
            words = ["--input-hosts", host.stdout.readline().split()[1], "--key-file"]
            (here / "other").write_text("k" * 32)
            (here / "other").chmod(0o600)
            capsys.readouterr()
            for command in (["train", "own.gin"], ["compare", "own.gin"]):
                assert main([*command, "--run-dir", "refused", *words, "other"]) == 2
                assert "is no input host, or has another key than --key-file\n" in capsys.readouterr().err
            launch = [sys.executable, "-m", "swift", "launch", "own.gin", "--processes", "1", "--run-dir", "refused"]
            ended = subprocess.run([*launch, *words, "other"], cwd=here, capture_output=True, text=True, check=False)
            assert ended.returncode == 2
            assert "is no input host, or has another key than --key-file\n" in ended.stderr
            assert main(["train", "own.gin", "--run-dir", "helped", *words, "key"]) == 0
            assert "offload: all up to " in capsys.readouterr().err
            (here / ".cache").rename(here / "built with the host")
            launch = ["launch", "own.gin", "--processes", "1", "--run-dir", "launched", *words, "key"]
            program = [sys.executable, "-c", LAUNCHED, *launch]
            ended = subprocess.run(program, cwd=here, capture_output=True, text=True, check=True)
            assert "offload: all up to " in ended.stderr
            (here / "copy.jsonl").write_text((here / "texts.jsonl").read_text())
            pattern = ["--set", "JsonLines.pattern=copy.jsonl"]
            assert main(["train", "own.gin", "--run-dir", "changed", *pattern, *words, "key"]) == 2
            assert "has another data: all machines need the same\n" in capsys.readouterr().err
        finally:
            host.kill()
    alone, *helped = (scalars(read_run(here / name), "loss").tolist() for name in ("alone", "helped", "launched"))
    assert helped == [alone, alone]
    built = [here / name for name in ("built before", "built with the host", ".cache")]
    trained = [[path.read_bytes() for path in one.rglob("swift/corpora/*/train")] for one in built]
    assert trained[0] == trained[1] == trained[2]
    assert len(trained[0]) == 1
