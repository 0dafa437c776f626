"""Failures that several hosts cannot run are told before anything has started."""

from types import SimpleNamespace

import numpy as np
import pytest

from swift.config.experiment import Experiment
from swift.errors import SettingError
from swift.topology import Topology
from swift.train.hosts import check_all_compute

TOPOLOGY = Topology(3, 1, 1)


def experiment(*failures):
    """Three pipelines of a worker each."""
    return Experiment(topology=TOPOLOGY, failures=failures, num_steps=9)


@pytest.fixture(autouse=True)
def hosts(monkeypatch):
    """Two workers are on the first host, the other one is on the second."""
    devices = np.array([[SimpleNamespace(process_index=host)] for host in (0, 0, 1)])
    live = SimpleNamespace(workers=TOPOLOGY.workers, mesh=SimpleNamespace(devices=devices))
    monkeypatch.setattr("swift.train.hosts.make_mesh", lambda _: live)


def test_a_host_without_a_live_worker_is_refused_whenever_that_is():
    check_all_compute(experiment("step 2: fail 1:0", "step 4: rejoin 1:0", "step 5: fail 0:0"), 0, 2)
    later = experiment("step 2: fail 0:0", "step 4: rejoin 0:0", "step 5: fail 2:0", "step 7: rejoin 2:0")
    with pytest.raises(SettingError, match=r"= \['2:0'\]: leaves host 1 without a live worker at iteration 5; start"):
        check_all_compute(later, 0, 2)
    check_all_compute(later, 6, 2)
    with pytest.raises(SettingError, match="leaves host 1 without a live worker at iteration 6"):
        check_all_compute(later, 5, 2)
