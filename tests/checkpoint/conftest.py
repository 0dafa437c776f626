"""A run in small: two stages of two MoE layers on two ranks, whose state changes at random with every iteration."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from swift.checkpoint.config import CheckpointConfig
from swift.checkpoint.manifest import Ledger
from swift.checkpoint.reader import load_plan, plan_restore, record_restore
from swift.checkpoint.units import StateSplit
from swift.checkpoint.writer import save_checkpoint
from swift.mesh.per_rank import RANKED, SHARED

STAGES, LAYERS, RANKS, CLASSES, SIZE = 2, 2, 2, 4, 5
SPECS = {"step": SHARED, "master": RANKED, "moments": RANKED}
IDENTITY = {"ModelConfig": "small"}


def first_state(size=SIZE):
    """Makes a state before the first iteration: master weights, and a moment of another type."""
    shapes = {"head": (STAGES, 1, RANKS, 1, 3), "expert": (STAGES, LAYERS, RANKS, CLASSES, size)}
    groups = [{name: np.zeros(shape, dtype) for name, shape in shapes.items()} for dtype in ("float32", "float64")]
    return {"step": np.zeros(STAGES, np.int32), "master": groups[0], "moments": groups[1]}


def after_step(state, random):
    """One iteration changes every number."""

    def move(group):
        return {name: (leaf + random.normal(size=leaf.shape)).astype(leaf.dtype) for name, leaf in group.items()}

    return {"step": state["step"] + 1, "master": move(state["master"]), "moments": move(state["moments"])}


def class_of(state, layer, class_):
    """All numbers of an expert."""
    stage, row = divmod(layer, LAYERS)
    return [state[group]["expert"][stage, row, :, class_].copy() for group in ("master", "moments")]


@dataclass
class SmallRun:
    """A run that can be lost.

    Attributes:
        directory: of its checkpoints.
        config: which it makes.
        state, ledger: now.
        records: as in metrics.jsonl.
        saved, chosen: by iteration, the state that was saved, and which experts of it.
        losses: by iteration, the validation loss of those that are evaluated.
    """

    directory: Path
    config: CheckpointConfig
    split: StateSplit
    state: dict
    ledger: Ledger
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    records: list = field(default_factory=list)
    saved: dict = field(default_factory=dict)
    chosen: dict = field(default_factory=dict)
    losses: dict = field(default_factory=dict)

    @property
    def step(self):
        return int(self.state["step"][0])

    def run(self, last, full=False):
        """Iterations up to the last, and the checkpoints that are due."""
        while self.step < last:
            self.state = after_step(self.state, self.random)
            popularity = self.random.integers(0, 50, (STAGES * LAYERS, CLASSES))
            dropped = self.random.integers(0, popularity + 1)
            self.records.append({"popularity": popularity.tolist(), "dropped": dropped.tolist()})
            self.ledger = self.ledger.counted(popularity, dropped)
            if self.step % self.config.every == 0:
                self.save(full=full)
        return self

    def save(self, full=False):
        chosen = self.ledger.choose(self.config.selection, full=full)
        snapshot = self.split.host_snapshot(self.state, chosen)
        validation = {"step": self.step, "loss": self.losses[self.step]} if self.step in self.losses else None
        extra = {"next": self.step} | ({} if validation is None else {"validation": validation})
        options = {"identity": IDENTITY, "extra": extra, "num_kept": self.config.num_kept}
        options["num_best"] = self.config.num_best
        manifest = save_checkpoint(self.directory, self.step, snapshot, self.split, self.ledger, **options)
        self.ledger, self.saved[self.step] = manifest.ledger, self.state
        self.chosen[self.step] = manifest.chosen
        return manifest

    def lose_all(self):
        """The process is gone; what is on the disk is restored."""
        plan = plan_restore(self.directory, IDENTITY)
        self.state = load_plan(self.directory, plan, self.split)
        self.ledger = plan.ledger(self.config.first_k(CLASSES), self.config.plt_budget)
        del self.records[plan.step :]
        record_restore(self.directory, plan.manifest, self.ledger)
        return plan


@pytest.fixture
def small_run(tmp_path):
    """Makes a run."""

    def make(size=SIZE, **config):
        config = CheckpointConfig(**{"every": 2} | config)
        state = first_state(size)
        split = StateSplit(state, SPECS, has_classes=True)
        first = Ledger.first(split.num_layers, split.num_classes, config.first_k(CLASSES))
        return SmallRun(tmp_path / "checkpoints", config, split, state, first)

    return make


@pytest.fixture(scope="session")
def expert_of():
    """All numbers of an expert in a state."""
    return class_of
