"""Stand-ins for trackers' packages, which keep what they are told in memory and refuse what the packages refuse.

Tried against wandb 0.31 and mlflow-skinny 3.17.
"""

import re
from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace


class WandB:
    """The package ``wandb``: of its runs the rows that it keeps, and the axis of their charts.

    Rows have steps that grow: a row below the newest is dropped, and one without a step comes after it. A resumed run
    goes on after the newest row that it has.
    """

    def __init__(self):
        self.runs, self.begun, self.ended = {}, [], 0

    def init(self, *, name, id, resume, dir, config):
        assert resume == "allow"
        assert dir
        self.begun.append({"name": name, "id": id, "config": config})
        run = self.runs.setdefault(id, SimpleNamespace(rows={}, axes={}))
        step = max(run.rows, default=-1) + 1

        def log(data, step=None, commit=None):
            assert commit is None
            nonlocal now
            if step is not None and step < now:
                return
            now = now if step is None else step
            run.rows.setdefault(now, {}).update(data)
            now += step is None

        def define_metric(name, step_metric=None):
            run.axes[name] = step_metric

        def finish():
            self.ended += 1

        now = step
        return SimpleNamespace(log=log, define_metric=define_metric, finish=finish)

    def logged(self):
        """The numbers of the only run by iteration, each as it was logged last, as its charts show them."""
        (run,) = self.runs.values()
        axis = run.axes["*"]
        assert run.axes[axis] is None, "the axis is not a metric of its own"
        found = defaultdict(dict)
        for row in run.rows.values():
            found[row[axis]] |= {tag: value for tag, value in row.items() if tag != axis}
        return dict(found)


@dataclass(frozen=True)
class Metric:
    key: str
    value: float
    timestamp: int
    step: int = 0


@dataclass(frozen=True)
class Param:
    key: str
    value: str


@dataclass
class _Run:
    name: str
    experiment: str
    status: str = "RUNNING"
    params: dict = field(default_factory=dict)
    metrics: list = field(default_factory=list)


class MLflow:
    """The package ``mlflow``: experiments by name, and of its runs what was logged. Every call of its client counts.

    Parameters keep their first values, and names have few characters.
    """

    entities = SimpleNamespace(Metric=Metric, Param=Param)

    def __init__(self):
        self.runs, self.begun, self.ended, self.num_calls = {}, [], 0, 0
        self.experiments = {"Default": "0"}

    def MlflowClient(self):
        return self

    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name):
        assert name not in self.experiments
        return self.experiments.setdefault(name, f"id of {name}")

    def create_run(self, experiment_id, start_time=None, tags=None, run_name=None):
        assert (start_time, tags) == (None, None)
        assert experiment_id in self.experiments.values(), "no such experiment"
        run = self.runs[f"run {len(self.runs)}"] = _Run(run_name, experiment_id)
        (run_id,) = (key for key, value in self.runs.items() if value is run)
        self.begun.append({"name": run_name, "id": run_id, "config": run.params})
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def update_run(self, run_id, status=None, name=None):
        assert name is None
        self.runs[run_id].status = status

    def log_batch(self, run_id, metrics=(), params=(), tags=()):
        self.num_calls += 1
        assert not tags
        for one in (*metrics, *params):
            assert re.fullmatch(r"[/\w.\- ]+", one.key), f"Invalid name: {one.key}"
        for param in params:
            assert self.runs[run_id].params.setdefault(param.key, param.value) == param.value
        for metric in metrics:
            assert metric.timestamp > 1e12, "not in milliseconds"
        self.runs[run_id].metrics += metrics

    def set_terminated(self, run_id, status=None):
        assert self.runs[run_id].status == "RUNNING"
        self.runs[run_id].status = status or "FINISHED"
        self.ended += 1

    def logged(self):
        """The numbers of the only run by iteration, each as it was logged last."""
        (run,) = self.runs.values()
        found = defaultdict(dict)
        for metric in run.metrics:
            found[metric.step][metric.key] = metric.value
        return dict(found)
