"""``Packed`` beside EPLB's rule, the largest load of a rank and the time of a call; other rules after a drift.

All rules but our own are written anew from their descriptions, in ``eplb.py`` and ``peer_rules.py``. Times are
CPU-seconds of calls that take turns, each for the same few layers: one call of our compiled program, and EPLB's rule
layer by layer, in NumPy. A drift of 30 % multiplies each expert's load by a log-normal number of that deviation after
the placement was made; rules that decide after routing see the loads that they serve.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from eplb import eplb, largest_rank_load
from measure import publish
from peer_rules import home_ranks, ultraep, waterfilling
from placement_loads import KINDS, drawn, recorded

from swift.experts.capacity.exact import assign_slots
from swift.experts.placement.library import place_experts, rank_loads
from swift.experts.placement.packed import Packed
from swift.experts.placement.policy import PlacementPolicy, Static
from swift.experts.placement.symi import Symi

LAYERS = 8
"""Number of layers that a call places."""
RANKS_OF_NODE = 8
SHAPES = [  # ranks, experts, slots of a rank
    *((8, 8, 1), (8, 8, 2), (8, 8, 4), (8, 12, 3), (8, 32, 5), (8, 64, 8)),
    *((16, 16, 2), (16, 24, 2), (16, 64, 5), (16, 128, 8)),
    *((32, 32, 2), (32, 64, 3), (32, 128, 5), (32, 256, 8)),
    *((64, 64, 2), (64, 128, 3), (64, 256, 5), (64, 384, 7)),
    *((128, 128, 2), (128, 256, 3), (128, 512, 5)),
    *((256, 256, 2), (256, 512, 3), (256, 512, 8)),
]
RECORDED_SHAPES = [(8, 8, 2), (8, 8, 4), (8, 8, 5)]
DRIFT_SHAPES = [(8, 8, 4), (8, 64, 10), (16, 24, 3), (32, 64, 3), (64, 256, 5)]
DRIFTS = (0.0, 0.1, 0.3)
WATERFILLING_CAPACITY = 1.05
place = jax.jit(Packed())
assign = jax.jit(assign_slots, static_argnums=(1, 2))


def compare(shape: tuple[int, int, int], loads_XE: np.ndarray) -> dict[str, list[float]]:
    """Computes ratios to EPLB: largest rank loads with its global and its hierarchical policy, and call times."""
    ranks, classes, slots = shape
    start_LNS = np.asarray(Packed().init(LAYERS, classes, ranks, slots)[0])
    jax.block_until_ready(place(loads_XE[:LAYERS], start_LNS, ()))
    found: dict[str, list[float]] = {"load": [], "hierarchical": [], "packed_us": [], "eplb_us": []}
    for loads_LE in loads_XE.reshape(-1, LAYERS, classes):
        ours, seconds = timed(lambda loads_LE: np.asarray(place(loads_LE, start_LNS, ())[0]), loads_LE)
        theirs, eplb_seconds = timed(lambda loads_LE: [eplb(load_E, ranks, slots) for load_E in loads_LE], loads_LE)
        found["packed_us"].append(seconds / LAYERS * 1e6)
        found["eplb_us"].append(eplb_seconds / LAYERS * 1e6)
        for load_E, own, other in zip(loads_LE, ours, theirs, strict=True):
            most = largest_rank_load(load_E, own)
            found["load"].append(most / largest_rank_load(load_E, other))
            nodes = ranks // RANKS_OF_NODE
            if nodes > 1:
                by_node = eplb(load_E, ranks, slots, nodes, nodes)
                found["hierarchical"].append(most / largest_rank_load(load_E, by_node))
    return found


def timed(rule: Callable[[np.ndarray], Any], loads_LE: np.ndarray) -> tuple[Any, float]:
    """Computes placements with a rule; returns them and the CPU-seconds taken."""
    began = time.process_time()
    result = rule(loads_LE)
    return result, time.process_time() - began


def ratios(values: list[float]) -> dict[str, Any]:
    """Summarizes ratios to EPLB's largest rank load."""
    return {
        "loads": len(values),
        "median": round(statistics.median(values), 4),
        "mean": round(statistics.mean(values), 4),
        "largest": round(max(values), 4),
        "above_1.005": sum(value > 1.005 for value in values),
    }


