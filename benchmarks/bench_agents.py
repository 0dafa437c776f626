"""Agents whose steps are prompts: running ahead of agents that cannot affect them, against a barrier per step.

The town is simulated call by call, with the generation engine's call times as measured here. The outcomes of all agents
under the two rules are compared.
"""

import time
from dataclasses import asdict
from typing import Any

import jax
import numpy as np
from agents.order import Barrier, Known, Reach
from agents.simulation import Engine, Times, run_town
from agents.town import Town
from bench_generate import EXPERTS, SHAPE
from measure import publish

from swift.generate.engine import TextEngine, TextEngineConfig
from swift.generate.request import GREEDY, Request
from swift.models.gpt import GPT

CONFIG = TextEngineConfig(batch=64, cache_tokens=64 * 512, prefill_passages=8, prefill_length=64)
SHARED, OWN, NEW = 256, 64, 24
"""Shared and unshared tokens of each measured prompt; generated tokens."""
TOWNS = {25: (500, 1.3), 200: (125, 2.5)}
"""Number of steps of a town, and the required speed-up over a barrier, by number of agents."""
OF_ORACLE = 0.8


def measured_times() -> Times:
    """Measures the engine's two kinds of calls; each has a fixed shape, so its duration does not depend on the input.

    The shortest time of each counts, since other load on the machine only adds to it.
    """
    gpt = GPT(SHAPE, 256, EXPERTS.num_classes)
    engine = TextEngine(gpt, EXPERTS, gpt.unpack(jax.jit(gpt.init)(jax.random.key(0))), CONFIG)
    random = np.random.default_rng(0)
    shared = random.integers(1, 256, SHARED).tolist()
    reading, decoding = [], []
    for number in range(4):
        for _ in range(CONFIG.batch):
            engine.submit(Request([*shared, *random.integers(1, 256, OWN).tolist()], NEW, GREEDY))
        while not engine.is_idle:
            before, begun = engine.computed.prompt_tokens, time.perf_counter()
            engine.step()
            jax.effects_barrier()
            spent = time.perf_counter() - begun
            if number:  # the first round compiles
                (reading if engine.computed.prompt_tokens > before else decoding).append(spent)
    sizes = CONFIG.batch, CONFIG.prefill_passages, CONFIG.prefill_length
    return Times(*sizes, *(round(min(spent), 6) for spent in (decoding, reading)))


def town_of(num_agents: int, times: Times) -> dict[str, Any]:
    """Simulates a town under each rule, and compares their times and outcomes."""
    town, (num_steps, _) = Town(num_agents), TOWNS[num_agents]
    engines = {name: Engine(times) for name in ("barrier", "ahead", "oracle")}
    barrier = run_town(town, num_steps, Barrier(), engines["barrier"])
    ahead = run_town(town, num_steps, Reach(), engines["ahead"])
    oracle = run_town(town, num_steps, Known(barrier.seen), engines["oracle"])
    return {
        "steps": num_steps,
        "calls": {name: engine.num_calls._asdict() for name, engine in engines.items()},
        "seconds": {name: round(engine.now, 1) for name, engine in engines.items()},
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
