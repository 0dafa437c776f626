"""Settings of checkpoints that are refused in a line."""

from dataclasses import replace

import pytest

from swift.checkpoint.config import CheckpointConfig
from swift.config.checks import check
from swift.errors import SettingError
from swift.experts.placement.flexmoe import FlexMoE
from tests.train.partial_runs import saving_one_expert


@pytest.fixture(scope="module")
def experiment(corpus):
    return saving_one_expert(corpus)


def test_partial_checkpoints_are_refused_where_no_expert_has_a_state_of_its_own(experiment):
    with pytest.raises(SettingError, match="experts_per_layer = 1: must be 'all' with OptimizerConfig"):
        check(replace(experiment, placement=FlexMoE(2), optimizer=replace(experiment.optimizer, layout="coupled")))
    with pytest.raises(SettingError, match="experts_per_layer = 5: must be at most "):
        check(replace(experiment, checkpoint=CheckpointConfig(experts_per_layer=5)))


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"every": -1}, "CheckpointConfig.every = -1: must be a whole number of at least 0"),
        ({"num_kept": 0}, "CheckpointConfig.num_kept = 0: must be a whole number of at least 1"),
        ({"experts_per_layer": 0}, "experts_per_layer = 0: must be a whole number of at least 1, or 'all'"),
        ({"experts_per_layer": "some"}, "experts_per_layer = 'some': must be a whole number of at least 1, or 'all'"),
        ({"experts_per_layer": 1.5}, "experts_per_layer = 1.5: must be a whole number of at least 1, or 'all'"),
        ({"selection": "random"}, "CheckpointConfig.selection = 'random': must be one of sequential, load_aware"),
        ({"plt_budget": 0.1}, "plt_budget = 0.1: would change nothing: it needs a number as"),
        ({"plt_budget": 1, "experts_per_layer": 1}, "CheckpointConfig.plt_budget = 1: must be below 1"),
        ({"snapshot_every": -1}, "CheckpointConfig.snapshot_every = -1: must be a whole number of at least 0"),
        (
            {"snapshot_every": 1, "snapshot_experts_per_layer": 0},
            "CheckpointConfig.snapshot_experts_per_layer = 0: must be a whole number of at least 1, or 'all'",
        ),
        (
            {"snapshot_experts_per_layer": 2},
            "snapshot_experts_per_layer = 2: would change nothing: it needs a number as",
        ),
        ({"plt_budget": float("nan"), "experts_per_layer": 1}, "CheckpointConfig.plt_budget = nan: must be a number"),
    ],
)
def test_bad_settings_are_told_in_a_line(settings, line):
    with pytest.raises(SettingError, match=line.replace("(", "\\(")):
        CheckpointConfig(**settings)
