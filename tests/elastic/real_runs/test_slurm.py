"""Runs under a real Slurm of three nodes on this machine: a task ends, a node is lost, given up, and found again."""

import re
import shlex
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from swift.runlog.reading import read_run
from tests.elastic.runs import SWIFT, environment, left_behind, losses, whole, write_config
from tests.elastic.slurm import Slurm, can_run

pytestmark = pytest.mark.slow
DOCUMENT = Path(__file__).parents[3] / "docs" / "clusters.md"


@pytest.fixture
def slurm(tmp_path):
    if not can_run():
        pytest.skip("needs Debian's slurm-wlm, and root that may mount")
    with Slurm(tmp_path / "slurm") as one:
        yield one


def recipes(config):
    """The batch script of docs/clusters.md and its command for one node, with values for this machine."""
    section = DOCUMENT.read_text().partition("## Slurm")[2].partition("\n## ")[0]
    script, command, *_ = re.findall(r"(?:^    .*\n)+", section, re.MULTILINE)
    values = {"python -m": f"{sys.executable} -m", "CONFIG.gin": str(config), "--processes 6": "--processes 3"}
    # All nodes are this machine, whose name may be no address that others reach.
    values |= {"--cpus-per-task=16": "--cpus-per-task=1", "--insecure-network": "--listen 127.0.0.1"}
    for text, value in values.items():
        assert text in script
        assert text in command
        script, command = script.replace(text, value), command.replace(text, value)
    return re.sub("^    ", "", script, flags=re.MULTILINE), command.strip()


@contextmanager
def typed(slurm, command, config):
    """A command typed in a shell where the job was submitted; it does not outlive the block."""
    with (
        open(slurm.top / "typed.txt", "ab") as said,
        subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            env=environment(config) | slurm.environment,
            cwd=config.parent,
            stdout=said,
            stderr=said,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def test_a_run_does_without_a_task_and_without_a_node_and_has_both_back(slurm, tmp_path):
    """Tries both recipes of docs/clusters.md."""
    config = write_config(tmp_path, (3, 1, 1), 10**6, Experiment__num_microbatches=6)
    script, one_node = recipes(config)
    job = slurm.submit(script, **environment(config))
    one_node = one_node.replace("1234", job)

    def wait_for(words, after=""):
        slurm.wait_until(lambda: words in slurm.said(job).partition(after)[2] if after else words in slurm.said(job))

    wait_for("running with 3 processes")
    wait_for(f"{job}: step 1/")
    slurm.kill_task("node1")
    wait_for("with 2 processes", after="node 1 is lost")
    again = one_node.replace("MACHINE", "node1").replace("--node 2", "--node 1")
    with typed(slurm, again, config) as first:
        wait_for("with 3 processes", after="node 1 is lost")
        slurm.lose("node2")
        wait_for("with 2 processes", after="node 2 is lost")
        assert slurm.state(job) == "RUNNING"
        slurm.find("node2")
        again = one_node.replace("MACHINE", "node2").replace(f"--jobid={job} --overlap ", "")
        with typed(slurm, again, config) as second:
            wait_for("with 3 processes", after="node 2 is lost")
            slurm.ask("scancel", "--signal=TERM", job)
            slurm.wait_until(lambda: slurm.state(job) not in ("RUNNING", "COMPLETING"))
            # The signal reaches all tasks of the job, of which the second is none: for it, the run is not finished.
            assert [process.wait(120) for process in (first, second)] == [130, 3]
    run_dir = tmp_path / "runs" / job
    found = losses(run_dir)
    assert f"interrupted after iteration {len(found)}; --resume continues from {len(found)}" in slurm.said(job)
    assert "node0: task 0: Exited with exit code 130" in slurm.said(job)
    np.testing.assert_allclose(found, whole(config, "--stop-at", len(found)), rtol=1e-8)
    assert left_behind(config) == {}


def gpu_script(slurm, config, data, tmp_path):
    """The batch script for GPUs of docs/clusters.md, with two hosts and CPU devices of this machine."""
    section = DOCUMENT.read_text().partition("## GPUs under Slurm")[2].partition("\n## ")[0]
    (script,) = (block for block in re.findall(r"(?:^(?:    .*)?\n)+", section, re.MULTILINE) if "#SBATCH" in block)
    wrapper = tmp_path / "swift"
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.join(slurm.named(SWIFT))} "$@"\n')
    wrapper.chmod(0o700)
    values = {
        "--nodes=8": "--nodes=2",
        " --gpus-per-node=8": "",
        "--cpus-per-task=96": "--cpus-per-task=1",
        "config=CONFIG.gin": f"config={config}",
        "data=/shared/tokens.bin": f"data={data}",
        "interface=bond0": "interface=lo",
        "local=/tmp/swift-$USER": f"local={tmp_path}/local",
        'swift="python -m swift"': f"swift={wrapper}",
        "--coordinator auto": "--coordinator auto --num-hosts 2 --log-every 5",
    }
    for text, value in values.items():
        assert script.count(text) == 1, text
        script = script.replace(text, value)
    return textwrap.dedent(script).strip() + "\n"


def test_the_script_for_gpus_resumes_after_a_requeue_and_a_lost_node_and_stays_cancelled(slurm, tmp_path):
    data = tmp_path / "tokens.bin"
    np.random.default_rng(0).integers(0, 250, 100_000).astype("<u2").tofile(data)
    sources = {"DataConfig__source": "@TokenFile()", "TokenFile__path": str(data)}
    config = write_config(tmp_path, (2, 2, 1), 10**6, CheckpointConfig__every=20, **sources)
    job = slurm.submit(gpu_script(slurm, config, data, tmp_path), **environment(config))
    run_dir = tmp_path / "runs" / job

    def wait_for(num_resumed, num_steps):
        """Waits until the run has been resumed so often, and has come so much further."""

        def is_there():
            if not (run_dir / "events.jsonl").exists():
                return False
            resumed = [event["step"] for event in read_run(run_dir).events if event["event"] in ("start", "resume")]
            return len(resumed) > num_resumed and len(losses(run_dir)) >= resumed[-1] + num_steps

        slurm.wait_until(is_there)

    wait_for(0, 3)
    slurm.ask("scancel", "--signal=TERM", job)  # what --signal sends before the time limit
    slurm.wait_until(lambda: slurm.said(job).count("which is saved; --resume continues from it") == 1)
    wait_for(1, 3)
    slurm.ask("scontrol", "requeue", job)
    slurm.wait_until(lambda: slurm.said(job).count("which is saved; --resume continues from it") == 2)
    wait_for(2, 25)
    assert (tmp_path / "local" / "data").read_bytes() == data.read_bytes()
    slurm.lose("node1")
    wait_for(3, 3)
    slurm.ask("scancel", job)
    slurm.wait_until(lambda: slurm.state(job) not in ("RUNNING", "COMPLETING"))
    assert slurm.state(job) == "CANCELLED"
    found = losses(run_dir)
    np.testing.assert_allclose(found, whole(config, "--stop-at", len(found)), rtol=1e-10)
    assert left_behind(config) == {}


def test_hosts_of_train_find_each_other_under_srun(slurm, tmp_path):
    config = write_config(tmp_path, (2, 2, 1), 6)
    command = [*SWIFT, "train", str(config), "--run-dir", str(tmp_path / "run")]
    hosts = slurm.named([*command, "--coordinator", "auto", "--num-hosts", "2"])
    srun = ["srun", "--nodes=2", "--ntasks-per-node=1", *hosts]
    done = subprocess.run(
        srun, env=environment(config) | slurm.environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(losses(tmp_path / "run"), whole(config), rtol=1e-10)
