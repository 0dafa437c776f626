"""Observers of a run: told all that is recorded, in groups, and never the end of a run."""

import sys

import pytest

from swift.errors import SettingError
from swift.runlog import observers
from swift.runlog.observers import Observer, count_histograms, grouped_scalars
from swift.runlog.reading import read_run
from swift.runlog.run_directory import RunDirectory
from swift.runlog.trackers import TRACKERS
from tests.runlog.stand_in_trackers import MLflow, WandB

CONFIG = "Experiment.num_steps = 2\nExperiment.placement = @Symi()\n"
RECORD = {
    "loss": 2.5,
    "drop_fraction": 0.25,
    "mine": 1,
    "popularity": [[3, 1]],
    "replicas": [[1, 1]],
    "dropped": [[0, 1]],
}


class Listening(Observer):
    def __init__(self):
        self.told = []

    def begin(self, run_dir, step, config):
        self.told.append(("begin", run_dir.name, step, config))

    def on_step(self, record):
        self.told.append(("step", record["step"], record["loss"], record["popularity"]))

    def on_event(self, event):
        self.told.append((event["event"], event["step"]))

    def end(self):
        self.told.append(("end",))


class Failing(Observer):
    def on_step(self, record):
        raise OSError(f"no route at step {record['step']}")


def test_an_observer_is_told_what_is_recorded(tmp_path):
    listening = Listening()
    with RunDirectory.create(tmp_path / "run", CONFIG, [listening]) as directory:
        directory.log_event("start", 0)
        directory.log_step({"step": 1, **RECORD})
    with RunDirectory.resume(tmp_path / "run", CONFIG, 1, observers=[listening]) as directory:
        directory.log_step({"step": 2, **RECORD})
    first = [("begin", "run", 0, CONFIG), ("start", 0), ("step", 1, 2.5, [[3, 1]]), ("end",)]
    assert listening.told == [*first, ("begin", "run", 1, CONFIG), ("step", 2, 2.5, [[3, 1]]), ("end",)]


def test_an_observer_that_fails_is_told_nothing_more_and_the_run_goes_on(tmp_path, capsys):
    listening = Listening()
    with RunDirectory.create(tmp_path / "run", CONFIG, [Failing(), listening]) as directory:
        for step in (1, 2):
            directory.log_step({"step": step, **RECORD})
    run = read_run(tmp_path / "run")
    assert len(run.metrics) == 2
    (event,) = run.events
    assert event["error"] == "Failing.on_step failed: OSError: no route at step 1"
    assert capsys.readouterr().err.count("it is not called again in this run") == 1
    assert [told[:2] for told in listening.told if told[0] == "step"] == [("step", 1), ("step", 2)]


def test_tensorboard_shows_groups(tmp_path):
    with RunDirectory.create(tmp_path / "run", CONFIG) as directory:
        directory.log_step({"step": 1, **RECORD})
    (path,) = (tmp_path / "run" / "tensorboard").iterdir()
    content = path.read_bytes()
    assert [tag for tag in (b"train/loss", b"experts/drop_fraction", b"other/mine") if tag not in content] == []
    assert b"popularity/layer 0" in content


def test_the_counts_of_a_layer_are_a_histogram_over_its_experts():
    record = {"step": 1, "popularity": [[3, 1, 0], [0, 0, 4]], "replicas": [[1, 1, 1], [1, 1, 2]], "loss": 2.0}
    found = {value.tag: value.histo for summary in count_histograms(record) for value in summary.value}
    assert list(found) == [f"{kind}/layer {layer}" for kind in ("popularity", "replicas") for layer in (0, 1)]
    first = found["popularity/layer 0"]
    assert (list(first.bucket), list(first.bucket_limit), first.num) == ([3, 1, 0], [0.5, 1.5, 2.5], 4)


