"""`swift compare` on several hosts, which run one experiment after the other without parting."""

import json
import signal
import time

import numpy as np
import pytest

from swift.cli.train import devices_of_host
from swift.config.experiment import Experiment
from swift.errors import SettingError
from swift.topology import Topology
from swift.train.hosts import HostSettings
from tests.elastic.runs import losses
from tests.train.hosts.runs import alone, ended, start, write_config

LAYER = {"ModelConfig__num_layers": 1, "ModelConfig__moe_pattern": (True,), "Experiment__num_microbatches": 1}


@pytest.fixture
def configs(tmp_path):
    """Two experiments by name, of two devices."""
    found = {}
    for name, seed in (("one", 1), ("other", 2)):
        (tmp_path / name).mkdir()
        made = write_config(tmp_path / name, (1, 1, 2), 3, **LAYER, Experiment__seed=seed)
        found[name] = made.rename(tmp_path / f"{name}.gin")
    return found


def compared(tmp_path, configs, *more):
    """The processes of two hosts that compare both experiments."""
    return start([*configs.values()], tmp_path / "top", 2, *more)


@pytest.mark.slow
def test_hosts_run_one_experiment_after_the_other(tmp_path, configs):
    first, second = ended(compared(tmp_path, configs, "--format", "json"))
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert len(json.loads(first.out)["runs"]) == 2
    assert second.out == ""
    for name, config in configs.items():
        expected = alone(config, tmp_path / f"alone-{name}")
        np.testing.assert_allclose(losses(tmp_path / "top" / name), expected, rtol=1e-10)
    again = ended(compared(tmp_path, configs, "--resume"))
    assert [host.code for host in again] == [0, 0], "".join(host.err for host in again)
    assert again[0].err.count("has ended already") == 2


@pytest.mark.slow
def test_a_comparison_that_was_interrupted_continues(tmp_path, configs):
    """Ctrl-C to the second host while it runs the second experiment."""
    steps = ("--set", "Experiment.num_steps=400")
    hosts = compared(tmp_path, configs, *steps)
    metrics, until = tmp_path / "top" / "other" / "metrics.jsonl", time.monotonic() + 300
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 3):
        assert time.monotonic() < until
        time.sleep(0.1)
    hosts[1].send_signal(signal.SIGINT)
    assert [host.code for host in ended(hosts)] == [130, 130]
    again = ended(compared(tmp_path, configs, *steps, "--resume"))
    assert [host.code for host in again] == [0, 0], "".join(host.err for host in again)
    assert again[0].err.count("has ended already") == 1
    assert len(losses(tmp_path / "top" / "other")) == 400


def test_experiments_of_other_numbers_of_devices_are_refused():
    experiments = [Experiment(topology=Topology(num_expert_ranks=ranks)) for ranks in (2, 4)]
    assert devices_of_host(None, experiments) is None
    assert devices_of_host(HostSettings("h:1", 2, 0), experiments[1:]) == 2
    with pytest.raises(SettingError, match=r"^Topology = \[2, 4\]: workers x ranks must be the same"):
        devices_of_host(HostSettings("h:1", 2, 0), experiments)
