"""Capacity by rank and packed replicas against SYMI: drops by cause, bytes, FLOPs, CPU-seconds; packing against EPLB.

Runs ``experiments/symi/demo/static.gin`` and ``experiments/beyond/*.gin`` to their end, 300 iterations each, then times
iterations that take turns in one process. ``--parts`` selects some of it.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from eplb import eplb, largest_rank_load
from jax import lax
from jax.extend.core import JaxprEqn
from measure import Trainee, cost_of, demo, median, paired_costs, publish, ratio

from swift.config.gin_reader import load_experiment
from swift.config.stored import config_text
from swift.experts.capacity.rank import admit_tokens
from swift.experts.config import ExactCapacity, ExpertConfig, RankCapacity
from swift.experts.placement.packed import MinMax, Packed
from swift.experts.placement.symi import Symi
from swift.jaxprs import total
from swift.mesh.hlo_collectives import collective_bytes
from swift.mesh.per_rank import SHARED
from swift.pipeline.split_backward.equations import dot_flops
from swift.report.compare import comparison_rows
from swift.runlog.reading import Run, read_run
from swift.train.start import TrainOptions
from swift.train.trainer import train

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
COLUMNS = {"static": "symi/demo/static"} | {
    name: f"beyond/{name}"
    for name in (
        *("symi", "packed_slot", "symi_rank_even"),
        *("packed_rank_even", "packed_rank_spare2", "packed_rank_spare8", "packed_rank_best"),
    )
}
BEST = "packed_rank_spare8"
SPLITS_PER_CALL = 200
DEMO_SEQUENCES, PAPER_SEQUENCES = 16, 128  # 256 tokens per rank, and the 2,048 of SYMI's evaluation
SHAPES = [(8, 8, 4), (16, 16, 4), (64, 8, 12), (128, 16, 12)]  # experts, ranks, slots of a rank


def run(name: str, directory: Path, seed: int) -> Run:
    """Trains the run for one column of the table."""
    experiment = load_experiment(
        EXPERIMENTS / f"{COLUMNS[name]}.gin", ["CheckpointConfig.every=0", f"Experiment.seed={seed}"]
    )
    train(experiment, TrainOptions(directory / name, config_text(experiment)))
    return read_run(directory / name)


def drops(seed: int) -> tuple[dict[str, Any], dict[str, tuple[float, float]], list[np.ndarray]]:
    """Collects each column's drops by cause and losses, the claims about them, and the loads of SYMI's run."""
    with tempfile.TemporaryDirectory() as directory:
        runs = {name: run(name, Path(directory), seed) for name in COLUMNS}
        rows = {name: comparison_rows([one])[0] | causes(one) for name, one in runs.items()}
        recorded = [np.array(layer) for step in runs["symi"].metrics for layer in step["popularity"]]
    best, symi, static = rows[BEST], rows["symi"], rows["static"]
    claims = {
        "drops over static's": (round(best["dropped_percent"] / static["dropped_percent"], 4), 0.05),
        "drops over symi's": (round(best["dropped_percent"] / symi["dropped_percent"], 4), 0.10),
        "final loss over symi's": (round(best["final_loss"] / symi["final_loss"], 4), 1.0),
    }
    return {"runs": list(rows.values())}, claims, recorded


def causes(one: Run) -> dict[str, float]:
    """Computes dropped tokens by cause, in percent of all tokens."""
    routed, dropped, overflowed = (
        sum(step[name] for step in one.metrics) for name in ("tokens_routed", "tokens_dropped", "tokens_overflowed")
    )
    return {
        "buffer_full_percent": round(100 * overflowed / routed, 4),
        "rank_or_slot_full_percent": round(100 * (dropped - overflowed) / routed, 4),
    }


def trainees(num_sequences: int) -> dict[str, Trainee]:
    """Builds the programs to compare, and runs their first iterations."""
    by_slot, by_rank = demo(Symi(), "decoupled", num_sequences), demo(Packed(), "decoupled", num_sequences)
    made = {
        "symi": Trainee(by_slot),
        "rank_even": Trainee(replace(by_rank, experts=ExpertConfig(capacity=RankCapacity(spare_rounds=0)))),
        "rank_spare8": Trainee(replace(by_rank, experts=ExpertConfig(capacity=RankCapacity(spare_rounds=8)))),
        "rank_best": Trainee(replace(by_rank, experts=ExpertConfig(capacity=RankCapacity(spare_rounds=None)))),
        "exact": Trainee(replace(by_rank, experts=ExpertConfig(capacity=ExactCapacity()))),
    }
    for trainee in made.values():
        for _ in range(16):
            trainee()
    return made


def costs(num_sequences: int, rounds: int) -> dict[str, Any]:
    """Measures CPU-seconds of an iteration and of the split, and reads FLOPs and bytes from the programs."""
    made = trainees(num_sequences)
    measured = paired_costs(dict(made), rounds)
    splits = {
        name: split_cost(made[name]) * made[name].spec.num_moe_layers / statistics.median(measured[name])
        for name in ("rank_spare8", "rank_best")
    }
    flops = {name: iteration_flops(trainee) for name, trainee in made.items()}
    sent = {name: token_bytes(made[name]) for name in ("symi", "rank_spare8")}
    experiment = made["symi"].experiment
    return {
        "tokens_per_rank": experiment.tokens_per_step // experiment.topology.num_expert_ranks,
        "cpu_s": {name: median(values) for name, values in measured.items()},
        "rank_spare8_over_symi": ratio(measured, "rank_spare8", "symi"),
        "rank_even_over_symi": ratio(measured, "rank_even", "symi"),
        "rank_best_over_symi": ratio(measured, "rank_best", "symi"),
        "exact_over_symi": ratio(measured, "exact", "symi"),
        "exact_over_rank_best": ratio(measured, "exact", "rank_best"),
        "split_share": round(splits["rank_spare8"], 5),
        "best_split_share": round(splits["rank_best"], 5),
        "flops_over_symi": round(flops["rank_spare8"] / flops["symi"], 5),
        "exchanged_token_bytes_over_symi": round(sent["rank_spare8"] / sent["symi"], 4),
        "exchanged_bytes": {name: exchanged_bytes(trainee) for name, trainee in made.items()},
    }


def iteration_flops(trainee: Trainee) -> int:
    """Counts the matmul FLOPs of an iteration on one rank; with capacity by rank, for full blocks."""
    return dot_flops(jax.make_jaxpr(trainee.step)(trainee.state, trainee.batches[0]))


def token_bytes(trainee: Trainee) -> int:
    """Counts the bytes of all-to-alls in a compiled iteration, except weights and gradients, equal in all programs."""
    compiled = trainee.step.lower(trainee.state, trainee.batches[0]).compile()
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(trainee.state.slots))
    return collective_bytes(compiled.as_text(), trainee.spec.live.num_ranks)["all-to-all"] - 2 * weights


def exchanged_bytes(trainee: Trainee) -> int:
    """Counts the bytes that a rank sends in all all-to-alls of an iteration, including weights and gradients.

    A loop counts as often as it runs. An exchange in rounds counts as two rounds.
    """

    def of_exchange(equation: JaxprEqn) -> int | None:
        if equation.primitive.name != "all_to_all":
            return None
        return sum(atom.aval.size * atom.aval.dtype.itemsize for atom in equation.invars)

    return total(jax.make_jaxpr(trainee.step)(trainee.state, trainee.batches[0]), of_exchange)


def split_cost(trainee: Trainee) -> float:
    """Measures CPU-seconds of the split of one layer and micro-batch on all ranks, with counts from training."""
    experiment, live = trainee.experiment, trainee.spec.live
    tokens, ranks = experiment.tokens_per_step // live.num_ranks, live.num_ranks
    placement_LNS = np.asarray(trainee.state.placement)[0]
    share_LE = np.asarray(trainee()["popularity"][0, 0]) / (tokens * ranks)
    random = np.random.default_rng(0)
    counts_LNE = np.stack([random.multinomial(tokens, share_E, size=ranks) for share_E in share_LE]).astype(np.int32)

    def many(counts_LNE: jax.Array, placement_LNS: jax.Array) -> jax.Array:
        def one(i: jax.Array, total: jax.Array) -> jax.Array:
            layer = (i + jnp.minimum(total, 0)) % len(counts_LNE)  # so that no split can be hoisted out of the loop
            kept_NDS = admit_tokens(experiment.experts, counts_LNE[layer], placement_LNS[layer], tokens).kept_NDS
            return total + kept_NDS.sum(dtype=jnp.int32) % 2

        return lax.fori_loop(0, SPLITS_PER_CALL, one, jnp.zeros((), jnp.int32))

    run = jax.jit(live.per_rank(many, (SHARED, SHARED), SHARED))
    inputs = live.put((counts_LNE[None], placement_LNS[None]), (SHARED, SHARED))
    jax.block_until_ready(run(*inputs))
    return statistics.median(cost_of(lambda: run(*inputs)) for _ in range(9)) / SPLITS_PER_CALL


def loads(recorded: list[np.ndarray]) -> dict[str, list[tuple[np.ndarray, int, int]]]:
    """Collects expert loads to place, each as (load, ranks, slots per rank), by kind."""
    random, kinds = np.random.default_rng(0), dict[str, list]()
    draw: dict[str, Callable[[int], np.ndarray]] = {
        "random": lambda num_classes: random.integers(0, 10_000, num_classes),
        "zipf": lambda num_classes: random.permutation((1e6 / np.arange(1, num_classes + 1) ** 1.2).astype(int)),
    }
    for kind, one in draw.items():
        kinds[kind] = [(one(E), N, S) for E, N, S in SHAPES for _ in range(25)]
    kinds["recorded"] = [(load_E, 8, 4) for load_E in recorded]
    return {kind: cases for kind, cases in kinds.items() if cases}


def packing(recorded: list[np.ndarray]) -> tuple[dict[str, Any], dict[str, tuple[float, float]]]:
    """Compares the largest rank load with those of EPLB and of expert order; measures the time to place one layer."""
    packed, in_order, figures = jax.jit(Packed()), jax.jit(MinMax()), dict[str, Any]()
    over_eplb, over_order = [], []
    for kind, cases in loads(recorded).items():
        found = []
        for load_E, ranks, slots in cases:
            start = Packed().init(1, len(load_E), ranks, slots)[0]
            popularity_LE = np.asarray(load_E, np.int32)[None]
            placed = [np.asarray(policy(popularity_LE, start, ())[0])[0] for policy in (packed, in_order)]
            ours, order = (largest_rank_load(load_E, placement_NS) for placement_NS in placed)
            theirs = largest_rank_load(load_E, eplb(load_E, ranks, slots))
            if load_E.any():
                found.append((ours / theirs, ours / order, ours / (load_E.sum() / ranks)))
        over_eplb += [row[0] for row in found]
        over_order += [row[1] for row in found]
        names = ("over_eplb", "over_class_order", "over_mean")
        figures[kind] = {
            name: {"median": round(float(np.median(column)), 4), "largest": round(float(np.max(column)), 4)}
            for name, column in zip(names, zip(*found, strict=True), strict=True)
        }
    claims = {
        "largest rank load over EPLB's": (round(max(over_eplb), 4), 1.02),
        "largest rank load over class order's": (round(max(over_order), 6), 1.00001),
    }
    return figures | {"seconds": {str(shape): packing_seconds(*shape) for shape in SHAPES}}, claims


def packing_seconds(num_classes: int, ranks: int, slots: int) -> dict[str, float]:
    """Measures the wall time of placing one layer with our compiled program and with EPLB in NumPy."""
    load_E = np.random.default_rng(0).integers(0, 10_000, num_classes).astype(np.int32)
    start, policy = Packed().init(1, num_classes, ranks, slots)[0], jax.jit(Packed())
    calls = {
        "packed": lambda: jax.block_until_ready(policy(load_E[None], start, ())[0]),
        "eplb": lambda: eplb(load_E, ranks, slots),
    }
    return {name: round(min(wall_time(call) for _ in range(10)), 7) for name, call in calls.items()}


def wall_time(call: Callable[[], Any]) -> float:
    """Measures the duration of one call in seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument(
        "--parts", nargs="+", choices=["drops", "costs", "packing"], default=["drops", "costs", "packing"]
    )
    options = parser.parse_args()
    figures: dict[str, Any] = {"seed": options.seed, "rounds": options.rounds}
    claims: dict[str, tuple[float, float]] = {}
    recorded: list[np.ndarray] = []
    if "costs" in options.parts:
        small, paper = (costs(sequences, options.rounds) for sequences in (DEMO_SEQUENCES, PAPER_SEQUENCES))
        figures |= {"iteration_of_the_demo": small, "iteration_with_the_paper's_tokens_per_rank": paper}
        claims |= {
            "CPU-seconds over symi's": (paper["rank_spare8_over_symi"]["median"], 1.10),
            "CPU-seconds over symi's, demo": (small["rank_spare8_over_symi"]["median"], 1.10),
            "the split's share, demo": (small["split_share"], 0.01),
            "FLOPs over symi's": (paper["flops_over_symi"], 1.02),
            "FLOPs over symi's, demo": (small["flops_over_symi"], 1.02),
            "bytes of exchanged tokens over symi's": (small["exchanged_token_bytes_over_symi"], 1.25),
        }
    if "drops" in options.parts:
        found, on_drops, recorded = drops(options.seed)
        figures, claims = figures | found, claims | on_drops
    if "packing" in options.parts:
        packed, on_packing = packing(recorded)
        figures, claims = figures | {"packing": packed}, claims | on_packing
    return publish("capacity by rank and packed replicas, demo model", figures, claims)


if __name__ == "__main__":
    sys.exit(main())
