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
        ((1, 1, 8), {"ExpertConfig__capacity": "rank", "Experiment__sequences_per_microbatch": 8}),
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


def test_hosts_of_different_settings_are_refused_on_all_of_them(tmp_path):
    config = write_config(tmp_path, (1, 1, 2), 3)
    for host in ended(start(config, tmp_path / "run", 2, "--set", lambda host: f"Experiment.seed={host}")):
        assert host.code == 2
        assert host.err == "swift: host 1: Experiment.seed = '1': host 0 has '0': all hosts of a run need the same\n"
    assert not (tmp_path / "run").exists()
