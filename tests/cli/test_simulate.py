"""`swift simulate`: what a person and a program get, and how a mistake is told."""

import inspect
import json
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from swift.cli.main import main
from swift.config.experiment import Experiment
from swift.simulate.engine import CAUSES
from swift.simulate.published import MODELS
from swift.simulate.registry import STRATEGIES

SOUND = "simulate --pipelines 3 --stages 2 --expert-ranks 4 --microbatches 4"
RANDOM = f"{SOUND} --mtbf 10m --duration 4h"
THIRTY = "simulate --pipelines 15 --stages 2 --microbatches 4 --remove-every 30m"


@pytest.fixture
def facts(tell):
    """The document that a command prints."""

    def run(command):
        told = tell(*command.split(), "--format", "json")
        assert (told.code, told.err) == (0, ""), told
        return json.loads(told.out)

    return run


def ettr(found, name):
    (row,) = (row for row in found["strategies"] if row["name"] == name)
    return row["ettr"]


def test_a_person_is_told_what_matters(tell):
    told = tell(*RANDOM.split(), "--strategy", "swift", "--strategy", "full")
    assert (told.code, told.err, told.new) == (0, "", [])
    lines = told.out.splitlines()
    assert lines[0] == (
        "3 pipelines x 2 stages x 4 expert ranks: 6 workers, 24 devices; 4 micro-batches per pipeline, 2 s an iteration"
    )
    assert re.fullmatch(r"4 hours, \d+ failures, one in [\d.]+ minutes, at most 6 nodes", lines[1])
    assert lines[3].split()[:4] == ["strategy", "ETTR", "iterations", "useful"]
    assert [line.split()[0] for line in lines[4:6]] == ["swift", "full"]
    # A row is named for what a run can be told to do, and the default is said to be the default.
    default = inspect.signature(Experiment).parameters["adapt"].default
    periods = "periods of the planner, roles stay; recovery times of our own kills"
    assert lines[7] == f"swift: Experiment.adapt = {default!r}, the default: {periods}"
    assert max(map(len, lines)) < 125


def test_a_program_gets_one_document(facts):
    found = facts(RANDOM)
    assert [row["name"] for row in found["strategies"]] == list(STRATEGIES[:6])
    assert [one["name"] for one in found["left_out"]] == ["oobleck", "varuna", "bamboo"]
    for row in found["strategies"]:
        assert list(row["spent_s"]) == list(CAUSES)
        assert sum(row["spent_s"].values()) == pytest.approx(4 * 3600)
        assert len(row["goodput"]) == len(found["hours"]) - 1
    assert found["job"]["num_expert_ranks"] == 4
    assert found["trace"]["hours"] == 4


def test_published_models_run_beside_the_others_and_out_of_memory_is_not_zero(tell, facts):
    found = facts(f"{THIRTY} --model gpt3-6.7b")
    assert ettr(found, "oobleck") == pytest.approx(4.065 / 5.5078, rel=1e-3)
    (bamboo,) = (row for row in found["strategies"] if row["name"] == "bamboo")
    assert (bamboo["ettr"], bamboo["out_of_memory"]) == (None, True)
    told = tell(*f"{THIRTY} --model gpt3-6.7b --strategy bamboo".split())
    assert told.code == 0
    assert re.search(r"^bamboo +out of memory$", told.out, re.MULTILINE)


def test_options_change_what_they_say(facts):
    base = facts(f"{RANDOM} --strategy swift --strategy full")
    for options, name, is_better in (
        ("--mtbf 2m", "swift", False),
        ("--repair 1h", "swift", False),
        ("--job storage=20e9", "full", True),
        ("--job restart=600", "full", False),
        ("--job checkpoint-every=1", "full", False),
    ):
        changed = ettr(facts(f"{RANDOM} --strategy swift --strategy full {options}"), name)
        assert (changed > ettr(base, name)) == is_better, options
    assert facts(f"{RANDOM} --seed 1 --strategy swift") != facts(f"{RANDOM} --strategy swift")
    assert facts(f"{RANDOM} --weibull 0.5 --strategy swift") != facts(f"{RANDOM} --strategy swift")
    assert facts(f"{RANDOM} --costs tB=9 --strategy swift") != facts(f"{RANDOM} --strategy swift")
    assert facts(f"{THIRTY} --num-failures 3")["trace"]["hours"] == 1.5


def test_a_file_of_events_and_its_warning(tell, here):
    rows = [f"0,add,node{index}" for index in range(6)] + [
        "900000,remove,node3",
        "60000,remove,node1",
        "3600000,add,node1",
    ]
    (here / "events.csv").write_text("\n".join(rows))
    told = tell(*f"{SOUND} --trace events.csv --strategy ideal".split())
    assert told.code == 0
    assert told.err == "swift: events.csv: 1 row is out of order, the first in line 8; they are sorted\n"
    assert told.out.splitlines()[1] == "1 hours, 2 failures, one in 30 minutes, at most 6 nodes"


