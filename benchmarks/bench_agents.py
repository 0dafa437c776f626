"""Agents whose steps are prompts: ahead of those that cannot reach them, against a barrier after every step.

The town is simulated, with the times of the generation engine as measured here; the outcome of every agent is compared.
"""

import statistics
import time
from dataclasses import asdict
from typing import Any

import jax
import numpy as np
from agents.order import Barrier, Known, Reach
from agents.simulation import Times, run_town
from agents.town import Town
from bench_generate import EXPERTS, SHAPE
from measure import publish

from swift.generate import GREEDY, Request, TextEngine, TextEngineConfig
from swift.models import GPT

BATCH, SHARED, OWN, NEW = 64, 256, 64, 24
"""Texts at once; tokens of each that are shared, and not; tokens that are added."""
TOWNS = {25: (500, 1.3), 200: (250, 2.5)}
"""Steps of a town by its agents, and how many times as fast as with a barrier it has to be."""
OF_ORACLE = 0.8


def measured_times() -> Times:
    """Measures the engine: a call that adds a token to every text, and the reading of a token."""
    gpt = GPT(SHAPE, 256, EXPERTS.num_classes)
    engine = TextEngine(
        gpt, EXPERTS, gpt.unpack(jax.jit(gpt.init)(jax.random.key(0))), TextEngineConfig(BATCH, BATCH * 512)
    )
    random = np.random.default_rng(0)
    shared = random.integers(1, 256, SHARED).tolist()
    reading, decoding = [], []
    for number in range(4):
        for _ in range(BATCH):
            engine.submit(Request([*shared, *random.integers(1, 256, OWN).tolist()], NEW, GREEDY))
        while not engine.is_idle:
            before, begun = engine.computed.prompt_tokens, time.perf_counter()
            engine.step()
            jax.effects_barrier()
            spent, read = time.perf_counter() - begun, engine.computed.prompt_tokens - before
            if number:  # the first round compiles
                (reading if read else decoding).append(spent / max(1, read))
    return Times(BATCH, round(statistics.median(decoding), 6), round(statistics.median(reading), 8))


def town_of(num_agents: int, times: Times) -> dict[str, Any]:
    """Runs a town by each rule."""
    town, (num_steps, _) = Town(num_agents), TOWNS[num_agents]
    barrier = run_town(town, num_steps, Barrier(), times)
    ahead, oracle = (run_town(town, num_steps, rule, times) for rule in (Reach(), Known(barrier.seen)))
    return {
        "steps": num_steps,
        "seconds": {
            name: round(run.seconds, 1) for name, run in (("barrier", barrier), ("ahead", ahead), ("oracle", oracle))
        },
        "speed_over_barrier": round(barrier.seconds / ahead.seconds, 3),
        "of_oracle": round(oracle.seconds / ahead.seconds, 3),
        "equal_outcomes": barrier.states == ahead.states == oracle.states,
        "seen_at_once": round(sum(len(one) for step in barrier.seen for one in step) / num_agents / num_steps, 3),
    }


def main() -> int:
    times = measured_times()
    figures: dict[str, Any] = {"times": asdict(times)}
    claims = {}
    for num_agents, (_, least) in TOWNS.items():
        name = f"{num_agents} agents"
        found = figures[name] = town_of(num_agents, times)
        claims[f"{name}, time over the barrier's"] = 1 / found["speed_over_barrier"], 1 / least
        claims[f"{name}, time over the oracle's"] = 1 / found["of_oracle"], 1 / OF_ORACLE
        claims[f"{name}, outcomes that differ"] = float(not found["equal_outcomes"]), 0.0
    return publish("agents", figures, claims)


if __name__ == "__main__":
    raise SystemExit(main())
