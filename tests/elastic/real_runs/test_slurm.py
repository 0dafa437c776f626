"""Runs under a real Slurm of three nodes on this machine: one node is lost, given up, and found again."""

import subprocess

import numpy as np
import pytest

from tests.elastic.runs import SWIFT, environment, left_behind, losses, newest_checkpoint, whole, write_config
from tests.elastic.slurm import CAN_RUN, Slurm

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CAN_RUN, reason="needs root and Debian's slurm-wlm")]


@pytest.fixture
def slurm(tmp_path):
    with Slurm(tmp_path / "slurm") as one:
        yield one


def test_a_node_that_slurm_gives_up_is_done_without_and_taken_back(slurm, tmp_path):
    """The recipe of docs/clusters.md."""
    config = write_config(tmp_path, (3, 1, 1), 10**6, Experiment__num_microbatches=6)
    command = [*SWIFT, "launch", "--processes", "3", str(config), "--run-dir", str(tmp_path / "run")]
    words = " ".join([*command, "--listen", "127.0.0.1"])
    script = f"#!/bin/sh\nsrun --no-kill --kill-on-bad-exit=0 --wait=0 {words}\n"
    job = slurm.submit(script, environment(config))
    slurm.wait_until(lambda: "running with 3 processes" in slurm.said(job))
    slurm.wait_until(lambda: "run: step" in slurm.said(job))
    slurm.lose("node2")
    slurm.wait_until(lambda: "with 2 processes" in slurm.said(job))
    assert slurm.state(job) == "RUNNING"
    slurm.find("node2")
    again = ["srun", "--nodes=1", "--ntasks=1", "--nodelist=node2", *command, "--nodes", "3", "--node", "2"]
    with subprocess.Popen(again, env=environment(config) | slurm.environment, stderr=subprocess.DEVNULL) as process:
        try:
            slurm.wait_until(lambda: "with 3 processes" in slurm.said(job).partition("node 2 is lost")[2])
            slurm.ask("scancel", "--signal=TERM", job)
            slurm.wait_until(lambda: slurm.state(job) not in ("RUNNING", "COMPLETING"))
            assert process.wait(60) == 3  # the run is not finished
        finally:
            process.kill()
    found = losses(tmp_path / "run")
    assert newest_checkpoint(config) == len(found), slurm.logs()
    np.testing.assert_allclose(found, whole(config, "--stop-at", len(found)), rtol=1e-8)
    assert left_behind(config) == {}


def test_hosts_of_train_find_each_other_under_srun(slurm, tmp_path):
    config = write_config(tmp_path, (2, 2, 1), 6)
    command = [*SWIFT, "train", str(config), "--run-dir", str(tmp_path / "run")]
    srun = [
        "srun",
        "--nodes=2",
        "--ntasks-per-node=1",
        *slurm.named([*command, "--coordinator", "auto", "--num-hosts", "2"]),
    ]
    done = subprocess.run(
        srun, env=environment(config) | slurm.environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(losses(tmp_path / "run"), whole(config), rtol=1e-10)