@pytest.mark.parametrize("name", ["goodput.svg", "goodput.png"])
def test_a_picture_shows_every_strategy(tell, here, name):
    told = tell(*f"{THIRTY} --model gpt3-6.7b --plot {name}".split())
    assert (told.code, told.err, told.new) == (0, "", [name])
    content = (here / name).read_bytes()
    if name.endswith("png"):
        assert content.startswith(b"\x89PNG")
        return
    drawn = {element.get("id") for element in ElementTree.fromstring(content).iter() if element.get("id")}
    assert {f"goodput-{strategy}" for strategy in STRATEGIES if strategy != "bamboo"} <= drawn
    assert "goodput-bamboo" not in drawn
    tell(*f"{THIRTY} --model gpt3-6.7b --plot again.svg".split())
    assert (here / "again.svg").read_bytes() == content


REFUSED = {
    SOUND: "--trace = (not set): give one of --trace FILE, --mtbf DURATION and --remove-every DURATION",
    f"{RANDOM} --remove-every 5m": "--trace = (set twice): give one of --trace FILE, --mtbf DURATION and "
    "--remove-every DURATION",
    f"{SOUND} --mtbf soon": "--mtbf = 'soon': must be a duration, such as 90s, 10m, 6h or 2d",
    f"{SOUND} --mtbf 0s": "--mtbf = 0.0: must be a number above 0",
    f"{SOUND} --mtbf 1s --duration 100d": "--mtbf = '1s': makes 8,640,000 failures in --duration 100d; at most "
    "1,000,000",
    f"{RANDOM} --repair never": "--repair = 'never': must be a duration, such as 90s, 10m, 6h or 2d",
    f"{RANDOM} --duration 0s": "--duration = 0.0: must be a number above 0",
    f"{RANDOM} --weibull 0": "--weibull = 0.0: must be a number of at least 0.1",
    f"{RANDOM} --seed -1": "--seed = -1: must be a whole number from 0 to 4,294,967,295",
    f"{RANDOM} --num-failures 3": "--num-failures = 3: counts the failures of --remove-every alone",
    f"{SOUND} --remove-every 1h --num-failures 0": "--num-failures = 0: must be a whole number of at least 1",
    f"{SOUND} --trace none.csv": "--trace = 'none.csv': cannot be read: No such file or directory",
    f"{SOUND} --trace tiny.gin": "--trace = 'tiny.gin': line 2, 'Experiment.model = @ModelConfig()': must be "
    "MILLISECONDS,add|remove,NODE",
    f"{RANDOM} --strategy swfit": "--strategy = 'swfit': did you mean swift?",
    f"{RANDOM} --strategy oobleck": "--strategy = 'oobleck': uses published figures of a model, and none is given",
    f"{RANDOM} --model gpt-5": f"--model = 'gpt-5': is not a known model; choose one of {', '.join(MODELS)}",
    f"{RANDOM} --pipelines 0": "--pipelines = 0: must be a whole number of at least 1",
    f"{RANDOM} --pipelines 1000000000": "--pipelines x --stages x --microbatches = 1000000000 x 2 x 4: makes "
    "24,000,000,000 ops an iteration; at most 5,000,000 can be simulated",
    f"{RANDOM} --microbatches 1000000000": "--pipelines x --stages x --microbatches = 3 x 2 x 1000000000: makes ",
    f"{RANDOM} --expert-ranks 0": "--expert-ranks = 0: must be a whole number of at least 1",
    f"{RANDOM} --microbatches 0": "--microbatches = 0: must be a whole number of at least 1",
    f"{RANDOM} --memory-limit 0.5": "--memory-limit = 0.5: must be at least 1, which a single micro-batch takes",
    f"{RANDOM} --costs tF=0": "--costs = 'tF=0': must be a number above 0",
    f"{RANDOM} --job iteration=0": "--job = iteration=0: must be a number above 0",
    f"{RANDOM} --job K=17": "--job = K=17: must be at most Job.num_experts = 16",
    f"{RANDOM} --job K=1.5": "--job = K=1.5: must be a whole number of at least 1",
    f"{RANDOM} --job disk=3": "--job = 'disk=3': there is no disk; ",
    f"{RANDOM} --plot a.pdf": "--plot = 'a.pdf': must end in .svg or .png",
    f"{RANDOM} --plot nowhere/a.svg": "--plot = 'nowhere/a.svg': cannot be written: there is no directory nowhere",
}


@pytest.mark.parametrize("command", REFUSED)
def test_a_setting_that_cannot_work_is_told(refusal, command):
    assert refusal(*command.split()).startswith(REFUSED[command])


def test_the_help_names_every_strategy_and_model(capsys):
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    told = capsys.readouterr().out
    assert [name for name in (*STRATEGIES, *MODELS) if name not in told] == []


def test_it_starts_without_jax(here):
    program = (
        "import sys; from swift.cli.main import main; code = main(sys.argv[1:]); print(*sys.modules); sys.exit(code)"
    )
    command = [sys.executable, "-c", program, *RANDOM.split()]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=60, check=True)
    modules = set(done.stdout.splitlines()[-1].split())
    assert "swift.simulate" in modules
    assert modules.isdisjoint({"jax", "flax", "optax", "gin", "highspy", "matplotlib"})
