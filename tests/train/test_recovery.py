"""Whole runs with failures: they lose nothing, resume, keep their record, and end as they should."""

import os
import signal
import threading
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest

from swift.checkpoint.config import CheckpointConfig
from swift.checkpoint.manifest import checkpoint_steps
from swift.data.windows import Batch
from swift.errors import RunError
from swift.report.history import configuration_periods, history_of, time_by_cause
from swift.report.sections import schedule_of
from swift.runlog.reading import read_run
from swift.topology import Topology
from swift.train.build import make_engine, make_loader, make_step_spec
from tests.train.runs import measured, run, two_stages

pytestmark = pytest.mark.usefixtures("double_precision")


TWO_IN_A_STAGE = ("step 1: fail 0:0", "step 20: fail 1:0", "step 35: rejoin 1:0", "step 50: rejoin 0:0")
"""The first failure comes during the learning rate's warm-up; the checkpoint of iteration 30 is of two workers less."""
CLIP = 1.35
"""Larger than the norm of some gradients of ``small``, and smaller than that of others."""
LAST_STAGE_FIRST = ("step 2: fail 2:1", "step 20: fail 0:0", "step 35: rejoin 2:1", "step 50: rejoin 0:0")


@pytest.fixture(scope="module")
def experiment(corpus):
    """Three pipelines of two stages."""
    return two_stages(corpus, num_pipelines=3, warmup_steps=4, num_steps=60, num_microbatches=2)


def values(record, name):
    return np.array([step[name] for step in record.metrics])


def of_kind(record, event):
    return [told for told in record.events if told["event"] == event]


def distance(record, other):
    return np.abs(values(record, "loss") / values(other, "loss") - 1).max()


@pytest.fixture(scope="module")
def fault_free(experiment, tmp_path_factory):
    """The record of a run without failures; the clip is active in some of its iterations."""
    return run(experiment, tmp_path_factory.mktemp("fault_free") / "run")


@pytest.fixture(scope="module")
def with_failures(experiment, tmp_path_factory):
    """The record of a run with two failures and two re-joins, and a checkpoint of its middle."""
    setup = replace(experiment, failures=TWO_IN_A_STAGE, checkpoint=CheckpointConfig(every=30))
    return run(setup, tmp_path_factory.mktemp("with_failures") / "run")


def assert_nothing_is_lost(record, fault_free, live_workers):
    """Every loss and every decision of the router is that of the run without failures."""
    assert distance(record, fault_free) < 1e-8
    for name in ("popularity", "replicas", "dropped", "tokens"):
        np.testing.assert_array_equal(values(record, name), values(fault_free, name))
    assert values(record, "live_workers").tolist() == live_workers
    assert values(fault_free, "tokens_dropped").sum() > 0.2 * values(fault_free, "tokens_routed").sum()
    assert values(fault_free, "loss")[-1] < values(fault_free, "loss")[0] - 2


def test_two_failures_in_one_stage_and_two_rejoins_lose_nothing(with_failures, fault_free):
    assert_nothing_is_lost(with_failures, fault_free, [5] * 19 + [4] * 15 + [5] * 15 + [6] * 11)
    assert (values(fault_free, "grad_norm") > 1).any()


def test_the_record_says_what_ran_and_where_the_time_went(with_failures):
    history = history_of(with_failures)
    stretches = configuration_periods(with_failures, history)
    assert [one.down for one in stretches] == [("0:0",), ("0:0", "1:0"), ("0:0",), ()]
    assert [one.num_steps for one in stretches] == [19, 15, 15, 11]
    for one in stretches:
        schedule, players = schedule_of(one.plan)
        assert {f"{d}:{p}" for d, p in schedule.problem.failed} == {*one.down}
        assert players == {}
        assert schedule.problem.topology == Topology(3, 2)
    spent = time_by_cause(with_failures, history)
    assert sum(spent.values()) == pytest.approx(history.end_s, abs=1e-3)
    assert min(spent["startup"], spent["useful"], spent["reconfiguration"], spent["saving"]) > 0
    assert spent["useful"] < sum(values(with_failures, "step_ms")) / 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failures", "live_workers", "adapt"),
    [
        (LAST_STAGE_FIRST, [6] + [5] * 18 + [4] * 15 + [5] * 15 + [6] * 11, "reroute"),
        (TWO_IN_A_STAGE, [5] * 19 + [4] * 15 + [5] * 15 + [6] * 11, "reassign"),
        (LAST_STAGE_FIRST, [6] + [5] * 18 + [4] * 15 + [5] * 15 + [6] * 11, "reassign"),
    ],
)
def test_other_failures_lose_nothing(experiment, fault_free, tmp_path, failures, live_workers, adapt):
    record = run(replace(experiment, failures=failures, adapt=adapt), tmp_path / "run")
    assert_nothing_is_lost(record, fault_free, live_workers)


