"""Inputs that nobody expects cost one line, too: names of 300 letters, modules that raise, durations below zero."""

import os
from types import SimpleNamespace

import pytest

from swift.cli.jax_setup import oversubscription_warning, prepare

LONG = "x" * 300

PATHS = {
    f"train tiny.gin --run-dir {LONG}": "swift train: argument --run-dir: ",
    f"compare tiny.gin --run-dir {LONG}": "swift compare: argument --run-dir: ",
    f"launch tiny.gin --processes 2 --run-dir {LONG}": "swift launch: argument --run-dir: ",
    f"train {LONG}": "swift train: argument CONFIG.gin: ",
    f"report {LONG}": "swift report: argument RUN_DIR: ",
    f"export {LONG} --out model": "swift export: argument RUN_DIR: ",
    f"generate {LONG}": "swift generate: argument MODEL: ",
    f"checkpoint list {LONG}": "swift checkpoint list: argument DIR: ",
}


@pytest.mark.parametrize("command", PATHS, ids=lambda command: command.replace(LONG, "LONG"))
def test_a_name_that_is_too_long_is_told(refusal, command):
    line = refusal(*command.split())
    assert line.startswith(PATHS[command])
    assert "... (300 letters): File name too long" in line


@pytest.mark.parametrize("command", ["train tiny.gin", "compare tiny.gin", "launch tiny.gin --processes 1"])
def test_a_directory_that_cannot_be_made_is_told_before_anything_is_compiled(refusal, monkeypatch, command):
    monkeypatch.setattr("swift.pipeline.step.spec.StepSpec.init", None)
    line = refusal(*command.split(), "--run-dir", "/proc/foo")
    assert line.startswith("--run-dir = '/proc/foo")
    assert line.endswith("': cannot be made a directory: No such file or directory")


MODULES = {
    "x = 1\ny = x / 0\n": "CONFIG = 'mine.gin': line 2 cannot be followed: mine.py:2 raises ZeroDivisionError: "
    "division by zero",
    "raise SystemError('no')\n": "CONFIG = 'mine.gin': line 2 cannot be followed: mine.py:1 raises SystemError: no",
    "x = = 1\n": "CONFIG = 'mine.gin': line 2 cannot be followed: invalid syntax (mine.py, line 1)",
}


@pytest.mark.parametrize("text", MODULES)
def test_a_module_that_raises_is_told(refusal, here, monkeypatch, text):
    monkeypatch.syspath_prepend(here)
    monkeypatch.delitem(__import__("sys").modules, "mine", raising=False)
    (here / "mine.py").write_text(text)
    (here / "mine.gin").write_text("include 'tiny.gin'\nimport mine\n")
    assert refusal("train", "mine.gin") == MODULES[text]


PART = """
from dataclasses import dataclass

from swift.experts.placement import uniform_placement


@dataclass(frozen=True)
class {kind}:
    name = "mine"
    {also}

    def init(self, num_layers, num_classes, num_ranks, slots_per_rank):
        return uniform_placement(num_layers, num_classes, num_ranks, slots_per_rank), ()

    def __call__(self, popularity_LE, placement_LNS, state):
        {body}
        return placement_LNS, state

    def plan(self, problem):
        return problem.nothing
"""
FLAWS = {
    "body": ("{}['key']", "Experiment.placement = Body(): __call__ (body.py:16) raises KeyError: 'key'"),
    "also": (
        "def __post_init__(self): {}['key']",
        "CONFIG = 'also.gin': making @Also() raises KeyError: 'key' (also.gin, line 3)",
    ),
    "name": ("name = property(lambda self: 1 / 0)", "Experiment.placement = Name(): name (name.py:10) raises "
             "ZeroDivisionError: division by zero"),
}  # fmt: skip


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_policy_with_a_mistake_is_told(refusal, here, monkeypatch, flaw):
    monkeypatch.syspath_prepend(here)
    text, line = FLAWS[flaw]
    parts = {"kind": flaw.title(), "also": "", "body": "", "name": ""} | {"also" if flaw == "name" else flaw: text}
    (here / f"{flaw}.py").write_text(PART.format(**parts))
    (here / f"{flaw}.gin").write_text(f"include 'tiny.gin'\nimport {flaw}\nExperiment.placement = @{flaw.title()}()\n")
    assert refusal("train", f"{flaw}.gin", "--run-dir", "new") == line
    assert not (here / "new").exists()


