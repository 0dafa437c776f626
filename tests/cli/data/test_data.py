"""``swift data``: a profile, a plan and a measurement, of an experiment's documents or of a pipeline alone."""

import json
import shutil
import signal
import subprocess
import sys

import pytest

from swift.cli.main import main
from tests.input.hosts import wait_for

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


ENDING = """
import os
import shutil
import signal
import time
from pathlib import Path


def ending(sample, how):
    if how == "exit":
        os._exit(0)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "wait":
        Path("pid").write_text(str(os.getpid()))
        time.sleep(600)
    return sample
"""
"""An operator that ends its process, or waits."""


GUARDED = """
import os
import sys
import threading
from swift.cli.processes import run_in_child


def ends(running):
    note = running.note

    def during(name):
        thread = threading.Thread(target=note, args=(name,))
        thread.start()
        thread.join()

    {ends}
    os._exit(7)


sys.exit(run_in_child(ends, "data bench"))
"""
"""A process that is ended while its threads run operators."""


@pytest.fixture
def ending(here):
    """A function that starts an action on a pipeline whose operator ends its process in some way."""
    (here / "own_operators.py").write_text(ENDING)
    mapped = "Pipeline.operators = (@ends/Map(),)\nends/Map.function = @ending\n"
    config = "import own_operators\n" + TRAINED.rpartition("Pipeline.operators")[0] + mapped

    def start(action: str, how: str) -> subprocess.Popen[str]:
        (here / "ending.gin").write_text(config + f"ending.how = '{how}'\n")
        words = ["data", action, "ending.gin"]
        words += ["--seconds", "0.1"] if action == "bench" else []
        program = [sys.executable, "-m", "swift", *words]
        return subprocess.Popen(program, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return start


@pytest.mark.slow
@pytest.mark.parametrize("action", ["profile", "plan", "bench"])
@pytest.mark.parametrize(("how", "end"), [("exit", "exit code 0"), ("kill", "SIGKILL"), ("none", "")])
def test_an_operator_that_ends_the_process_costs_a_line(ending, action, how, end):
    with ending(action, how) as command:
        out, err = command.communicate()
    if how == "none":
        assert (command.returncode, err) == (0, "")
        assert out
        return
    said = f"the process that runs the operators was ended in the midst ({end})"
    by = "while operator ending ran: by it, by what it calls, or from outside"
    assert (command.returncode, out) == (3, "")
    assert err == f"swift: data {action} ending.gin: {said}, {by}\n"


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ("note('cut')", "while operator cut ran: by it, by what it calls, or from outside"),
        ("note('join'), during('cut')", "while operators cut and join ran: by one of them, by what one calls, or from"),
        ("note('cut'), note('')", "while no operator ran: by what reads the source, by what an operator has left"),
    ],
    ids=["one", "two", "none"],
)
def test_the_operators_that_run_when_the_process_ends_are_named(ends, said):
    program = [sys.executable, "-c", GUARDED.format(ends=ends)]
    ended = subprocess.run(program, capture_output=True, text=True, check=False)
    assert ended.returncode == 3
    how = "the process that runs the operators was ended in the midst (exit code 7)"
    assert ended.stderr.startswith(f"swift: data bench: {how}, {said}")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_signal_to_the_command_reaches_the_operators(here, ending, number, code):
    with ending("profile", "wait") as command:
        wait_for((here / "pid").exists)
        wait_for((here / "pid").read_text)
        command.send_signal(number)
        out, err = command.communicate()  # whose pipes end with all that have them
    assert (command.returncode, out, err) == (code, "", "")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("config", ["pipeline.gin", "trained.gin"])
def test_a_profile_has_each_operator(capsys, config):
    facts = told(capsys, "profile", config)
    names = {"pipeline.gin": "tokenize", "trained.gin": "tokenize the documents"}
    assert [one["name"] for one in facts["operators"]] == ["drop_duplicates", names[config]]
    assert (facts["num_records"], facts["num_profiled"]) == (60, 16)
    assert all(0 < one["cpu_s"] <= one["seconds"] for one in facts["operators"])
    assert main(["data", "profile", config, "--records", "100"]) == 0
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


