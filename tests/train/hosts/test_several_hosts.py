"""Runs on several hosts against the same run on one, and hosts that cannot run together."""

import numpy as np
import pytest

from tests.elastic.runs import losses
from tests.train.hosts.runs import alone, ended, start, write_config

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("topology", "settings"),
    [
        ((2, 2, 2), {}),
        ((4, 2, 1), {"Experiment__failures": ("step 1: fail 1:0",)}),
        ((1, 1, 8), {"ExpertConfig__capacity": "@RankCapacity()", "Experiment__sequences_per_microbatch": 8}),
    ],
    ids=["pipelines", "a lost worker", "capacity by rank"],
)
def test_hosts_compute_what_one_does(tmp_path, topology, settings):
    config = write_config(tmp_path, topology, 4, Experiment__eval_every=2, **settings)
    expected = alone(config, tmp_path / "alone")
    for num_hosts in (2, 4):
        run_dir = tmp_path / f"on-{num_hosts}"
        hosts = ended(start(config, run_dir, num_hosts))
        assert [host.code for host in hosts] == [0] * num_hosts, "".join(host.err for host in hosts)
        np.testing.assert_allclose(losses(run_dir), expected, rtol=1e-10)


def test_a_worker_that_fails_and_rejoins_gets_its_state_from_another_host(tmp_path):
    """Peers run its micro-batches, and the first host gives it the state again; a checkpoint is saved meanwhile."""
    settings = {"ModelConfig__num_layers": 1, "CheckpointConfig__every": 3}
    failures = ("step 2: fail 3:0", "step 4: rejoin 3:0")
    config = write_config(tmp_path, (4, 1, 1), 5, Experiment__failures=failures, **settings)
    expected = alone(config, tmp_path / "alone", "--set", "Experiment.failures=()")
    hosts = ended(start(config, tmp_path / "run", 2))
    assert [host.code for host in hosts] == [0, 0], "".join(host.err for host in hosts)
    assert "worker 3:0 failed" in hosts[0].err
    assert "worker 3:0 rejoined" in hosts[0].err
    np.testing.assert_allclose(losses(tmp_path / "run"), expected, rtol=1e-10)


def test_hosts_of_different_settings_are_refused_on_all_of_them(tmp_path):
    config = write_config(tmp_path, (1, 1, 2), 3)
    for host in ended(start(config, tmp_path / "run", 2, "--set", lambda host: f"Experiment.seed={host}")):
        assert host.code == 2
        assert host.err == "swift: host 1: Experiment.seed = '1': host 0 has '0': all hosts of a run need the same\n"
    assert not (tmp_path / "run").exists()
