"""Runs that move blocks among the survivors of a failure, and back: they lose nothing, and resume amid it."""

from dataclasses import replace

import numpy as np
import pytest

from swift.checkpoint.config import CheckpointConfig
from swift.config.checks import check
from swift.errors import SettingError
from swift.pipeline.reconfigure.engine import Reconfiguration
from swift.pipeline.reconfigure.recut import PreparedRecut, Recut
from swift.report.history import history_of, incidents_of
from swift.schedules.adapt.moves import Downtimes, MigrationPolicy
from swift.schedules.plans.normalize import DEFAULT_ASSIGNMENT
from swift.topology import Topology
from swift.train.emulated import CutSearch
from tests.train.runs import measured, run, two_stages

pytestmark = pytest.mark.usefixtures("double_precision")

AWAY = ("step 4: fail 0:1", "step 9: rejoin 0:1")


@pytest.fixture(scope="module")
def experiment(corpus):
    """Two pipelines of two stages, whose blocks move."""
    return two_stages(corpus, num_pipelines=2, warmup_steps=2, num_steps=12, num_microbatches=4, adapt="recut")


@pytest.fixture(scope="module")
def fault_free(experiment, tmp_path_factory):
    return run(experiment, tmp_path_factory.mktemp("fault_free") / "run")


@pytest.fixture(scope="module")
def with_move(experiment, tmp_path_factory):
    """A worker is down in iterations 4 to 8; blocks move before iteration 5, and back before iteration 9."""
    setup = replace(experiment, failures=AWAY, checkpoint=CheckpointConfig(every=6))
    return run(setup, tmp_path_factory.mktemp("with_move") / "run")


def values(record, name):
    return np.array([step[name] for step in record.metrics])


def changes(record):
    return [told for told in record.events if told["event"] == "reconfigure"]


def assert_nothing_is_lost(record, fault_free):
    np.testing.assert_allclose(values(record, "loss"), values(fault_free, "loss"), rtol=1e-8)
    for name in ("popularity", "replicas", "dropped", "tokens"):
        np.testing.assert_array_equal(values(record, name), values(fault_free, name))


@pytest.mark.long
def test_blocks_move_to_the_survivors_and_back_and_nothing_is_lost(with_move, fault_free):
    assert_nothing_is_lost(with_move, fault_free)
    assert values(with_move, "live_workers").tolist() == [4] * 3 + [3] * 5 + [4] * 4
    rerouted, moved, back = changes(with_move)
    assert (rerouted["step"], rerouted["failed"], rerouted["moved_bytes"]) == (4, ["0:1"], 0)
    assert (moved["step"], moved["failed"], moved["rejoined"]) == (5, [], [])
    assert moved["cuts"] == [[2, 0], [1, 1]]
    assert sum(moved["microbatches"]) == 8
    assert moved["moved_bytes"] > 0
    assert (back["step"], back["rejoined"], back["period_ratio"]) == (9, ["0:1"], 1)
    ratios = values(with_move, "period_ratio")
    assert 1 == ratios[2] < ratios[4] < ratios[3]
    told = [one.what for one in incidents_of(with_move, history_of(with_move))]
    assert any("blocks move among the survivors" in what for what in told)


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_of_moved_blocks(experiment, with_move, fault_free, tmp_path):
    """After iteration 6 blocks are moved. The run that goes on re-routes again, and moves them one iteration later."""
    setup = replace(experiment, failures=AWAY, checkpoint=CheckpointConfig(every=6))
    run(setup, tmp_path / "run", stop_at=6)
    record = run(setup, tmp_path / "run", resume=True)
    assert_nothing_is_lost(record, fault_free)
    assert [told["step"] for told in changes(record)] == [4, 5, 7, 9]
    assert measured(record)[:6] == measured(with_move)[:6]


@pytest.fixture(scope="module")
def three(experiment):
    """Three pipelines of two stages, each a dense layer and one of experts, which take longer than the head."""
    model = replace(experiment.model, num_layers=4, ffn_dim=512, moe_pattern=(False, True))
    return replace(experiment, model=model, topology=Topology(3, 2, 1), num_steps=60)


@pytest.fixture(scope="module")
def three_fault_free(three, tmp_path_factory):
    return run(three, tmp_path_factory.mktemp("three") / "run")


@pytest.mark.slow
def test_sixty_steps_with_two_failures_two_moves_and_two_returns(three, three_fault_free, tmp_path):
    """With both workers down there is no better cut than the run's own, and blocks are where they were."""
    failures = ("step 11: fail 0:1", "step 25: fail 2:0", "step 39: rejoin 0:1", "step 51: rejoin 2:0")
    record = run(replace(three, failures=failures), tmp_path / "run")
    assert_nothing_is_lost(record, three_fault_free)
    assert [told["step"] for told in changes(record)] == [11, 12, 25, 39, 40, 51]
    assert ["cuts" in told for told in changes(record)] == [False, True, False, False, True, False]


