"""Runs that tests write as training does, without training."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from swift.runlog.run_directory import RunDirectory

CONFIG = "Experiment.num_steps = 40\n"


def record(step: int, num_layers: int = 2, num_classes: int = 4, **more) -> dict:
    """Metrics of a step; the first class of the last layer has half of the tokens."""
    popularity_LE = np.ones((num_layers, num_classes), int)
    popularity_LE[-1, 0] = num_classes - 1
    dropped_LE = np.zeros_like(popularity_LE)
    dropped_LE[-1, 0] = 1
    facts = {"loss": 4.0 - step / 100, "tokens_per_s": 1000.0 + step, "drop_fraction": 0.25, "step_ms": 10.0}
    counts = {"popularity": popularity_LE, "replicas": np.full_like(popularity_LE, 2), "dropped": dropped_LE}
    return {"step": step, **facts, **counts, **more}


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def write(path) -> Callable[..., RunDirectory]:
    """Begins a run, or continues it after a step."""
    opened = []

    def begin(after: int | None = None) -> RunDirectory:
        new = RunDirectory.create(path, CONFIG) if after is None else RunDirectory.resume(path, CONFIG, after)
        opened.append(new)
        return new

    yield begin
    for directory in opened:
        directory.close()