def against_eplb(num_loads: int, seed: int) -> dict[str, Any]:
    """Compares all loads of all shapes: ratios by kind of load and by shape, and times by shape."""
    by_kind: dict[str, list[float]] = {kind: [] for kind in (*KINDS, "recorded")}
    hierarchical: list[float] = []
    by_shape, of_demo = [], recorded()
    cases = [(kind, shape) for shape in SHAPES for kind in KINDS] + [("recorded", shape) for shape in RECORDED_SHAPES]
    found = {}
    for kind, shape in cases:
        loads_XE = of_demo if kind == "recorded" else drawn(kind, num_loads, shape[1], shape[0], seed)
        found[kind, shape] = compare(shape, loads_XE)
        by_kind[kind] += found[kind, shape]["load"]
        hierarchical += found[kind, shape]["hierarchical"]
    for shape in SHAPES:
        of_shape = [figures for (_, other), figures in found.items() if other == shape]
        packed_us, eplb_us = ([us for one in of_shape for us in one[name]] for name in ("packed_us", "eplb_us"))
        by_shape.append(
            dict(zip(("ranks", "experts", "slots_per_rank"), shape, strict=True))
            | ratios([value for one in of_shape for value in one["load"]])
            | {
                "packed_us": round(statistics.median(packed_us), 1),
                "eplb_us": round(statistics.median(eplb_us), 1),
                "time_over_eplb": round(statistics.median(a / b for a, b in zip(packed_us, eplb_us, strict=True)), 3),
            }
        )
    return {
        "over_eplb": ratios([value for values in by_kind.values() for value in values]),
        "over_eplb_by_kind": {kind: ratios(values) for kind, values in by_kind.items()},
        "over_eplb_by_shape": by_shape,
        "over_hierarchical_eplb": ratios(hierarchical),
    }


def placed_before(load_E: np.ndarray, ranks: int, slots: int) -> dict[str, np.ndarray]:
    """Computes placements with the rules that see the load only before it drifts."""
    policies: dict[str, PlacementPolicy] = {"static": Static(), "symi": Symi(), "packed": Packed()}
    ours = {name: place_experts(load_E, ranks, slots, policy)[0] for name, policy in policies.items()}
    return ours | {"eplb": eplb(load_E, ranks, slots)}


def served(load_E: np.ndarray, placements: dict[str, np.ndarray], ranks: int, slots: int) -> dict[str, float]:
    """Computes, for each rule, the largest rank load over the mean, and the share of tokens that waterfilling drops."""
    mean, classes = load_E.sum() / ranks, len(load_E)
    found = {name: largest_rank_load(load_E, placement) / mean for name, placement in placements.items()}
    for name in ("eplb", "packed"):
        found[f"{name}, best split"] = float(rank_loads(load_E, placements[name][None]).max()) / mean
    found["ultraep"] = ultraep(load_E, ranks, slots).sum(axis=1).max() / mean
    _, tokens_NS = assign(load_E.astype(np.int32), ranks, slots)
    found["exact"] = np.asarray(tokens_NS).sum(axis=1).max() / mean
    home_E = home_ranks(classes, ranks)
    kept_E = waterfilling(load_E, ranks, int(np.ceil(WATERFILLING_CAPACITY * mean)))
    found["no copies"] = np.bincount(home_E, load_E, ranks).max() / mean
    found["waterfilling"] = np.bincount(home_E, kept_E, ranks).max() / mean
    found["waterfilling_drops"] = 1 - kept_E.sum() / load_E.sum()
    return {name: float(value) for name, value in found.items()}


def drifting(num_loads: int, seed: int) -> dict[str, Any]:
    """Measures the largest rank load over the mean, by drift and rule: mean and maximum over all shapes and loads."""
    random = np.random.default_rng(seed)
    rows: dict[float, list[dict[str, float]]] = {drift: [] for drift in DRIFTS}
    for ranks, classes, slots in DRIFT_SHAPES:
        for kind in KINDS:
            for load_E in drawn(kind, num_loads, classes, ranks, seed + 1):
                placements = placed_before(load_E, ranks, slots)
                for drift in DRIFTS:
                    later_E = np.rint(load_E * random.lognormal(0, drift, classes)).astype(int)
                    rows[drift].append(served(later_E, placements, ranks, slots))
    return {
        "loads": len(rows[0.0]),
        "by_drift": {f"{drift:g}": {name: spread(found, name) for name in found[0]} for drift, found in rows.items()},
    }


def spread(rows: list[dict[str, float]], name: str) -> dict[str, float]:
    """Computes the mean and the maximum of a rule's figures."""
    values = [row[name] for row in rows]
    return {"mean": round(statistics.mean(values), 4), "largest": round(max(values), 4)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--loads", type=int, default=88, help=f"of a kind and shape, {LAYERS} a call (default: %(default)s)"
    )
    parser.add_argument("--drifting", type=int, default=12, help="loads of a kind and shape (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.loads < LAYERS or options.loads % LAYERS:
        parser.error(f"--loads {options.loads}: must be a multiple of {LAYERS}")
    figures = against_eplb(options.loads, options.seed)
    over, by_shape = figures["over_eplb"], figures["over_eplb_by_shape"]
    claims = {
        "largest rank load over EPLB's, every load": (over["largest"], 1.005),
        "largest rank load over EPLB's, mean": (over["mean"], 1.0),
        "time over EPLB's, the slowest shape": (max(shape["time_over_eplb"] for shape in by_shape), 1.0),
    }
    figures |= {"seed": options.seed, "drifting": drifting(options.drifting, options.seed)}
    return publish("packed replicas beside EPLB's, and other rules after a drift", figures, claims)


if __name__ == "__main__":
    sys.exit(main())
