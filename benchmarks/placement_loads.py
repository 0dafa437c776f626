"""Loads of experts to place: drawn by seed, or those of the demo's first iterations."""

from collections.abc import Callable

import numpy as np
from measure import Trainee, demo

from swift.experts.placement.packed import Packed

TOKENS_PER_RANK = (32, 256, 4096)
RECORDED_ITERATIONS = 32

Shares = Callable[[np.random.Generator, int], np.ndarray]


def _one_hot(random: np.random.Generator, num_classes: int) -> np.ndarray:
    share_E = np.ones(num_classes)
    share_E[random.integers(num_classes)] = num_classes * random.choice([0.5, 1.0, 4.0])
    return share_E


def _with_empty(random: np.random.Generator, num_classes: int) -> np.ndarray:
    share_E = random.random(num_classes) * (random.random(num_classes) < 0.5)
    share_E[random.integers(num_classes)] += 0.1
    return share_E


KINDS: dict[str, Shares] = {
    "Zipf": lambda random, num: random.permutation(1 / np.arange(1, num + 1) ** random.choice([0.3, 0.6, 0.9, 1.2, 2])),
    "Dirichlet": lambda random, num: random.dirichlet(np.full(num, random.choice([0.05, 0.2, 0.5, 1, 3]))),
    "log-normal": lambda random, num: random.lognormal(0, random.choice([0.3, 1, 2]), num),
    "one hot expert": _one_hot,
    "empty experts": _with_empty,
}


def drawn(kind: str, num_loads: int, num_classes: int, num_ranks: int, seed: int) -> np.ndarray:
    """Draws loads of one kind, int32[X, E], of few or of many tokens: with few, experts tie."""
    random = np.random.default_rng([seed, list(KINDS).index(kind), num_classes, num_ranks])
    loads = []
    for _ in range(num_loads):
        share_E = KINDS[kind](random, num_classes)
        loads.append(random.multinomial(num_ranks * random.choice(TOKENS_PER_RANK), share_E / share_E.sum()))
    return np.array(loads, np.int32)


def recorded() -> np.ndarray:
    """The loads of all layers of the demo, trained for some iterations, int32[X, 8]."""
    trainee = Trainee(demo(Packed(), "decoupled"))
    found = [np.asarray(trainee()["popularity"]) for _ in range(RECORDED_ITERATIONS)]
    return np.concatenate([popularity.reshape(-1, popularity.shape[-1]) for popularity in found]).astype(np.int32)
