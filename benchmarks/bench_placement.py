"""``Packed`` beside EPLB's rule: the largest load of a rank on many loads, and after the popularity has drifted.

Prints JSON. EPLB's rule is written anew from its description, in ``eplb.py``; a drift of 30 % multiplies each expert's
load by a log-normal number of that deviation after the placement was made.
"""

import argparse
import json
import time

import jax
import numpy as np
from eplb import eplb, largest_rank_load

from swift.experts.placement import Packed, rank_loads

SHAPES = [(8, 8, 4), (8, 64, 10), (16, 24, 2), (32, 64, 3), (64, 256, 5)]  # ranks, experts, slots of a rank
DRIFTS = (0.0, 0.1, 0.3)


def draw(random: np.random.Generator, num_classes: int) -> np.ndarray:
    """Loads of the experts of a layer: Dirichlet, Zipf, log-normal or uniform."""
    kind = random.integers(4)
    shares = (
        random.dirichlet(np.full(num_classes, random.choice([0.1, 0.5, 2.0]))),
        random.permutation(1 / np.arange(1, num_classes + 1) ** random.choice([0.5, 1.0, 1.5])),
        random.lognormal(0, 1, num_classes),
        random.random(num_classes),
    )[kind]
    return random.multinomial(100_000, shares / shares.sum()).astype(np.int32)


def measure(shape: tuple[int, int, int], num_loads: int, seed: int) -> dict[str, object]:
    """Both rules on random loads of one shape."""
    ranks, classes, slots = shape
    random = np.random.default_rng(seed)
    loads_XE = np.stack([draw(random, classes) for _ in range(num_loads)])
    place = jax.jit(lambda loads_LE, start_LNS: Packed()(loads_LE, start_LNS, ())[0])
    start_LNS = np.asarray(Packed().init(1, classes, ranks, slots)[0])
    placements = [np.asarray(place(load_E[None], start_LNS))[0] for load_E in loads_XE]
    began = time.process_time()
    for load_E in loads_XE[:100]:
        place(load_E[None], start_LNS).block_until_ready()
    ours_us = (time.process_time() - began) / min(num_loads, 100) * 1e6
    began = time.process_time()
    theirs = [eplb(load_E, ranks, slots) for load_E in loads_XE]
    theirs_us = (time.process_time() - began) / num_loads * 1e6
    both = list(zip(loads_XE, placements, theirs, strict=True))
    ratios = np.array([largest_rank_load(load, own) / largest_rank_load(load, other) for load, own, other in both])
    found: dict[str, object] = {
        "ranks": ranks,
        "experts": classes,
        "slots_per_rank": slots,
        "loads": num_loads,
        "over_eplb_mean": float(ratios.mean()),
        "over_eplb_max": float(ratios.max()),
        "share_above_1.005": float((ratios > 1.005).mean()),
        "packed_us": ours_us,
        "eplb_us": theirs_us,
    }
    for drift in DRIFTS:
        largest: dict[str, list[float]] = {"packed": [], "eplb": [], "packed, best split": []}
        for load, own, other in both[:100]:
            later_E = load * random.lognormal(0, drift, classes)
            mean = later_E.sum() / ranks
            largest["packed"].append(largest_rank_load(later_E, own) / mean)
            largest["eplb"].append(largest_rank_load(later_E, other) / mean)
            largest["packed, best split"].append(float(rank_loads(later_E, own[None]).max()) / mean)
        found[f"largest_over_mean_drift_{drift:g}"] = {name: float(np.mean(some)) for name, some in largest.items()}
    return found


def main() -> None:
    """Prints the results of all shapes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loads", type=int, default=2000, help="of each shape (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(json.dumps([measure(shape, options.loads, options.seed) for shape in SHAPES], indent=2))


if __name__ == "__main__":
    main()