@pytest.mark.slow
def test_a_worker_that_has_taken_blocks_fails(three, three_fault_free, tmp_path):
    """Worker 0:0 holds all of pipeline 0 when it fails, and nobody of the pipeline is left; then it returns first."""
    failures = ("step 11: fail 0:1", "step 25: fail 0:0", "step 39: rejoin 0:0", "step 51: rejoin 0:1")
    record = run(replace(three, failures=failures), tmp_path / "run")
    assert_nothing_is_lost(record, three_fault_free)
    assert [told["step"] for told in changes(record)] == [11, 12, 25, 39, 40, 51]


@pytest.mark.slow
def test_windows_with_moved_blocks_lose_nothing(three, tmp_path):
    setup = replace(three, num_steps=24, window=2, optimizer=replace(three.optimizer, clip_norm=None))
    expected = run(setup, tmp_path / "fault_free")
    record = run(replace(setup, failures=("step 5: fail 0:1", "step 17: rejoin 0:1")), tmp_path / "run")
    assert_nothing_is_lost(record, expected)
    assert [told["step"] for told in changes(record)] == [5, 7, 17]


@pytest.mark.parametrize(
    ("wrong", "setting", "allowed"),
    [
        ({"adapt": "move"}, "Experiment.adapt = 'move'", "must be one of reroute, reassign, recut, auto"),
        ({"topology": Topology(1, 2, 1)}, "Experiment.adapt = 'recut'", "needs several pipelines"),
        ({"adapt": "reassign", "topology": Topology(2, 1, 1)}, "Experiment.adapt = 'reassign'", "needs several stages"),
        ({"microbatches": (3, 5)}, "Experiment.adapt = 'recut'", "needs pipelines that are cut alike"),
        ({"planner": "zero_bubble"}, "Experiment.adapt = 'recut'", "needs a planner for failures"),
        (
            {"planner": "v", "topology": Topology(2, 1, 1)},
            "Experiment.adapt = 'recut'",
            "needs a planner for one run of layers a stage",
        ),
        ({"expected_downtime": 60.0}, "Experiment.expected_downtime = 60.0", "needs Experiment.adapt = 'auto'"),
        ({"adapt": "auto", "expected_downtime": 0}, "Experiment.expected_downtime = 0", "must be a number above 0"),
    ],
)
def test_what_cannot_adapt_is_told(experiment, wrong, setting, allowed):
    with pytest.raises(SettingError) as told:
        check(replace(experiment, **wrong))
    assert setting in str(told.value)
    assert allowed in str(told.value)


class Slow:
    """An engine whose better cut saves a quarter of an iteration, and moves a billion bytes."""

    better = PreparedRecut(Recut(), DEFAULT_ASSIGNMENT, (2, 2), gain=0.25, most_bytes=1e9)

    def better_cut(self, failed):
        assert failed
        return self.better


def test_a_move_is_made_if_it_pays_before_the_worker_returns():
    """At the first guess of 12.5 GB/s two moves take 0.16 s, which a gain of a quarter makes up for in 0.64 s."""
    down = frozenset({(0, 1)})
    for expected_s, is_made in ((0.6, False), (0.7, True)):
        search = CutSearch(MigrationPolicy(Downtimes(expected_s)), waits=True)
        search.begin(Slow(), down)
        assert (search.ready() == Slow.better) == is_made
        search.close()


def test_a_move_that_was_slow_is_made_again_in_a_longer_downtime_only():
    """It took a second, so that the next one, and the one back, pay after eight."""
    for expected_s, is_made in ((7.9, False), (8.1, True)):
        search = CutSearch(MigrationPolicy(Downtimes(expected_s)), waits=True)
        search.moved(Slow.better, Reconfiguration(True, 0.0, 0.0, 1000.0, 10**9))
        search.begin(Slow(), frozenset({(0, 1)}))
        assert (search.ready() == Slow.better) == is_made
        search.close()


def test_how_long_workers_stay_away_is_learnt():
    downtimes = Downtimes()
    assert downtimes.expected_s == float("inf")
    for seconds, failed in ((10.0, {(0, 1)}), (25.0, {(0, 1), (1, 0)}), (40.0, {(1, 0)}), (45.0, set())):
        downtimes = downtimes.after(frozenset(failed), seconds)
    assert downtimes.expected_s == pytest.approx((30 + 20) / 2)
    assert Downtimes(7.0).expected_s == 7.0