@pytest.mark.slow
def test_windows_with_failures_lose_nothing(experiment, tmp_path):
    """Workers that fail in a window are down from its start, and return at the start of the next."""
    setup = replace(experiment, window=3, optimizer=replace(experiment.optimizer, clip_norm=None))
    expected = run(setup, tmp_path / "fault_free")
    record = run(replace(setup, failures=TWO_IN_A_STAGE), tmp_path / "run")
    assert_nothing_is_lost(record, expected, [5] * 18 + [4] * 18 + [5] * 15 + [6] * 9)
    assert [told["step"] for told in of_kind(record, "reconfigure")] == [19, 37, 52]
    assert not values(record, "was_discarded").any()


@pytest.mark.slow
@pytest.mark.parametrize("stop", [30, 34])
def test_a_run_goes_on_from_a_checkpoint_with_workers_down(experiment, with_failures, tmp_path, stop):
    """Bit for bit; iteration 35, after the second stop, is the first with one of them again."""
    setup = replace(experiment, failures=TWO_IN_A_STAGE, checkpoint=CheckpointConfig(every=30))
    run(setup, tmp_path / "run", stop_at=stop)
    record = run(setup, tmp_path / "run", resume=True)
    assert measured(record) == measured(with_failures)
    (resumed,) = of_kind(record, "resume")
    assert (resumed["step"], resumed["live_workers"]) == (stop, {30: 4, 34: 5}[stop])


class Shuffled:
    """A loader's batches with the micro-batches in another order: the same global batches, summed otherwise."""

    def __init__(self, loader, seed):
        self._loader, self._seed = loader, seed

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def __next__(self):
        batch = next(self._loader)
        order = np.random.default_rng(self._seed).permutation(len(batch.inputs))
        return Batch(*(leaf[order] for leaf in batch))


@pytest.mark.slow
def test_in_single_precision_failures_do_no_more_than_another_order_of_sums(experiment, tmp_path, monkeypatch, capsys):
    setup = replace(experiment, compute_dtype="float32")

    def control(order):
        """A run whose micro-batches change places, which mathematically is the same."""

        def make_shuffled(setup, split, corpus):
            loader = make_loader(setup, split, corpus)
            return Shuffled(loader, order) if split == "train" else loader

        with monkeypatch.context() as patch:
            patch.setattr("swift.train.trainer.make_loader", make_shuffled)
            return run(setup, tmp_path / f"{order}")

    with jax.enable_x64(False):
        expected = run(setup, tmp_path / "fault_free")
        controls = [distance(control(order), expected) for order in range(3)]
        record = run(replace(setup, failures=TWO_IN_A_STAGE), tmp_path / "run")
    lost, most = distance(record, expected), np.median(controls)
    with capsys.disabled():
        print(f"\nrelative distance of losses in float32: {lost:.2e} with failures, {most:.2e} of the control")
    assert min(controls) > 0
    assert lost <= 3 * most


@dataclass
class Told:
    """Failures by the first step of a window; ``asked`` keeps the windows, ``act`` happens before one is answered."""

    down: dict
    act: object = None

    def __post_init__(self):
        self.asked = []

    def failed(self, first_step, last_step):
        self.asked.append((first_step, last_step))
        if self.act is not None:
            self.act(first_step)
        return frozenset(max(((at, down) for at, down in self.down.items() if at <= first_step), default=(0, ()))[1])

    def lost_ranks(self, first_step, last_step):  # noqa: ARG002 - there are peers
        return frozenset()


@pytest.fixture(scope="module")
def small(experiment):
    """Two workers, which are each other's peers. Number of steps and clip are the same for all tests: one program."""
    model, optimizer = replace(experiment.model, num_layers=1), replace(experiment.optimizer, clip_norm=CLIP)
    return replace(experiment, model=model, optimizer=optimizer, topology=Topology(2, 1, 1), num_steps=20)


def background_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prepare")]


