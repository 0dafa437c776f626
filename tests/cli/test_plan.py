"""`swift plan`: what a person and a program get, and how a mistake is told."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from swift.cli.main import main
from swift.draw.text import draw_chart
from swift.errors import SettingError
from swift.schedules.planners.adaptive import adaptive
from swift.schedules.plans.store import document
from swift.schedules.problem import Costs, Problem
from swift.schedules.registry import PLANNERS
from swift.topology import Topology

PAPER = Problem(Topology(3, 4), 6, frozenset({(1, 2)}))
SOUND = "plan --pipelines 3 --stages 4 --microbatches 6"
COMMAND = f"{SOUND} --fail 1:2"


@pytest.fixture
def facts(tell):
    """The document that a command prints."""

    def run(options):
        told = tell(*options.split(), "--format", "json")
        assert (told.code, told.err) == (0, ""), told
        return json.loads(told.out)

    return run


def without_time(facts):
    return {name: value for name, value in facts.items() if name != "planning_ms"}


def test_a_person_is_told_what_matters_and_shown_the_schedule(tell, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    told = tell(*COMMAND.split())
    assert (told.code, told.err, told.new) == (0, "", [])
    for line in (
        r"3 pipelines x 4 stages, 6 micro-batches per pipeline, 1:2 failed",
        r"planned by adaptive in \d+ ms",
        r"period +27 +bound 27, gap 0\.0 %",
        r"  in a window +27\.6667 +in a window of 3 iterations that drains \(makespan 83\)",
        r"bubbles +27\.3 % .*",
        r"  1F1B +27 +100\.0 %, the same",
        r"  zero bubble +19 +70\.4 %, 29\.6 % lost",
        r"peak memory in F-stashes \(no limit\)",
        r"  pipeline 1 +\d+ +\d+ +- +\d+",
        r"plans to prepare for up to 1 failure: 5 \(2 if roles may be moved\)",
    ):
        assert re.search(f"^{line}$", told.out, re.MULTILINE), line
    assert told.out.endswith("\n\n" + draw_chart(adaptive(PAPER), 100).plain + "\n")


def test_a_large_cluster_is_told_by_stages(tell):
    command = "plan --pipelines 3 --stages 14 --microbatches 2 --iterations 1 --no-stagger"
    told = tell(*command.split())
    assert "planned by adaptive in" in told.out
    assert "all updates at once" in told.out
    assert re.search(r"F-stashes \(no limit\): the highest among each stage's workers\n  stage 0 ( +2){12}\n", told.out)
    assert re.search(r"\n  stage 12 ( +\d){2}\n", told.out)


def test_a_program_gets_one_document(facts):
    assert without_time(facts(COMMAND)) == without_time(document(adaptive(PAPER), 0.0))
    assert without_time(facts(f"{COMMAND} --ops")) == without_time(document(adaptive(PAPER), 0.0, with_ops=True))
    assert facts(COMMAND)["planning_ms"] > 0


SETTINGS = {
    "": {},
    "--fail 0:3 2:0 --fail 1:1": {"failed": frozenset({(1, 2), (0, 3), (2, 0), (1, 1)})},
    "--iterations 1": {"num_iterations": 1},
    "--no-decouple": {"decoupled": False},
    "--no-stagger": {"staggered": False},
    "--memory-limit 5": {"memory_limit": 5.0},
    "--costs tF=1 tB=1.3 --costs tW=0.8 tU=0.2 tComm=0.1": {"costs": Costs(1.0, 1.3, 0.8, 0.2, 0.1)},
    "--costs F-stash=3 --memory-limit 5": {"costs": Costs(f_stash=3.0, w_stash=3.0), "memory_limit": 15.0},
    "--costs F-stash=3 W-stash=1 inbox=0.5": {"costs": Costs(f_stash=3.0, w_stash=1.0, inbox=0.5)},
    # The limit of a single micro-batch, 6.6, is 2.2 x 3 but for a rounding error.
    "--costs F-stash=3 W-stash=6.6 --memory-limit 2.2": {
        "costs": Costs(f_stash=3.0, w_stash=6.6),
        "memory_limit": 6.6000000000000005,
    },
}


@pytest.mark.parametrize("options", SETTINGS)
def test_an_option_is_a_setting_of_the_problem(facts, options):
    problem = replace(PAPER, **SETTINGS[options])
    assert without_time(facts(f"{COMMAND} {options}")) == without_time(document(adaptive(problem), 0.0))


REFUSED = {
    "--fail 0:2 --fail 2:2": "--fail = '1:2 0:2 2:2': stage 2 has no live worker: restore from a checkpoint",
    "--fail 3:1": "--fail = '3:1': no such worker among 3 pipelines x 4 stages",
    "--fail 1:4": "--fail = '1:4': no such worker among 3 pipelines x 4 stages",
    "--fail 1-2": "--fail = '1-2': must be PIPELINE:STAGE, such as 1:2",
    "--fail 1:2,0:1": "--fail = '1:2,0:1': must be PIPELINE:STAGE, such as 1:2",
    "--costs tf=2": "--costs = 'tf=2': there is no tf; did you mean tF?",
    "--costs f-stash=2": "--costs = 'f-stash=2': there is no f-stash; did you mean F-stash?",
    "--costs x=2": "--costs = 'x=2': there is no x; there are tF, tB, tW, tU, tComm, F-stash, W-stash, inbox",
    "--costs tF": "--costs = 'tF': must be NAME=VALUE, such as tB=1.3",
    "--costs tF=long": "--costs = 'tF=long': 'long' is not a number",
    "--costs tW=0": "--costs = tW=0: must be a number above 0",
    "--costs tU=-1": "--costs = tU=-1: must be a number of at least 0",
    "--costs tB=nan": "--costs = tB=nan: must be a number above 0",
    "--costs tB=1e300": "--costs = 'tB=1e300': must be at most 1e+18: take a larger unit",
    "--memory-limit 0.5": "--memory-limit = 0.5: must be at least 1, which a single micro-batch takes with its "
    "message and while B runs",
    "--memory-limit nan": "--memory-limit = nan: must be a number above 0",
    "--memory-limit -2": "--memory-limit = -2.0: must be a number above 0",
    "--costs F-stash=4 W-stash=6 inbox=1 --memory-limit 1.7": "--memory-limit = 1.7: must be at least 1.75, which a "
    "single micro-batch takes with its message and while B runs",
    "--pipelines 0": "--pipelines = 0: must be a whole number of at least 1",
    "--stages 0": "--stages = 0: must be a whole number of at least 1",
    "--microbatches 0": "--microbatches = 0: must be a whole number of at least 1",
    "--iterations 0": "--iterations = 0: must be a whole number of at least 1",
    "--solver adaptiv": "--solver = 'adaptiv': did you mean adaptive?",
    "--prepare -1": "--prepare = -1: must be a whole number of at least 0",
    "--ops": "--ops = (set): needs --format json, not text",
    "--out nowhere/a.svg": "--out = 'nowhere/a.svg': cannot be written: there is no directory nowhere",
    "--out corpus": "--out = 'corpus': is a directory, not a file",
    "--format json --out a.svg": "--out = 'a.svg': such a file holds a picture, not --format json",
    "--iterations 9999999": "--pipelines x --stages x --microbatches x --iterations = 3 x 4 x 6 x 9999999: makes "
    "2,159,999,784 ops in the window; at most 3,000,000 can be planned",
    "--pipelines 20 --stages 1000": "--pipelines x --stages x --microbatches x --iterations = 20 x 1000 x 6 x 3: "
    "makes about 61,080,000 ticks of workers; at most 20,000,000 can be planned",
    "--format json --out a.png": "--out = 'a.png': such a file holds a picture, not --format json",
    "--store tiny.gin": "--store = 'tiny.gin': must be a directory that can be written to: File exists",
}


@pytest.mark.parametrize("options", REFUSED)
def test_a_setting_that_cannot_work_is_told(refusal, options):
    assert refusal(*COMMAND.split(), *options.split()) == REFUSED[options]


OPTIONS = {
    "plan --stages 4": "the following arguments are required: --pipelines, --microbatches",
    f"{SOUND} --memory-limit much": "argument --memory-limit: invalid float value: 'much'",
    f"{SOUND} --iterations 1.5": "argument --iterations: invalid int value: '1.5'",
    f"{SOUND} --format yaml": "invalid choice: 'yaml'",
    f"{SOUND} --store=": "argument --store: '': must name a file or a directory",
    f"{SOUND} --fail": "argument --fail: expected at least one argument",
}


@pytest.mark.parametrize("command", OPTIONS)
def test_a_wrong_option_is_told(refusal, command):
    assert OPTIONS[command] in refusal(*command.split())


@pytest.mark.parametrize("solver", sorted(set(PLANNERS) & {"gpipe", "one_f_one_b", "zero_bubble"}))
def test_a_baseline_plans_for_no_failure(refusal, facts, solver):
    line = refusal(*COMMAND.split(), "--solver", solver)
    assert line == f"--fail = '1:2': {solver} cannot plan for failures: try adaptive"
    line = refusal(*SOUND.split(), "--solver", solver, "--store", "plans")
    assert line == f"--store = 'plans': keeps plans for failures, which {solver} does not make: try adaptive"
    told = facts(f"{SOUND} --solver {solver}")
    assert told["solver"] == solver
    assert told["period"] >= told["lower_bound"]


def test_two_runs_a_worker(facts, refusal):
    told = facts(f"{COMMAND} --solver v --memory-limit 4")
    assert told["stage_of_chunk"] == [[0, 1, 2, 3, 3, 2, 1, 0]] * 3
    assert told["period"] == told["lower_bound"] == 27.0
    assert max(told["peak_memory"].values()) <= 4.0
    told = facts(f"{SOUND} --solver v --blocks 9 --head 1")
    assert told["blocks"]["0:0"] == [[0, 2], [8, 9]]
    line = refusal(*SOUND.split(), "--solver", "v", "--blocks", "7")
    assert line == "--stages = 4: must be at most --blocks = 7 / 2: every run of blocks needs one"
    line = refusal(*SOUND.split(), "--solver", "v", "--blocks", "8", "--cut", "2,2,2,2")
    assert line == (
        "--cut = '2,2,2,2': must be one number of blocks for each of the 8 runs, of stages (0, 1, 2, 3, 3, 2, 1, 0)"
    )
    cuts = ["2,1,1,1,1,1,1,1", "1,2,1,1,1,1,1,1", "1,1,2,1,1,1,1,1"]
    line = refusal(*SOUND.split(), "--solver", "v", "--blocks", "9", "--cut", *cuts)
    assert line.endswith("v plans chunks in a V, 0, 1, ... and back, the same ones in all pipelines")


def test_a_planners_word_on_memory_is_told_by_the_option(refusal, monkeypatch):
    def refuse(problem):
        raise SettingError("Problem.memory_limit", problem.memory_limit, "the least is 6")

    monkeypatch.setitem(PLANNERS, "adaptive", refuse)
    assert refusal(*f"{COMMAND} --memory-limit 2.5".split()) == "--memory-limit = 2.5: the least is 6"
    line = refusal(*f"{COMMAND} --costs F-stash=2 --memory-limit 2.5".split())
    assert line == "--memory-limit = 2.5: the least is 6 (in the unit of --costs: an F-stash is 2)"


def test_the_help_names_every_planner(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    told = capsys.readouterr().out
    assert [name for name in PLANNERS if name not in told] == []


def test_a_picture_on_stdout(tell):
    told = tell(*COMMAND.split(), "--format", "svg")
    assert (told.code, told.err, told.new) == (0, "", [])
    assert ElementTree.fromstring(told.out).tag == "{http://www.w3.org/2000/svg}svg"


def test_a_trace_on_stdout(tell):
    told = tell(*COMMAND.split(), "--format", "trace")
    events = json.loads(told.out)["traceEvents"]
    num_ops = adaptive(PAPER).num_ops
    assert sum(event["ph"] == "X" and event["cat"] != "failed" for event in events) == num_ops


BEGINNINGS = {
    "a.svg": b"<?xml",
    "a.png": b"\x89PNG",
    "a.json": b'{"topology"',
    "a.txt": b"3 pipelines",
    "--format svg a": b"<?xml",
    "--format trace a.json": b'{"displayTimeUnit"',
}


@pytest.mark.parametrize("options", BEGINNINGS)
def test_a_file_says_by_its_name_what_it_holds(tell, here, options, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    *form, name = options.split()
    told = tell(*COMMAND.split(), *form, "--out", name)
    assert (told.code, told.out, told.err, told.new) == (0, "", "", [name])
    content = (here / name).read_bytes()
    assert content.startswith(BEGINNINGS[options])
    assert b"\x1b" not in content or name == "a.png"


def test_what_is_no_file_is_written_to_and_not_replaced(tell, here):
    pipe, read = here / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    assert tell(*COMMAND.split(), "--format", "json", "--out", "pipe").code == 0
    reader.join(10)
    assert pipe.is_fifo()
    assert json.loads(read[0])["period"] == 27.0


def test_a_stored_plan_is_found_for_every_failure_with_the_same_normal_form(facts, here):
    first = facts(f"{COMMAND} --store plans")
    assert len(list((here / "plans").iterdir())) == 1
    assert first["planning_ms"] > 0
    again, other = facts(f"{COMMAND} --store plans"), facts(f"{SOUND} --fail 0:2 --store plans")
    assert again["planning_ms"] == other["planning_ms"] == 0
    assert without_time(again) == without_time(first)
    assert (other["failed"], other["period"]) == (["0:2"], first["period"])
    assert other["peak_memory"]["0:2"] == 0.0 < other["peak_memory"]["1:2"]
    assert len(list((here / "plans").iterdir())) == 1


def test_a_damaged_plan_is_named_and_planned_again(tell, here):
    command = [*COMMAND.split(), "--store", "plans", "--format", "json"]
    sound = json.loads(tell(*command).out)
    (path,) = (here / "plans").iterdir()
    content = path.read_bytes()
    path.write_bytes(content[:-20])
    told = tell(*command)
    assert told.code == 0
    assert told.err.startswith(f"swift: damaged plan plans/{path.name} is ignored and planned again: ")
    assert told.err.count("\n") == 1
    assert without_time(json.loads(told.out)) == without_time(sound)
    assert path.read_bytes() == content
    assert tell(*command).err == ""


def test_plans_are_counted_without_a_store(facts, tell):
    assert facts(f"{COMMAND} --prepare 2")["num_plans"] == 15
    told = tell(*COMMAND.split(), "--prepare", "2")
    assert "plans to prepare for up to 2 failures: 15 (3 if roles may be moved)\n" in told.out
    assert (told.err, told.new) == ("", [])


def test_plans_are_prepared_in_a_store(tell, facts, here):
    told = tell(*COMMAND.split(), "--prepare", "1", "--store", "plans")
    assert told.code == 0
    assert "for up to 1 failure: 5 (2 if roles may be moved); all are in plans, 5 of them new\n" in told.out
    assert [line.split() for line in told.err.splitlines()] == [["prepared", f"{i}/5", "plans"] for i in range(1, 6)]
    assert len(list((here / "plans").iterdir())) == 5
    for failed in ("", "--fail 0:0", "--fail 2:1", "--fail 1:3"):
        assert facts(f"{SOUND} {failed} --store plans")["planning_ms"] == 0
    told = tell(*COMMAND.split(), "--prepare", "1", "--store", "plans", "--format", "svg")
    assert told.err.endswith("5 (2 if roles may be moved); all are in plans, 0 of them new\n")
    assert told.out.startswith("<?xml")


def swift(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def test_it_starts_without_jax(here):
    program = (
        "import sys; from swift.cli.main import main; code = main(sys.argv[1:]); print(*sys.modules); sys.exit(code)"
    )
    process = swift("-c", program, *COMMAND.split(), "--store", "plans", "--prepare", "0", cwd=here)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    modules = set(out.splitlines()[-1].split())
    assert "swift.schedules" in modules
    assert modules.isdisjoint({"jax", "flax", "optax", "gin", "highspy", "matplotlib"})


def test_a_closed_pipe_is_no_error(here):
    with swift("-m", "swift", *COMMAND.split(), "--format", "json", "--ops", cwd=here) as process:
        process.stdout.close()
        assert process.wait(timeout=60) == 141
        assert process.stderr.read() == ""


def test_ctrl_c_ends_the_preparation_and_what_is_there_stays(here, facts):
    large = "plan --pipelines 6 --stages 6 --microbatches 12"
    process = swift("-m", "swift", *f"{large} --store plans --prepare 30".split(), cwd=here)
    assert "prepared 1/" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (-signal.SIGINT, "")
    assert "Traceback" not in err
    assert facts(f"{large} --store plans")["planning_ms"] == 0
