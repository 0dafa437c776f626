"""A wrong option, directory or file on the command line is told in one line; nothing is written, nothing lost."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from swift.errors import SettingError
from swift.runlog.run_directory import RunDirectory

OPTIONS = {
    "train": "the following arguments are required: CONFIG.gin",
    "train tiny.gin --rseume": "unrecognized arguments: --rseume",
    "train tiny.gin --format yaml": "invalid choice: 'yaml'",
    "train tiny.gin --stop-at soon": "invalid int value: 'soon'",
    "trian tiny.gin": "invalid choice: 'trian'",
    "export half": "the following arguments are required: --out",
    "generate model --tokens many": "invalid int value: 'many'",
    "": "the following arguments are required: COMMAND",
    "--verson": "unrecognized arguments: --verson; did you mean --version?",
    "data --hlep": "unrecognized arguments: --hlep; did you mean --help?",
    "train --rseume": "unrecognized arguments: --rseume; did you mean --resume?",
    "train --resume": "the following arguments are required: CONFIG.gin",
    "help": "invalid choice: 'help'; try `swift --help`",
    "version": "invalid choice: 'version'; try `swift --version`",
}


@pytest.mark.parametrize("command", OPTIONS)
def test_a_wrong_option_is_told(refusal, command):
    line = refusal(*command.split())
    assert OPTIONS[command] in line
    assert line.endswith("(--help lists what is possible)")


REFUSED = {
    "train tiny.gin --resume": "--run-dir = (not set): --resume needs the directory of the run to continue",
    "train tiny.gin --run-dir new --stop-at 0": "--stop-at = 0: must be from 1, the next iteration, to "
    "Experiment.num_steps = 6",
    "train tiny.gin --run-dir new --stop-at 7": "--stop-at = 7: must be from 1, the next iteration, to "
    "Experiment.num_steps = 6",
    "train tiny.gin --run-dir new --profile now": "--profile = 'now': must be FIRST:LAST, such as 10:12",
    "train tiny.gin --run-dir new --profile 3:2": "--profile = '3:2': must be FIRST:LAST, such as 10:12",
    "train tiny.gin --run-dir new --profile 5:7": "--profile = '5:7': must lie within iterations 1:6",
    "train tiny.gin --run-dir new --resume": "--run-dir = 'new': holds no run: there is no config.gin in it",
    "compare tiny.gin corpus/../tiny.gin": "CONFIG = ['tiny', 'tiny']: the files need different names, which their "
    "runs will have",
    "report new": "RUN_DIR = 'new': holds no run: there is no config.gin in it",
    "report tiny.gin": "RUN_DIR = 'tiny.gin': holds no run: there is no config.gin in it",
    "export new --out model": "RUN_DIR = 'new': holds no run: there is no config.gin in it",
    "generate new": "MODEL = 'new': is not a model written by `swift export`",
    "settings tiny.gin": "NAME = 'tiny.gin': there is no such setting; `swift config tiny.gin` shows those of a file",
}


@pytest.mark.parametrize("command", REFUSED)
def test_an_option_that_cannot_work_is_told(refusal, command):
    assert refusal(*command.split()) == REFUSED[command]


def test_a_url_is_no_run_directory_for_the_library_either(here):
    with pytest.raises(SettingError, match=r"--run-dir = 'gs:/bucket/run': is a URL"):
        RunDirectory.create(Path("gs://bucket/run"), "")
    assert not (here / "gs:").exists()


def test_a_run_directory_that_cannot_be_one_is_told(refusal, here):
    (here / "file").touch()
    for name in ("file", "file/run", "file/runs/run"):
        # The data are wrong, too, but they take longer to load.
        line = refusal("train", "tiny.gin", "--run-dir", name, "--set", "TextFiles.pattern=/nowhere/*")
        assert line.startswith(f"--run-dir = {name!r}: ")
        assert line.endswith("file is not a directory that can be written to")


HALF = {
    "train tiny.gin --run-dir half": "--run-dir = 'half': holds a run already; add --resume to continue it",
    "train tiny.gin --run-dir half --resume --stop-at 4": "--stop-at = 4: must be from 5, the next iteration, to "
    "Experiment.num_steps = 6",
    "train tiny.gin --run-dir half --resume --profile 4:5": "--profile = '4:5': must lie within iterations 5:6",
    "train tiny.gin --run-dir half --resume --set ModelConfig.model_dim=32": "--resume = 'half': the run has "
    "`ModelConfig.model_dim = 16`, this configuration has `ModelConfig.model_dim = 32`; start a new run in another "
    "--run-dir",
    "train tiny.gin --run-dir half --resume --set OptimizerConfig.decayed=matrices": "--resume = 'half': the run has "
    "`OptimizerConfig.decayed = 'all'`, this configuration has `OptimizerConfig.decayed = 'matrices'`; start a new run "
    "in another --run-dir",
    "report half --out nowhere/page.html": "--out = 'nowhere/page.html': cannot be written: "
    "there is no directory nowhere",
    "report half --out corpus": "--out = 'corpus': is a directory, not a file",
    "export half --out corpus": "--out = 'corpus': cannot be made a directory: File exists",
    "export half --out nowhere/model": "--out = 'nowhere/model': cannot be made a directory: No such file or directory",
    "export half --out model --step 3": "--step = 3: must be one of 2, 4, which have a checkpoint",
    "generate half": "MODEL = 'half': is a run directory; write its model with `swift export` first",
}


@pytest.mark.parametrize("command", HALF)
def test_what_a_run_does_not_allow_is_told(refusal, half, command):
    before = {path: path.read_bytes() for path in half.rglob("*") if path.is_file()}
    assert refusal(*command.split()) == HALF[command]
    assert {path: path.read_bytes() for path in half.rglob("*") if path.is_file()} == before


def test_a_comparison_does_not_touch_a_run_that_is_there(refusal, here):
    (here / "runs" / "tiny").mkdir(parents=True)
    line = refusal("compare", "tiny.gin", "--run-dir", "runs")
    allowed = "holds tiny already; add --resume to continue it, or choose another directory"
    assert line == f"--run-dir = 'runs': {allowed}"


def test_a_comparison_that_is_not_there_cannot_continue(refusal, here):
    (here / "runs").mkdir()
    (here / "other.gin").write_text("include 'tiny.gin'\n")
    for directory in ("typo", "runs"):
        line = refusal("compare", "tiny.gin", "other.gin", "--run-dir", directory, "--resume")
        allowed = "holds no run of this comparison (tiny, other); leave out --resume to begin it there"
        assert line == f"--run-dir = '{directory}': {allowed}"


def test_the_last_file_of_a_comparison_is_checked_before_the_first_is_run(refusal, here):
    (here / "other.gin").write_text("include 'tiny.gin'\nOptimizerConfig.name = 'lamb'\n")
    assert "is not elementwise" in refusal("compare", "tiny.gin", "other.gin", "--run-dir", "new")
    (here / "other.gin").write_text("include 'tiny.gin'\nTextFiles.pattern = 'nowhere/*.txt'\n")
    line = refusal("compare", "tiny.gin", "other.gin", "--run-dir", "new")
    assert line == "TextFiles.pattern = 'nowhere/*.txt': no file matches"
    planned = "Topology.num_pipelines = 2\nExperiment.failures = ['step 2: fail 0:0', 'step 3: fail 1:0']\n"
    (here / "other.gin").write_text(f"include 'tiny.gin'\n{planned}")
    assert "Experiment.failures = " in refusal("compare", "tiny.gin", "other.gin", "--run-dir", "new")
    (here / "other.gin").write_text("include 'tiny.gin'\nExperiment.ranks = 'virtual'\n")
    line = refusal("compare", "tiny.gin", "other.gin", "--run-dir", "new")
    assert line == "Experiment.ranks = ['emulated', 'virtual']: must be the same in all files of one comparison"


@pytest.mark.parametrize("command", ["train tiny.gin --run-dir half --resume", "export half --out model"])
def test_a_run_without_a_checkpoint_is_told(refusal, half, command):
    shutil.rmtree(half / "checkpoints")
    assert "holds no checkpoint to" in refusal(*command.split())


def test_a_run_without_its_configuration_is_told(refusal, half):
    (half / "config.gin").unlink()
    for command in ("report half", "export half --out model", "train tiny.gin --run-dir half --resume"):
        assert refusal(*command.split()).endswith(" = 'half': holds no run: there is no config.gin in it")


def test_a_checkpoint_of_another_model_is_told(refusal, half, here):
    # The directory's config.gin agrees with the command; the checkpoints in it were put there from another run.
    config = half / "config.gin"
    config.write_text(config.read_text().replace("model_dim = 16", "model_dim = 32"))
    line = refusal("train", "tiny.gin", "--set", "ModelConfig.model_dim=32", "--run-dir", "half", "--resume")
    assert line.startswith("checkpoint = 'half/checkpoints/step-00000004': is of another model: its ModelConfig is ")
    assert "model_dim=16" in line
    assert "here 'ModelConfig(num_layers=2, model_dim=32" in line
    assert not (here / "new").exists()


@pytest.mark.parametrize("command", ["train tiny.gin --run-dir half --resume", "export half --out model"])
def test_a_damaged_checkpoint_is_told(refusal, half, command):
    name = "arrays/state/master.head/0.0.0.0.0"
    for step in (2, 4):
        file = half / f"checkpoints/step-0000000{step}" / name
        file.write_bytes(file.read_bytes()[:-1])
    line = refusal(*command.split())
    newest = f"step-00000004 is damaged: its file {name} is not as it was saved"
    assert line.startswith(f"checkpoint = 'half/checkpoints': cannot be restored: {newest}")
    assert "; step-00000002 is damaged: " in line


def test_the_whole_program_says_it_in_one_line(here):
    swift = [sys.executable, "-m", "swift"]
    wrong = subprocess.run([*swift, "train", "nothere.gin"], cwd=here, capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "swift: CONFIG = 'nothere.gin': cannot be read: No such file or directory\n"
    helped = subprocess.run([*swift, "--help"], cwd=here, capture_output=True, text=True, check=True)
    assert helped.stderr == ""
    assert all(command in helped.stdout for command in ("train", "compare", "report", "export", "generate"))