def test_a_planner_with_a_mistake_is_told(refusal, here, monkeypatch):
    monkeypatch.syspath_prepend(here)
    (here / "plans.py").write_text(PART.format(kind="Plans", also="", body="pass"))
    (here / "plans.gin").write_text("include 'tiny.gin'\nimport plans\nExperiment.planner = @Plans()\n")
    sets = ("Topology.num_pipelines=2", "Topology.num_expert_ranks=1", "ExpertConfig.slots_per_rank=4")
    line = refusal("train", "plans.gin", "--run-dir", "new", *(word for one in sets for word in ("--set", one)))
    attribute = "'Problem' object has no attribute 'nothing'"
    assert line == f"Experiment.planner = 'mine': plan raises AttributeError (plans.py:20): {attribute}"
    assert not (here / "new").exists()


VALUES = {
    "DataConfig.source=['a.txt', 'b.txt']": "DataConfig.source = ['a.txt', 'b.txt']: must be @StandardLibrary() or "
    "@TextFiles() or @TokenFile() or @YOURS() (see StreamSource) or @Pipeline() or @Mixture()",
    "DataConfig.source=[@StandardLibrary()]": "DataConfig.source = [@StandardLibrary()]: must be @StandardLibrary() or "
    "@TextFiles() or @TokenFile() or @YOURS() (see StreamSource) or @Pipeline() or @Mixture()",
    "TextFiles.pattern=corpus/*.text": "TextFiles.pattern = 'corpus/*.text': no file matches",
    # the nearest of the names that can stand there
    "Experiment.placement=@Staticc()": "Experiment.placement = @Staticc(): there is no Staticc; did you mean Static?",
    "Experiment.placement=@Topology1()": "Experiment.placement = @Topology1(): there is no Topology1; there are "
    "Static, Symi, MinMax, Packed, FlexMoE",
    "Experiment.model=@ModelConfg()": "Experiment.model = @ModelConfg(): there is no ModelConfg; did you mean "
    "ModelConfig?",
    "DataConfig.source=@TextFile()": "DataConfig.source = @TextFile(): there is no TextFile; did you mean TextFiles?",
    "Experiment.planner=adaptve": "Experiment.planner = 'adaptve': choose one of adaptive, lockstep, milp, gpipe, "
    "one_f_one_b, zero_bubble, v; did you mean adaptive?",
    "OptimizerConfig.memory=host": "OptimizerConfig.memory = 'host': must be one of device, pinned_host",
    "Experiment.ranks=device": "Experiment.ranks = 'device': must be one of emulated, devices, virtual; did you mean "
    "devices?",
}


@pytest.mark.parametrize("setting", VALUES)
def test_a_value_of_the_wrong_kind_is_told(refusal, setting):
    assert refusal("train", "tiny.gin", "--set", setting) == VALUES[setting]


