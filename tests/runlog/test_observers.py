"""Observers of a run: told all that is recorded, in groups, and never the end of a run."""

import sys
from types import SimpleNamespace

import pytest

from swift.errors import SettingError
from swift.runlog import TRACKERS, Observer, RunDirectory, read_run

CONFIG = "Experiment.num_steps = 2\nExperiment.placement = @Symi()\n"
RECORD = {"loss": 2.5, "drop_share": 0.25, "mine": 1, "popularity": [[3, 1]], "replicas": [[1, 1]], "dropped": [[0, 1]]}


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
    assert [tag for tag in (b"train/loss", b"experts/drop_share", b"other/mine") if tag not in content] == []
    assert b"popularity" not in content


class Tracked:
    """What a tracker's package was told; of W&B and MLflow what is used of them."""

    def __init__(self):
        self.begun, self.logged, self.ended = [], [], 0

    # W&B
    def init(self, **options):
        self.begun.append(options)
        return SimpleNamespace(log=lambda found, step: self.logged.append((step, found)), finish=self.set_terminated)

    # MLflow
    def MlflowClient(self):
        return self

    def create_run(self, experiment, run_name):
        self.begun.append({"name": run_name, "config": {}, "id": f"id of {experiment}"})
        return SimpleNamespace(info=SimpleNamespace(run_id=self.begun[-1]["id"]))

    def log_param(self, run_id, name, value):
        assert run_id == self.begun[-1]["id"]
        self.begun[-1]["config"][name] = value

    def log_metric(self, run_id, name, value, step):
        assert run_id == self.begun[-1]["id"]
        self.logged.append((step, {name: value}))

    def set_terminated(self, *_):
        self.ended += 1


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_has_the_numbers_by_group_and_continues_its_run(name, tmp_path, monkeypatch):
    tracked = Tracked()
    monkeypatch.setitem(sys.modules, name, tracked)
    with RunDirectory.create(tmp_path / "run", CONFIG, [TRACKERS[name]()]) as directory:
        directory.log_step({"step": 1, **RECORD})
    with RunDirectory.resume(tmp_path / "run", CONFIG, 1, observers=[TRACKERS[name]()]) as directory:
        directory.log_step({"step": 2, **RECORD})
    assert {run["name"] for run in tracked.begun} == {"run"}
    assert len({run["id"] for run in tracked.begun}) == 1
    assert tracked.begun[0]["config"] == {"Experiment.num_steps": "2", "Experiment.placement": "@Symi()"}
    for step in (1, 2):
        found = {tag: value for at, pairs in tracked.logged for tag, value in pairs.items() if at == step}
        assert found == {"train/loss": 2.5, "experts/drop_share": 0.25, "other/mine": 1.0}
    assert tracked.ended == 2


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_is_not_installed_is_told_in_a_line(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        SettingError, match=rf"--logger = '{name}': is not installed: pip install 'swift-moe\[{name}\]'"
    ):
        TRACKERS[name]()
