"""Real runs with ``--platform gpu``, in which a CPU backend stands for each process's GPUs."""

import os
from pathlib import Path

import numpy as np
import pytest

from swift.runlog import read_run
from tests.elastic.runs import NO_CHECKPOINTS, losses, tell, whole, write_config

pytestmark = pytest.mark.slow
EVERY = 4
HOOKS = Path(__file__).parent / "hooks"


@pytest.fixture(autouse=True)
def _hooked(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{HOOKS}:{os.environ.get('PYTHONPATH', '')}")


@pytest.mark.parametrize(("topology", "victim"), [((2, 2, 1), "1:1"), ((2, 1, 2), "0:0")])
def test_all_start_again_when_one_dies_and_when_it_returns(tmp_path, topology, victim):
    """In between its peer runs its micro-batches. In the second run each process has two devices."""
    config = write_config(tmp_path, topology, 40)
    num_processes = topology[0] * topology[1]
    options = ["--processes", num_processes, "--run-dir", tmp_path / "run", "--platform", "gpu", "--copy-every", EVERY]
    chaos = ["--chaos", f"step 14: kill {victim}", f"step 25: restart {victim}"]
    code, said = tell(config, *options, *chaos)
    assert code == 0, said
    np.testing.assert_allclose(losses(tmp_path / "run"), whole(config, *NO_CHECKPOINTS), rtol=1e-8)
    events = read_run(tmp_path / "run").events
    assert [event["why"] for event in events if event["event"] == "restart_all"] == [
        f"{victim} died",
        f"{victim} can rejoin",
    ]
    assert max(event.get("rerun_steps", 0) for event in events) <= 2 * EVERY
    lived = [event["members"] for event in events if event["event"] == "epoch"]
    assert [len(members) for members in lived] == [num_processes, num_processes - 1, num_processes]
    assert "restore" not in {event["event"] for event in events}
