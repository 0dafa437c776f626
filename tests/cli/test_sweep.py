"""``swift compare --vary``: processes for runs, one of which fails; Ctrl-C, and tasks of a scheduler."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from swift.runlog.reading import read_run, scalars
from tests.cli.conftest import TINY, write_corpus

ROOT = Path(__file__).parents[2]
RATE = "OptimizerConfig.peak_learning_rate"


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "swift", *arguments]


def surroundings() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb"}


def ask(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), cwd=directory, env=surroundings(), capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def there(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("sweep")
    write_corpus(directory / "corpus")
    (directory / "tiny.gin").write_text(TINY)
    return directory


def losses(run_dir: Path) -> np.ndarray:
    return scalars(read_run(run_dir), "loss")


def written(directory: Path) -> dict[str, float]:
    """When each file of the runs was written; not the report and the leases."""
    paths = (path for path in directory.rglob("*") if path.is_file() and path.parent != directory)
    return {str(path.relative_to(directory)): path.stat().st_mtime for path in paths}


DIVERGING = ("compare", "tiny.gin", "--vary", f"{RATE}=3e-3,1e29", "--seeds", "0-1", "--run-dir", "some", "--jobs", "2")


@pytest.mark.long
def test_a_run_that_fails_does_not_stop_the_others(there):
    """Runs that have ended, and those that diverge, are not run again; a plain run has the same losses."""
    told = ask(there, *DIVERGING, "--format", "json", "--set", "OptimizerConfig.clip_norm=None")
    assert told.returncode == 3, told.stderr
    document = json.loads(told.stdout)
    good = [f"tiny,peak_learning_rate=0.003,seed={seed}" for seed in range(2)]
    bad = [run["name"] for run in document["runs"] if run["name"] not in good]
    assert len(bad) == 2
    assert sorted(document["failed"]) == sorted(bad)
    assert all("stopped" in reason for reason in document["failed"].values())
    assert told.stderr.splitlines()[-1].startswith("swift: 2 of 4 runs have failed: ")
    assert document["seeds"][0]["name"] == "tiny,peak_learning_rate=0.003"
    final = [losses(there / "some" / name).mean() for name in good]
    spread = document["seeds"][0]["final_loss"]
    assert spread["mean"] == pytest.approx(sum(final) / 2)
    assert spread["deviation"] == pytest.approx(abs(final[0] - final[1]) / 2**0.5)
    assert (there / "some/report.html").exists()
    before = written(there / "some")
    again = ask(there, *DIVERGING, "--set", "OptimizerConfig.clip_norm=None", "--resume")
    assert again.returncode == 3, again.stderr
    assert "its loss was not finite" in again.stderr
    assert written(there / "some") == before
    assert "5." in again.stdout
    assert "+-" in again.stdout

    plain = ask(there, "train", "tiny.gin", "--run-dir", "plain", f"--set={RATE}=3e-3", "--set=Experiment.seed=1",
                "--set=OptimizerConfig.clip_norm=None")  # fmt: skip
    assert plain.returncode == 0, plain.stderr
    np.testing.assert_array_equal(losses(there / "plain"), losses(there / "some" / good[1]))


@pytest.mark.long
def test_ctrl_c_keeps_all_states_and_resume_goes_on(there):
    arguments = ("compare", "tiny.gin", "--seeds", "0-2", "--run-dir", "stopped", "--jobs", "2",
                 "--set", "Experiment.num_steps=4000", "--set", "CheckpointConfig.every=4000")  # fmt: skip
    sweep = subprocess.Popen(
        command(*arguments), cwd=there, env=surroundings(), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    first, second, third = (there / f"stopped/tiny,seed={seed}" for seed in range(3))
    deadline = time.monotonic() + 300
    while not all(
        (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size for run in (first, second)
    ):
        assert sweep.poll() is None, sweep.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    sweep.send_signal(signal.SIGINT)
    _, told = sweep.communicate()
    assert sweep.returncode == 130, told
    assert "0 of 3 runs have ended; --resume continues in stopped" in told
    assert not third.exists()
    done = [read_run(run) for run in (first, second)]
    assert all(0 < run.metrics.last_step < 4000 for run in done)
    assert all(run.events[-1]["event"] == "interrupt" for run in done)
    length = max(run.metrics.last_step for run in done) + 5
    shorter = (*arguments[:-4], "--set", f"Experiment.num_steps={length}", "--set", "CheckpointConfig.every=4000")
    (first / "checkpoints").rename(there / "lost")  # as if the machine had failed before the first checkpoint
    told = ask(there, *shorter, "--resume")
    assert told.returncode == 0, told.stderr
    assert "tiny,seed=0: had no checkpoint, begins again" in told.stderr
    assert [read_run(run).metrics.last_step for run in (first, second, third)] == [length] * 3
    assert any(event["event"] == "resume" for event in read_run(second).events)
    losses_T = done[1].metrics.scalars("loss")
    np.testing.assert_array_equal(losses(second)[: len(losses_T)], losses_T)


def test_a_task_is_one_run_which_resumes(tell, here):
    sweep = ("compare", "tiny.gin", "--seeds", "5,6", "--run-dir", "array")
    told = tell(*sweep, "--task", "1")
    assert told.code == 0, told.err
    assert not (here / "array/tiny,seed=5").exists()
    path = here / "array/tiny,seed=6"
    assert read_run(path).metrics.last_step == 6
    assert "Experiment.seed = 6" in (path / "config.gin").read_text()
    told = tell(*sweep, "--task", "1")
    assert (told.code, told.err) == (0, "tiny,seed=6: has ended already\n")
    (path / "summary.json").unlink()  # its machine failed, and it was queued again
    assert tell(*sweep, "--task", "1").code == 0
    assert (path / "summary.json").exists()
    assert tell(*sweep, "--task", "0").code == 0
    told = tell(*sweep, "--resume")
    assert told.code == 0, told.err
    assert "array/report.html" in told.out
    assert "started" not in told.err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            ["--seeds", "0-1", "--task", "2", "--run-dir", "new"],
            "--task = 2: must be from 0 to 1: the sweep has 2 runs",
        ),
        (["--seeds", "0-1", "--task", "0"], "--run-dir = (not set): --task needs the directory of the comparison"),
        (["--task", "0", "--jobs", "2", "--run-dir", "new"], "leave out --jobs"),
        (["--seeds", "0-1", "--jobs", "0"], "--jobs = 0: must be a whole number of at least 1"),
        (["--vary", f"{RATE}=1e-3,x"], f"{RATE} = 'x': "),
        (["--vary", "Nowhere.x=1"], "Nowhere.x = 1: there is no Nowhere"),
        (["--seeds", "x"], "--seeds = 'x': must be seeds, such as 0-4 or 0,3,10-12"),
    ],
)
def test_wrong_options_are_told_before_anything_starts(refusal, more, words):
    assert words in refusal("compare", "tiny.gin", *more)


def test_what_only_a_run_finds_is_told_as_one_line(there):
    told = ask(
        there, "compare", "tiny.gin", "--seeds", "0-1", "--run-dir", "never", "--set", "TextFiles.pattern='no/*'"
    )
    assert told.returncode == 2, told.stderr
    assert told.stderr.splitlines()[-1] == "swift: TextFiles.pattern = 'no/*': no file matches"
    assert not (there / "never").exists()
