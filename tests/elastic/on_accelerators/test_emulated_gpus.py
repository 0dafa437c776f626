"""Real runs with ``--platform gpu``, in which a CPU backend stands for each process's GPUs."""

import os
from pathlib import Path

import numpy as np
import pytest

from swift.runlog.reading import read_run
from tests.elastic.runs import NO_CHECKPOINTS, launched, losses, stop, wait_for, whole, write_config

pytestmark = pytest.mark.slow
EVERY = 4
HOOKS = Path(__file__).parent / "hooks"


@pytest.fixture(autouse=True)
def _hooked(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{HOOKS}:{os.environ.get('PYTHONPATH', '')}")


@pytest.mark.parametrize(("topology", "victim"), [((2, 2, 1), "1:1"), ((2, 1, 2), "0:0")])
def test_all_start_again_when_one_dies_and_when_it_returns(tmp_path, topology, victim):
    """In between its peer runs its micro-batches. In the second run each process has two devices."""
    config, num_processes = write_config(tmp_path, topology, 10**6), topology[0] * topology[1]
    options = ["--platform", "gpu", "--memory-checkpoint-every", str(EVERY)]
    chaos = ["--chaos", f"step 14: kill {victim}", f"step 25: restart {victim}"]
    with launched(config, *options, *chaos, processes=num_processes) as process:
        for line in (
            f"restarting all processes: {victim} died",
            f"restarting all processes: {victim} can rejoin",
        ):
            wait_for(process, line)
            wait_for(process, "resumed after iteration")
        stop(process, config)
    found = losses(tmp_path / "run")
    np.testing.assert_allclose(found, whole(config, "--stop-at", len(found), *NO_CHECKPOINTS), rtol=1e-8)
    events = read_run(tmp_path / "run").events
    assert "restore" not in {event["event"] for event in events}
    recoveries = [event for event in events if event["event"] == "recovery"]
    assert [len(event["members"]) for event in recoveries] == [num_processes - 1, num_processes]
    assert max(event["rerun_steps"] for event in recoveries) <= 2 * EVERY