@pytest.mark.slow
def test_an_event_tells_what_a_change_cost(small, tmp_path):
    record = run(small, tmp_path / "run", Told({3: [(0, 0)], 5: []}), stop_at=6)
    failure, rejoin = of_kind(record, "reconfigure")
    assert (failure["step"], failure["failed"], failure["rejoined"], failure["live_workers"]) == (3, ["0:0"], [], 1)
    assert (rejoin["step"], rejoin["failed"], rejoin["rejoined"], rejoin["live_workers"]) == (5, [], ["0:0"], 2)
    assert not failure["prepared"]
    assert rejoin["prepared"]  # the run began so
    assert failure["plan_ms"] > 0
    assert failure["compile_ms"] > 0
    assert min(change[f"{part}_ms"] for change in (failure, rejoin) for part in ("plan", "compile", "move")) >= 0
    state = make_step_spec(small).init(jax.random.key(0))
    assert failure["moved_bytes"] == 0
    assert rejoin["moved_bytes"] == sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / 2
    assert failure["period_ratio"] == pytest.approx(2, abs=0.2)
    assert rejoin["period_ratio"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("prepare", ["next", "none"])
def test_a_change_is_prepared_once_the_background_had_time(small, tmp_path, monkeypatch, prepare):
    engines = []

    def make_watched(*settings):
        engines.append(make_engine(*settings))
        return engines[-1]

    monkeypatch.setattr("swift.train.emulated.make_engine", make_watched)

    def give_time(step):
        if step == 3:
            engines[0].settle()
            assert engines[0].background_errors() == []

    record = run(small, tmp_path / "run", Told({3: [(0, 0)]}, give_time), prepare=prepare, stop_at=4)
    (failure,) = of_kind(record, "reconfigure")
    assert failure["prepared"] == (prepare == "next")
    assert len(engines) == 1
    assert background_threads() == []


@pytest.mark.slow
def test_a_stage_that_dies_outright_ends_the_run_and_keeps_the_checkpoint(small, tmp_path):
    setup = replace(small, checkpoint=CheckpointConfig(every=4))
    with pytest.raises(RunError) as error:
        run(setup, tmp_path / "run", Told({3: [(0, 0)], 6: [(0, 0), (1, 0)]}), prepare="next")
    assert background_threads() == []
    assert str(error.value) == (
        "stage 0 has no live worker left at iteration 6: stopped; the checkpoint of iteration 4 is kept; continue with "
        f"--run-dir {tmp_path / 'run'} --resume and an Experiment.failures that leaves it one"
    )
    lost = read_run(tmp_path / "run").events[-1]
    assert (lost["event"], lost["step"], lost["stages"], lost["failed"]) == ("stage_lost", 6, [0], ["0:0", "1:0"])
    assert checkpoint_steps(tmp_path / "run" / "checkpoints") == [4]
    assert [step["step"] for step in run(setup, tmp_path / "run", resume=True, stop_at=8).metrics] == [*range(1, 9)]


@pytest.mark.slow
def test_a_stage_whose_state_is_lost_with_those_who_had_moved_there_ends_the_run(experiment, tmp_path):
    """Worker 0:1 serves stage 0 after two failures there, and cannot go back to stage 1 when none is left there."""
    gone = [(0, 0), (1, 0)]
    source = Told({2: gone[:1], 3: gone, 5: [*gone, (1, 1), (2, 1)]})
    lost = "nobody has the state of stage 1 at iteration 5, as roles or blocks had moved"
    with pytest.raises(RunError, match=f"{lost}: stopped; there is no checkpoint"):
        run(replace(experiment, adapt="reassign"), tmp_path / "run", source)


@pytest.mark.slow
def test_records_are_complete_whatever_windows_are_cut_by(small, tmp_path):
    """Evaluations, checkpoints, the profiler, a stop, a resume and the end come at no multiple of the window."""
    setup = replace(small, eval_every=7, checkpoint=CheckpointConfig(every=5))
    expected = run(setup, tmp_path / "one_by_one")
    windows = replace(setup, window=3)
    first, second = Told({}), Told({})
    run(windows, tmp_path / "run", first, stop_at=11)
    record = run(windows, tmp_path / "run", second, resume=True, profile=(16, 18))

    asked = [window for source in (first, second) for window in source.asked[1:]]  # the first question is for the start
    assert [step for a, b in asked for step in range(a, b + 1)] == [*range(1, 21)] == values(record, "step").tolist()
    assert {b - a + 1 for a, b in asked} == {1, 3}
    norms = values(record, "grad_norm")
    discarded = [a < b and bool((norms[a - 1 : b] > CLIP).any()) for a, b in asked for _ in range(a, b + 1)]
    assert values(record, "was_discarded").tolist() == discarded
    assert 0 < sum(discarded) < sum(b - a + 1 for a, b in asked if a < b)
    for name in ("loss", "grad_norm", "learning_rate", "popularity", "tokens"):
        np.testing.assert_allclose(values(record, name), values(expected, name), rtol=1e-10)
    both = [
        {step["step"]: step["validation_loss"] for step in one.metrics if "validation_loss" in step}
        for one in (record, expected)
    ]
    assert [*both[1]] == [7, 14, 20]
    assert both[0] == pytest.approx(both[1], rel=1e-10)
    assert [told["step"] for told in of_kind(record, "checkpoint")] == [5, 10, 11, 15, 20]
    assert len([*(tmp_path / "run" / "profile").rglob("*.xplane.pb")]) == 1


@pytest.mark.slow
def test_ctrl_c_ends_the_run_after_its_window(small, tmp_path):
    def interrupt(step):
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(replace(small, window=3), tmp_path / "run", Told({4: [(0, 0)]}, interrupt), prepare="next")
    record = read_run(tmp_path / "run")
    assert values(record, "step").tolist() == [1, 2, 3, 4, 5, 6]
    assert [(told["event"], told["step"]) for told in record.events[2:]] == [
        ("reconfigure", 4),
        ("plan", 4),
        ("checkpoint", 6),
        ("interrupt", 6),
    ]
    for thread in threading.enumerate():  # a compilation that is under way is not waited for
        if thread.name.startswith("prepare"):
            thread.join()
