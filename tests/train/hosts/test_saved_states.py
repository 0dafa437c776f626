"""Checkpoints that several hosts save together, and runs that resume from them on as many hosts, or on others."""

import shutil

import numpy as np
import pytest
from faults.machines import MAY_BE_POSSIBLE

from swift.checkpoint.manifest import checkpoint_steps, read_manifest
from tests.elastic.runs import losses
from tests.train.hosts.runs import alone, arrays_of, bytes_of_hosts, ended, start, write_config

pytestmark = pytest.mark.slow
ONE_LAYER = {"ModelConfig__num_layers": 1, "ModelConfig__moe_pattern": (True,), "Experiment__num_microbatches": 1}


def trained(config, run_dir, num_hosts, *arguments):
    """Runs on some hosts; nothing may be left beside the checkpoints."""
    hosts = ended(start(config, run_dir, num_hosts, *arguments))
    assert [host.code for host in hosts] == [0] * num_hosts, "".join(host.err for host in hosts)
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == {
        f"step-{step:08d}" for step in checkpoint_steps(run_dir / "checkpoints")
    }


def test_two_hosts_save_what_one_saves_and_any_number_goes_on(tmp_path):
    """Pipelines of two stages, so that each host has a stage, and both hosts a part of every array."""
    config = write_config(tmp_path, (2, 2, 1), 6, CheckpointConfig__every=2, CheckpointConfig__num_kept=9)
    expected = alone(config, tmp_path / "alone")
    trained(config, tmp_path / "run", 2, "--stop-at", 4)
    assert checkpoint_steps(tmp_path / "run" / "checkpoints") == [2, 4]
    assert [len(of_save) for of_save in bytes_of_hosts(tmp_path / "run")] == [2, 2]
    ours, theirs = (arrays_of(tmp_path / name / "checkpoints" / "step-00000004") for name in ("run", "alone"))
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        assert values.dtype == theirs[name].dtype
        np.testing.assert_allclose(values, theirs[name], rtol=1e-8, atol=1e-12, err_msg=name)
    for num_hosts in (1, 2, 4):
        copy = tmp_path / f"on-{num_hosts}"
        shutil.copytree(tmp_path / "run", copy)
        if num_hosts == 1:
            alone(config, copy, "--resume")
        else:
            trained(config, copy, num_hosts, "--resume")
        np.testing.assert_allclose(losses(copy), expected, rtol=1e-8)


OTHER_CUTS = {
    "apart": {"ModelConfig__num_layers": 3, "Experiment__cut": ((1, 2), (2, 1))},
    "two runs": {"ModelConfig__num_layers": 4, "Experiment__planner": "v"},
}


@pytest.mark.parametrize("settings", OTHER_CUTS.values(), ids=OTHER_CUTS)
def test_hosts_whose_pipelines_are_cut_otherwise_than_a_checkpoint(tmp_path, settings):
    """A block is on both hosts, or on one in another stage than in the checkpoint; one host reads it, too."""
    config = write_config(tmp_path, (2, 2, 1), 4, CheckpointConfig__every=2, **settings)
    expected = alone(config, tmp_path / "alone")
    trained(config, tmp_path / "run", 2, "--stop-at", 2)
    assert all(bytes_of_hosts(tmp_path / "run")[0])
    shutil.copytree(tmp_path / "run", tmp_path / "on-1")
    trained(config, tmp_path / "run", 2, "--resume")
    np.testing.assert_allclose(losses(tmp_path / "run"), expected, rtol=1e-10)
    np.testing.assert_allclose(alone(config, tmp_path / "on-1", "--resume"), expected, rtol=1e-10)


def test_partial_checkpoints_of_hosts(tmp_path):
    """All hosts save the experts that the first one chooses, and a run resumes from copies of several iterations."""
    settings = ONE_LAYER | {"CheckpointConfig__experts_per_layer": 1, "CheckpointConfig__num_kept": 9}
    config = write_config(tmp_path, (1, 1, 2), 5, CheckpointConfig__every=1, **settings)
    alone(config, tmp_path / "alone")
    trained(config, tmp_path / "run", 2, "--stop-at", 3)
    chosen = [
        [read_manifest(tmp_path / name / "checkpoints" / f"step-0000000{step}", "checkpoint").chosen for step in (1, 2)]
        for name in ("run", "alone")
    ]
    assert chosen[0] == chosen[1]
    assert len(chosen[0][1][0]) == 1
    trained(config, tmp_path / "run", 2, "--resume")
    assert checkpoint_steps(tmp_path / "run" / "checkpoints") == [1, 2, 3, 4, 5]


def test_four_hosts_of_which_three_go_on(tmp_path):
    """Each host is a pipeline; those that are left take the micro-batches of the one that is gone."""
    config = write_config(tmp_path, (4, 1, 1), 5, **ONE_LAYER | {"Experiment__num_microbatches": 3})
    expected = alone(config, tmp_path / "alone")
    trained(config, tmp_path / "run", 4, "--stop-at", 2)
    (written,) = bytes_of_hosts(tmp_path / "run")
    np.testing.assert_allclose(written, sum(written) / 4, rtol=0.05)
    fewer = "--set", "Topology.num_pipelines=3", "--set", "Experiment.num_microbatches=4"
    trained(config, tmp_path / "run", 3, "--resume", *fewer)
    np.testing.assert_allclose(losses(tmp_path / "run"), expected, rtol=1e-8)


def test_hosts_begin_with_the_weights_of_a_run_and_the_first_traces(tmp_path):
    config = write_config(tmp_path, (1, 1, 2), 3, CheckpointConfig__every=3, **ONE_LAYER)
    alone(config, tmp_path / "other")
    expected = alone(config, tmp_path / "alone", "--init-from", tmp_path / "other")
    trained(config, tmp_path / "run", 2, "--init-from", tmp_path / "other", "--profile", "2:3")
    np.testing.assert_allclose(losses(tmp_path / "run"), expected, rtol=1e-10)
    assert len(list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))) == 1


def refusals(config, inside, *arguments):
    """The last lines of two hosts that are refused."""
    hosts = ended(start(config, config.parent / "refused", 2, *arguments, inside=inside))
    assert [host.code for host in hosts] == [2, 2], hosts
    return [host.err.splitlines()[-1] for host in hosts]


@pytest.mark.skipif(not MAY_BE_POSSIBLE, reason="only root can mount")
def test_hosts_that_see_other_weights_are_refused(tmp_path):
    config = write_config(tmp_path, (1, 1, 2), 3, CheckpointConfig__every=3, **ONE_LAYER)
    runs = [tmp_path / f"run-{seed}" for seed in range(2)]
    for seed, run in enumerate(runs):
        alone(config, run, "--set", f"Experiment.seed={seed}")
    for line in refusals(config, lambda _: [], "--init-from", lambda host: runs[host]):
        assert line.startswith(f"swift: host 1: --init-from = '{runs[1]}'")
    shared = tmp_path / "shared"
    shared.mkdir()

    def inside(host):
        return ["unshare", "--mount", "sh", "-c", f'mount --bind {runs[host]} {shared} && exec "$@"', "sh"]

    for line in refusals(config, inside, "--init-from", shared):
        assert line.startswith("swift: host 1: the weights of --init-from = ")
