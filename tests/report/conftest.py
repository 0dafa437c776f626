import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from swift.runlog.reading import Run
from swift.schedules.planners.lockstep import lockstep
from swift.schedules.plans.normalize import ChunkAssignment, after_moves, normalize, plan_document
from swift.schedules.problem import Problem
from swift.topology import Topology
from tests.runlog.records import metrics_of

_PROBLEM = Problem(Topology(3, 2), 4, num_iterations=2)


def _symi(popularity_E, num_slots):
    """Replicas in proportion to popularity, at least one each: near enough to Algorithm 1 to be looked at."""
    count_E = np.ones(len(popularity_E), dtype=int)
    while count_E.sum() < num_slots:
        count_E[np.argmax(popularity_E / count_E)] += 1
    return count_E


def _make_run(
    path="runs/symi", num_steps=40, policy="symi", num_layers=2, num_classes=8, num_slots=32, summary=(), seed=0
):
    """A run as training leaves it: popularity drifts, and replicas follow it or do not."""
    random = np.random.default_rng(seed)
    tokens = 4096
    phase_LE = random.uniform(0, 2 * np.pi, (num_layers, num_classes))
    speed_LE = random.uniform(1, 4, (num_layers, num_classes))
    replicas_LE = np.full((num_layers, num_classes), num_slots // num_classes)
    metrics = []
    for step in range(1, num_steps + 1):
        logits_LE = 1.5 * np.sin(phase_LE + speed_LE * 2 * np.pi * step / max(num_steps, 200)) + random.normal(
            0, 0.15, phase_LE.shape
        )
        share_LE = np.exp(logits_LE) / np.exp(logits_LE).sum(-1, keepdims=True)
        popularity_LE = np.array([random.multinomial(tokens, share_E) for share_E in share_LE])
        dropped_LE = np.maximum(popularity_LE - replicas_LE * tokens // num_slots, 0)
        drop_fraction = dropped_LE.sum() / (tokens * num_layers)
        loss = 2.2 + 3.3 * np.exp(-step / (num_steps / 4)) * (1 + 0.5 * drop_fraction) + random.normal(0, 0.06)
        record = {"step": step, "loss": loss, "aux_loss": 1.0, "tokens": tokens, "tokens_routed": tokens * num_layers}
        record |= {"tokens_dropped": int(dropped_LE.sum()), "drop_fraction": drop_fraction}
        record |= {
            "load_imbalance": float((popularity_LE / replicas_LE).max() / (tokens / num_slots)),
            "grad_norm": 1.0,
        }
        record |= {"learning_rate": 1e-3, "step_ms": 9000.0 if step == 1 else 100.0 + step % 3, "tokens_per_s": 4e4}
        record |= {"live_workers": 1, "popularity": popularity_LE.tolist(), "replicas": replicas_LE.tolist()}
        record |= {"dropped": dropped_LE.tolist()}
        if step % max(1, num_steps // 5) == 0:
            record["validation_loss"] = loss + 0.1
        metrics.append(json.loads(json.dumps(record)))
        if policy == "symi":
            replicas_LE = np.array([_symi(popularity_E, num_slots) for popularity_E in popularity_LE])
    facts = {"name": Path(path).name, "placement": policy, "layout": "sliced", "device": "8 CPU", "target_loss": 3.0}
    facts |= {"num_steps": num_steps, "validation_loss": None, "jax_version": "0.10.0"} | dict(summary)
    events = [{"time": "2025-01-01T00:00:00.000+00:00", "event": "checkpoint", "step": num_steps, "path": "a"}]
    return Run(Path(path), facts["name"], "Experiment.num_steps = 1\n", metrics_of(metrics, str(path)), events, facts)


def _changed(run, change):
    """The run with each record changed by a function, which returns what it becomes."""
    records = [change(record) for record in run.metrics]
    return dataclasses.replace(run, metrics=metrics_of(records, str(run.path)))


@pytest.fixture
def make_run():
    return _make_run


@pytest.fixture(scope="session")
def changed():
    return _changed


def _planned(failed, moved=()):
    """An event with the plan for some failed workers, as a run writes it."""
    problem = after_moves(dataclasses.replace(_PROBLEM, failed=frozenset(failed)), moved)
    plan = lockstep(normalize(problem).problem)
    names, positions = [f"{d}:{p}" for d, p in failed], ChunkAssignment(moves=moved).positions
    return {"event": "plan", "failed": names, "positions": positions, "plan": plan_document(plan)}


def _events_of(*told):
    """Events a minute apart."""
    return [{"time": f"2025-01-01T00:{minute:02}:00+00:00", **event} for minute, event in enumerate(told)]


def _failing(**shape):
    """40 iterations of 3 pipelines of 2 stages: 2:1 fails after 10 and is back after 30; two experts a checkpoint."""
    run = _make_run(num_steps=40, **shape)
    change = {"plan_ms": 1.0, "compile_ms": 2000.0, "move_ms": 3.0, "prepared": False}
    events = _events_of(
        {"event": "start", "step": 0, "failed": [], "pipelines": 3, "stages": 2, "ranks": 1},
        _planned([]) | {"step": 0},
        {"event": "reconfigure", "step": 11, "failed": ["2:1"], "rejoined": [], **change},
        _planned([(2, 1)]) | {"step": 11},
        {"event": "reconfigure", "step": 31, "failed": [], "rejoined": ["2:1"], **change},
        _planned([]) | {"step": 31},
        {"event": "finish", "step": 40},
    )

    def timed(record):
        step = record["step"]
        seconds = 2 * step + (100 if step > 10 else 0) + (100 if step > 30 else 0)
        time = f"2025-01-01T00:{seconds // 60:02}:{seconds % 60:02}+00:00"
        return record | {"time": time, "period_ratio": 1.5 if 10 < step <= 30 else 1}

    return dataclasses.replace(_changed(run, timed), events=events)


@pytest.fixture(scope="session")
def planned():
    """Makes an event with the plan for some failed workers."""
    return _planned


@pytest.fixture(scope="session")
def events_of():
    """Gives events the times of a minute after the other."""
    return _events_of


@pytest.fixture
def failing():
    """A run with a failure and a return."""
    return _failing()


@pytest.fixture(scope="session")
def failing_runs():
    """Two runs of different policies with the same failure."""
    return [_failing(), _failing(path="runs/static", policy="static", seed=1)]


@pytest.fixture(scope="session")
def checkpointed():
    """The same with three checkpoints, two of them of some experts."""
    run = _failing()
    saves = [{"event": "checkpoint", "step": 10, "experts": "all", "experts_per_layer": 8, "bytes": 3e6, "plt": 0.0}]
    for step, experts in ((20, [[0, 1], [2, 3]]), (40, [[2, 3], [4, 5]])):
        facts = {
            "experts": experts,
            "experts_per_layer": 2,
            "bytes": 1e6,
            "stall_ms": 4.0,
            "save_ms": 900.0,
            "plt": 0.0,
        }
        saves.append({"event": "checkpoint", "step": step, **facts})
    later = [event | {"time": f"2025-01-01T00:05:{20 * n:02}+00:00"} for n, event in enumerate(saves)]
    return dataclasses.replace(run, events=[*run.events[:-1], *later, run.events[-1]])