def test_counts_are_written_at_first_and_every_ten_seconds(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(observers.time, "monotonic", lambda: now[0])
    board, steps = observers.TensorBoard(), []
    monkeypatch.setattr(observers.Board, "add_counts", lambda _, record: steps.append(record["step"]))
    board.begin(tmp_path, 0, CONFIG)
    for step in range(1, 61):
        board.on_step({"step": step, **RECORD})
        now[0] += 0.5
    board.end()
    assert steps == [1, 22, 43]


def test_a_routers_own_numbers_have_a_group():
    assert grouped_scalars({"router.entropy": 1.5, "router.entropy.0": 1}) == {
        "router/entropy": 1.5,
        "router/entropy.0": 1.0,
    }


STAND_INS = {"wandb": WandB, "mlflow": MLflow}
NUMBERS = {"train/loss": 2.5, "experts/drop_fraction": 0.25, "other/mine": 1.0}


@pytest.fixture(autouse=True)
def no_experiment_is_named(monkeypatch):
    for name in ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=TRACKERS)
def tracker(request, monkeypatch):
    """The name of a tracker, and a stand-in for its package."""
    tracked = STAND_INS[request.param]()
    monkeypatch.setitem(sys.modules, request.param, tracked)
    return request.param, tracked


def test_a_tracker_has_the_numbers_by_group_and_continues_its_run(tracker, tmp_path):
    name, tracked = tracker
    with RunDirectory.create(tmp_path / "run", CONFIG, [TRACKERS[name]()]) as directory:
        directory.log_step({"step": 1, **RECORD})
    with RunDirectory.resume(tmp_path / "run", CONFIG, 1, observers=[TRACKERS[name]()]) as directory:
        directory.log_step({"step": 2, **RECORD})
    assert {run["name"] for run in tracked.begun} == {"run"}
    assert len({run["id"] for run in tracked.begun}) == 1
    config = {name.replace("@", ""): value for name, value in tracked.begun[0]["config"].items()}
    assert config == {"Experiment.num_steps": "2", "Experiment.placement": "@Symi()"}
    assert tracked.logged() == dict.fromkeys((1, 2), NUMBERS)
    assert tracked.ended == 2


def test_a_tracker_has_the_iterations_that_a_resumed_run_trains_again(tracker, tmp_path):
    name, tracked = tracker
    with RunDirectory.create(tmp_path / "run", CONFIG, [TRACKERS[name]()]) as directory:
        for step in range(1, 9):
            directory.log_step({"step": step, **RECORD})
    with RunDirectory.resume(tmp_path / "run", CONFIG, 2, observers=[TRACKERS[name]()]) as directory:
        for step in (3, 4):
            directory.log_step({"step": step, **RECORD, "loss": 1.5})
    expected = {step: NUMBERS | ({"train/loss": 1.5} if step in (3, 4) else {}) for step in range(1, 9)}
    assert tracked.logged() == expected


def log_two_steps(run_dir, tracked):
    with RunDirectory.create(run_dir, CONFIG, [TRACKERS["mlflow"]()]) as directory:
        for step in (1, 2):
            directory.log_step({"step": step, **RECORD})
    return list(tracked.runs.values())[-1]


def test_mlflow_has_a_run_in_the_experiment_that_its_variables_name(tmp_path, monkeypatch):
    tracked = MLflow()
    monkeypatch.setitem(sys.modules, "mlflow", tracked)
    assert log_two_steps(tmp_path / "default", tracked).experiment == "0"
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    assert log_two_steps(tmp_path / "new", tracked).experiment == "id of mine"
    assert log_two_steps(tmp_path / "known", tracked).experiment == "id of mine"
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", tracked.create_experiment("by id"))
    assert log_two_steps(tmp_path / "by_id", tracked).experiment == "id of by id"


def test_mlflow_is_called_once_an_iteration(tmp_path, monkeypatch):
    tracked = MLflow()
    monkeypatch.setitem(sys.modules, "mlflow", tracked)
    log_two_steps(tmp_path / "run", tracked)
    assert tracked.num_calls == 3  # the settings, and two iterations
    assert tracked.logged() == dict.fromkeys((1, 2), NUMBERS)


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_is_not_installed_is_told_in_a_line(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        SettingError, match=rf"--logger = '{name}': is not installed: pip install 'swift-moe\[{name}\]'"
    ):
        TRACKERS[name]()
