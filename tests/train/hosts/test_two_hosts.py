"""A run on two hosts, each a process with one emulated device: the smallest that goes the whole way."""

import json

import pytest

from swift.checkpoint.reader import plan_restore
from tests.elastic.runs import losses
from tests.train.hosts.runs import bytes_of_hosts, ended, start, write_config


@pytest.mark.long
def test_two_hosts_run_and_the_first_keeps_the_record(tmp_path):
    """Two pipelines, so both hosts have the same state: each writes half of the checkpoint."""
    settings = {"ModelConfig__num_layers": 1, "ModelConfig__moe_pattern": (True,), "Experiment__num_microbatches": 1}
    config = write_config(tmp_path, (2, 1, 1), 3, CheckpointConfig__every=3, **settings)
    first, second = ended(start(config, tmp_path / "run", 2, "--format", "json"))
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert json.loads(first.out)["num_steps"] == len(losses(tmp_path / "run")) == 3
    assert "host 0 has 0:0; host 1 has 1:0" in first.err
    assert (second.out, second.err) == ("", "")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000003"]
    assert plan_restore(tmp_path / "run" / "checkpoints").step == 3
    ((one, other),) = bytes_of_hosts(tmp_path / "run")
    assert one == pytest.approx(other, rel=0.05)