@pytest.mark.parametrize("action", ["profile", "plan", "bench"])
@pytest.mark.parametrize("line", ['{"txt": "a"}\n', "{\n", "3\n"])
def test_records_that_operators_cannot_read_are_refused_by_name(here, capsys, action, line):
    (here / "texts.jsonl").write_text(line)
    assert main(["data", action, "pipeline.gin"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "Pipeline.source = JsonLines(pattern='texts.jsonl'): texts.jsonl" in err
    assert sorted(path.name for path in here.iterdir()) == ["pipeline.gin", "texts.jsonl", "trained.gin"]


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--input-hosts", "nonsense"),
            "--input-hosts = 'nonsense': must be HOST:PORT, or several of them with commas between",
        ),
        (
            ("--input-hosts", "127.0.0.1:99999"),
            "--input-hosts = '127.0.0.1:99999': must be HOST or HOST:PORT, with a port below",
        ),
        (
            ("--input-hosts", "127.0.0.1:0"),
            "--input-hosts = '127.0.0.1:0': must be HOST:PORT, with the port on which it listens",
        ),
        (
            ("--input-hosts", "127.0.0.1:1,"),
            "--input-hosts = '': must be HOST:PORT, or several of them with commas between",
        ),
        (("--input-hosts", "nowhere.invalid:1"), "--input-hosts = 'nowhere.invalid': is not a known host"),
        (
            ("--input-hosts", "10.1.2.3:7000"),
            "--input-hosts = '10.1.2.3': is a network, on which nothing is encrypted; add --",
        ),
        (("--input-hosts", "127.0.0.1:1"), "--key-file = (not set): the machines need a key"),
        (("--input-hosts", "127.0.0.1:1", "--key-file", "none"), "--key-file = 'none': cannot be read: No such file"),
        (("--insecure-network",), "--insecure-network = (set): goes with --input-hosts, which is not set"),
    ],
)
@pytest.mark.usefixtures("here")
def test_an_address_or_a_key_that_cannot_be_used_is_refused(capsys, words, said):
    assert main(["data", "plan", "pipeline.gin", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--listen", "10.1.2.3:7000"), "--listen = '10.1.2.3': is a network"),
        (("--listen", "127.0.0.1:0", "--processes", "0"), "--processes = 0: must be a whole number of at least 1"),
        (("--listen", "127.0.0.1:0"), "--key-file = (not set)"),
        (("--listen", "127.0.0.1:1", "--key-file", "key"), "--listen = '127.0.0.1:1': cannot be listened on"),
    ],
)
@pytest.mark.usefixtures("here")
def test_what_cannot_be_served_is_refused(capsys, monkeypatch, words, said):
    def denied(*_, **__) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("socket.create_server", denied)
    assert main(["data", "serve", "pipeline.gin", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_host_that_is_not_there_is_told_and_done_without(here, capsys):
    (here / "key").write_text("k" * 32)
    (here / "key").chmod(0o600)
    facts = told(capsys, "plan", "pipeline.gin", "--input-hosts", "127.0.0.1:1", "--key-file", "key")
    assert facts["num_offloaded"] is None
    assert (
        main(["data", "bench", "pipeline.gin", "--seconds", "0.1", "--input-hosts", "127.0.0.1:1", "--key-file", "key"])
        == 0
    )
    said = "input host 127.0.0.1:1 cannot be reached (Connection refused): samples are made without it\n"
    assert capsys.readouterr().err == f"swift: {said}"


@pytest.mark.slow
def test_what_one_command_serves_another_measures(here, capsys, tmp_path_factory, monkeypatch):
    words = ["data", "serve", "pipeline.gin", "--listen", "127.0.0.1:0", "--key-file", "key"]
    with subprocess.Popen([sys.executable, "-m", "swift", *words], cwd=here, stdout=subprocess.PIPE, text=True) as host:
        try:
            assert host.stdout is not None
            line = host.stdout.readline()
            assert line.endswith(" is ready, with 1 process\n")
            address = line.split()[1]
            facts = told(capsys, "plan", "pipeline.gin", "--input-hosts", address, "--key-file", "key")
            assert [reason.partition(":")[0] for reason in facts["reasons"]][3] == "offload"
            elsewhere = tmp_path_factory.mktemp("elsewhere")  # the host would look again at files that are its own
            for name in ("pipeline.gin", "key"):
                shutil.copy(here / name, elsewhere)
            (elsewhere / "texts.jsonl").write_text('{"text": "another"}\n')
            monkeypatch.chdir(elsewhere)
            assert main(["data", "plan", "pipeline.gin", "--input-hosts", address, "--key-file", "key"]) == 2
            assert "has another data: all machines need the same" in capsys.readouterr().err
        finally:
            host.kill()