PLAN = "plan --pipelines 3 --stages 4 --microbatches 6"
SIMULATE = "simulate --pipelines 4 --stages 2 --microbatches 4"
COMMANDS = {
    "lanch tiny.gin": "argument COMMAND: invalid choice: 'lanch'; did you mean launch? (--help lists what is possible)",
    "checkpoint verfy half": "argument ACTION: invalid choice: 'verfy'; did you mean verify? (--help lists what is "
    "possible)",
    "train tiny.gin --prepare nxt": "argument --prepare: invalid choice: 'nxt'; did you mean next? (--help lists what "
    "is possible)",
    "train tiny.gin --run_dir new": "unrecognized arguments: --run_dir new; did you mean --run-dir? (--help lists what "
    "is possible)",
    f"{PLAN} --solver adaptve": "--solver = 'adaptve': did you mean adaptive?",
    f"{PLAN} --out x.pdf": "--out = 'x.pdf': must end in .svg, .png, .json or .txt, or --format says what it holds",
    f"{PLAN} --format text --out x.pdf": "--out = 'x.pdf': must end in .svg, .png, .json or .txt, or --format says "
    "what it holds",
    f"{PLAN} --out x.yaml": "--out = 'x.yaml': must end in .svg, .png, .json or .txt, or --format says what it holds",
    f"{SIMULATE} --mtbf -10m": "--mtbf = '-10m': must be a duration, such as 90s, 10m, 6h or 2d",
    f"{SIMULATE} --mtbf 10m --repair -1s": "--repair = '-1s': must be a duration, such as 90s, 10m, 6h or 2d",
    "launch tiny.gin --processes 1 --memory-checkpoint-every 5": "--memory-checkpoint-every = 5: would change "
    "nothing without --recovery restart: the others keep their states when a process dies",
    "launch tiny.gin --processes 1 --recovery restart --memory-checkpoint-every 0": (
        "--memory-checkpoint-every = 0: must be a whole number of at least 1"
    ),
    "launch tiny.gin --processes 1 --deadline hartbeat=2": "--deadline = 'hartbeat=2': must be NAME=SECONDS, where "
    "NAME is one of start, forming, heartbeat, progress, saving, dying, stopping; did you mean heartbeat?",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_cannot_work_is_told(refusal, command):
    assert refusal(*command.split()).endswith(COMMANDS[command])


TWO_PIPELINES = "Topology.num_pipelines=2", "Topology.num_expert_ranks=1", "ExpertConfig.slots_per_rank=4"
KILLED = "step 3: kill 0:0 once compiled"
ENDLESS = {
    (
        KILLED,
        "--processes",
        "1",
    ): "would wait forever: with one pipeline the others cannot continue without a process, "
    "so no programs are prepared for that",
    (KILLED, "--processes", "2", "--prepare", "none"): "would wait forever: with --prepare none no programs are "
    "prepared",
    (
        "step 4: restart 0:0 once compiled",
        "step 3: kill 0:0",
        "--processes",
        "2",
    ): "only a fault can wait for programs: leave out 'once compiled'",
}


@pytest.mark.parametrize("words", ENDLESS)
def test_a_fault_that_would_wait_for_ever_is_refused(refusal, words):
    settings = [word for one in TWO_PIPELINES if "2" in words for word in ("--set", one)]
    line = refusal("launch", "tiny.gin", *settings, "--chaos", *words)
    assert line == f"--chaos = '{words[0]}': {ENDLESS[words]}"


def test_blocks_that_could_never_move_are_refused(refusal):
    settings = [*TWO_PIPELINES, "Experiment.adapt='auto'"]
    words = [word for one in settings for word in ("--set", one)]
    line = refusal("launch", "tiny.gin", *words, "--processes", "2", "--prepare", "none")
    assert line == "--prepare = 'none': finds no blocks to move: Experiment.adapt = 'auto'"


def test_states_that_processes_hand_over_are_in_device_memory(refusal):
    line = refusal("launch", "tiny.gin", "--set", "OptimizerConfig.memory='pinned_host'", "--processes", "1")
    assert line == "OptimizerConfig.memory = 'pinned_host': must be 'device': processes hand states over from there"


def test_a_duration_without_a_unit_is_taken_for_seconds_and_said(tell):
    told = tell(*f"{SIMULATE} --mtbf 600 --duration 1h".split())
    assert (told.code, told.err) == (0, "swift: --mtbf 600 has no unit and is taken for 600s\n")


@pytest.mark.usefixtures("half")
def test_a_text_that_cannot_be_or_would_never_end_is_refused(refusal, tell):
    assert tell("export", "half", "--out", "model").code == 0
    line = refusal("generate", "model", "--tokens", "100000000000")
    assert line == "--tokens = 100000000000: must be at most 1,000,000"
    line = refusal("generate", "model", "--prompt", "al", "--prompt", "\udcff")  # a byte that is no text
    assert line == r"--prompt = '\udcff': must be a text in UTF-8"


def test_many_emulated_devices_on_few_cores_are_warned_of():
    assert oversubscription_warning(24, 2) == []
    (line,) = oversubscription_warning(100, 2)
    assert line.startswith("100 emulated devices on 2 cores: compiling the first step takes minutes")


def test_the_warning_comes_before_anything_is_compiled(tell, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 0.1)  # a machine of few cores, and no devices that are not there
    told = tell("train", "tiny.gin", "--run-dir", "new", "--stop-at", "9")
    assert told.code == 2
    assert told.err.startswith("swift: 2 emulated devices on 0.1 cores: ")


def test_a_tpu_is_looked_for_in_silence(monkeypatch):
    """libtpu, where it is installed without a TPU, prints a page of its own log otherwise."""
    names = "TPU_STDERR_LOG_LEVEL", "TPU_MIN_LOG_LEVEL"
    monkeypatch.setattr("swift.cli.jax_setup.jax", SimpleNamespace(config=SimpleNamespace(update=lambda *_: None)))
    monkeypatch.setattr("swift.cli.jax_setup.enable_compilation_cache", lambda: None)
    monkeypatch.setenv(names[0], "0")  # as the user wants it
    monkeypatch.setenv(names[1], "removed again after the test")
    monkeypatch.delenv(names[1])
    prepare([SimpleNamespace(ranks="devices", compute_dtype="float32")])
    assert [os.environ.get(name) for name in names] == ["0", "3"]


@pytest.mark.parametrize("name", ["embedding", "head"])
def test_ranks_that_are_copies_of_one_another_have_the_whole_vocabulary(refusal, name):
    words = ["--set", "Topology.num_expert_ranks=2", "--set", f"Experiment.{name}='sharded'"]
    assert refusal("launch", "tiny.gin", *words, "--processes", "2") == (
        f"Experiment.{name} = 'sharded': must be 'replicated' where a single worker has a process for each expert "
        "rank, and continues without one"
    )
