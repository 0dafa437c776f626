"""Tokens dropped with slots to spare: the demo with capacity by rank, beside the least that any split could drop.

Runs ``experiments/beyond/packed_rank_best.gin`` to its end and takes its loads. For the demo's slots, and for one and
two more on each rank, the placements follow from the loads of the iteration before, and the tokens dropped from the
split; with the demo's slots both have to be those of the run. The least is a linear program on the same placements and
loads, which serves as many tokens as the rows of the ranks hold.
"""

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from children import tell
from measure import publish
from scipy.optimize import linprog
from scipy.sparse import csr_array, vstack

from swift.config.experiment import Experiment
from swift.config.gin_reader import load_experiment
from swift.config.stored import config_text
from swift.experts.capacity.balanced_flow import ReplicaMap, balance, shift_overflow
from swift.experts.config import RankCapacity
from swift.runlog.reading import Run, measure, read_run
from swift.train.start import TrainOptions
from swift.train.trainer import train

FILE = Path(__file__).parent.parent / "experiments" / "beyond" / "packed_rank_best.gin"
SPARE_SLOTS = (0, 1, 2)
POINTS = 0.1
"""Largest distance from the linear program, in percentage points."""


@partial(jax.jit, static_argnums=2)
def split(tokens_E: np.ndarray, placement_NS: np.ndarray, room: int) -> tuple[jax.Array, jax.Array]:
    """The loads of all ranks after the balanced flow alone, and as they are served."""
    holders = ReplicaMap.of(placement_NS)
    balanced_NS = balance(tokens_E, holders)
    return balanced_NS.sum(axis=1), shift_overflow(balanced_NS, room, holders).sum(axis=1)


def placements_of(experiment: Experiment, popularity_TLE: np.ndarray, num_slots: int) -> np.ndarray:
    """Computes the placement of every iteration, int32[T, L, N, S], each from the popularity of the one before."""
    ranks = experiment.topology.num_expert_ranks
    placement_LNS, state = experiment.placement.init(*popularity_TLE.shape[1:], ranks, num_slots)
    place, found = jax.jit(experiment.placement), [placement_LNS]
    for popularity_LE in popularity_TLE[:-1]:
        placement_LNS, state = place(popularity_LE, placement_LNS, state)
        found.append(placement_LNS)
    return np.stack(found)


def least_dropped(tokens_E: np.ndarray, placement_NS: np.ndarray, room: int) -> int:
    """Tokens that no split can serve: the linear program, whose solution is in whole tokens."""
    num_ranks, num_slots = placement_NS.shape
    slots, ones = np.arange(placement_NS.size), np.ones(placement_NS.size)
    of_expert = csr_array((ones, (placement_NS.ravel(), slots)), (len(tokens_E), placement_NS.size))
    of_rank = csr_array((ones, (slots // num_slots, slots)), (num_ranks, placement_NS.size))
    limits = np.concatenate([tokens_E, np.full(num_ranks, room)])
    return int(tokens_E.sum() + round(linprog(-ones, vstack([of_expert, of_rank]), limits, method="highs").fun))


def drops(tokens_E: np.ndarray, placement_NS: np.ndarray, room: int) -> list[int]:
    """Tokens dropped by the balanced flow alone, by the split, and at least."""
    above = [int(np.maximum(np.asarray(load_N) - room, 0).sum()) for load_N in split(tokens_E, placement_NS, room)]
    return [*above, least_dropped(tokens_E, placement_NS, room)]


def judge(experiment: Experiment, found: Run) -> dict[str, Any]:
    """Drops by the number of spare slots, on the loads of a run."""
    popularity_TLE = np.array([step["popularity"] for step in found.metrics], np.int32)
    ranks, routed = experiment.topology.num_expert_ranks, int(popularity_TLE.sum())
    capacity = experiment.experts.capacity
    assert isinstance(capacity, RankCapacity)
    room = capacity.rows_per_rank(experiment.experts, experiment.tokens_per_step // ranks, ranks)
    rows = {}
    for spare in SPARE_SLOTS:
        slots = experiment.experts.slots_per_rank + spare
        placement_TLNS = placements_of(experiment, popularity_TLE, slots)
        cases = zip(
            popularity_TLE.reshape(-1, popularity_TLE.shape[2]), placement_TLNS.reshape(-1, ranks, slots), strict=True
        )
        dropped_XK = np.array([drops(tokens_E, placement_NS, room) for tokens_E, placement_NS in cases])
        if not spare:
            dropped_T = dropped_XK[:, 1].reshape(len(popularity_TLE), -1).sum(axis=1)
            assert dropped_T.tolist() == [step["tokens_dropped"] for step in found.metrics], "not as in the run"
        names = ("balanced_flow_percent", "dropped_percent", "least_percent")
        percents = 100 * dropped_XK.sum(axis=0) / routed
        rows[str(spare)] = {"slots_per_rank": slots} | {
            name: round(float(percent), 4) for name, percent in zip(names, percents, strict=True)
        }
        tell(f"{spare} spare slots: {json.dumps(rows[str(spare)])}")
    return {
        "iterations": len(popularity_TLE),
        "final_loss": round(measure(found, None)["final_loss"], 4),
        "spare": rows,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300, help="iterations of the run (default: %(default)s)")
    options = parser.parse_args()
    changes = {"CheckpointConfig.every": 0, "Experiment.seed": options.seed, "Experiment.num_steps": options.steps}
    experiment = load_experiment(FILE, [f"{name}={value}" for name, value in changes.items()])
    with tempfile.TemporaryDirectory() as directory:
        train(experiment, TrainOptions(Path(directory) / "run", config_text(experiment)))
        figures = judge(experiment, read_run(Path(directory) / "run"))
    claims = {
        f"points above the least, {spare} spare slots": (
            round(row["dropped_percent"] - row["least_percent"], 4),
            POINTS,
        )
        for spare, row in figures["spare"].items()
    }
    return publish("tokens dropped with slots to spare, demo model", {"seed": options.seed, **figures}, claims)


if __name__ == "__main__":
    sys.exit(main())
