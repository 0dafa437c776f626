"""Agents that do not wait for all others end as those that do."""

import json
from dataclasses import replace
from pathlib import Path

import bench_agents
import jax
import numpy as np
import pytest
from agents.asking import Asked
from agents.order import Barrier, Known, Reach
from agents.simulation import Engine, Times, run_town
from agents.town import Town

from swift.experts.config import ExpertConfig
from swift.generate.engine import TextEngine, TextEngineConfig
from swift.models.config import ModelConfig
from swift.models.gpt import GPT

TIMES = Times(batch=8, passages=4, passage_length=64, decode_s=0.01, read_s=0.03)
KEPT = json.loads((Path(__file__).parents[2] / "experiments" / "results" / "agents.json").read_text())


@pytest.fixture(scope="module", params=[0, 1])
def town(request):
    """A town, and its run with a barrier."""
    town = Town(12, request.param)
    town.width = 20  # crowded
    return town, run_town(town, 80, Barrier(), Engine(TIMES))


def test_the_outcome_of_every_agent_is_that_of_the_barrier(town):
    rules, expected = town
    assert sum(len(seen) for step in expected.seen for seen in step) > 100
    found = run_town(rules, 80, Reach(), Engine(TIMES))
    assert found.states == expected.states
    assert found.seen == expected.seen
    assert found.seconds < expected.seconds
    again = run_town(rules, 80, Reach(), Engine(replace(TIMES, batch=3, passages=1)))
    assert again.states == expected.states


def test_the_oracle_is_the_fastest_and_ends_alike(town):
    rules, expected = town
    found = run_town(rules, 80, Known(expected.seen), Engine(TIMES))
    assert found.states == expected.states
    assert found.seconds <= run_town(rules, 80, Reach(), Engine(TIMES)).seconds * 1.01


class Blind(Reach):
    """A rule that looks one step less far than it has to."""

    def blocker(self, agent, step_A, place_A2):
        behind_A = step_A[agent] - step_A
        distance_A = np.abs(place_A2 - place_A2[agent]).max(axis=1)
        found = np.flatnonzero((behind_A > 1) & (distance_A <= behind_A))
        return int(found[0]) if found.size else -1


def test_a_rule_that_lets_agents_go_too_soon_is_seen():
    towns = [Town(12, seed) for seed in range(2)]
    for town in towns:
        town.width = 20
    pairs = [
        (run_town(town, 80, Barrier(), Engine(TIMES)), run_town(town, 80, Blind(), Engine(TIMES))) for town in towns
    ]
    assert any(one.states != other.states for one, other in pairs)


def test_one_agent_waits_for_nobody():
    found = [run_town(Town(1), 200, rule, Engine(TIMES)).seconds for rule in (Barrier(), Reach())]
    assert found[0] == found[1] > 0


@pytest.mark.parametrize(
    ("rule", "batch"),
    [
        (Reach(), 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(Barrier(), 2), (Barrier(), 8), (Reach(), 8)]),
    ],
)
def test_the_simulated_engine_makes_the_calls_of_the_real_one(rule, batch):
    """Call for call, with as many agents as texts at once and with more."""
    town = Town(8)
    town.width = 20
    config = ModelConfig(num_layers=1, model_dim=4, num_heads=1, ffn_dim=4, sequence_length=300, moe_pattern=(True,))
    gpt = GPT(config, 64, 2)
    weights = gpt.unpack(gpt.init(jax.random.key(0)))
    sizes = TextEngineConfig(batch, batch * 300, TIMES.passages, TIMES.passage_length)
    real = Asked(TextEngine(gpt, ExpertConfig(num_classes=2), weights, sizes))
    simulated = Engine(replace(TIMES, batch=batch))
    expected, found = (run_town(town, 12, rule, engine) for engine in (simulated, real))
    assert found.states == expected.states
    assert real.num_calls == simulated.num_calls
    assert min(real.num_calls) > 10


@pytest.mark.parametrize("num_agents", bench_agents.TOWNS)
def test_the_kept_result_holds(num_agents):
    """The claims, of the calls of each rule and the times that a call took."""
    found, times = KEPT[f"{num_agents} agents"], KEPT["times"]
    seconds = {
        rule: calls["reading"] * times["read_s"] + calls["decoding"] * times["decode_s"]
        for rule, calls in found["calls"].items()
    }
    _, least = bench_agents.TOWNS[num_agents]
    assert seconds["barrier"] / seconds["ahead"] >= least
    assert seconds["oracle"] / seconds["ahead"] > bench_agents.OF_ORACLE
    assert found["speed_over_barrier"] == round(seconds["barrier"] / seconds["ahead"], 3)
    assert found["of_oracle"] == round(seconds["oracle"] / seconds["ahead"], 3)
    assert found["equal_outcomes"]


@pytest.mark.slow
@pytest.mark.parametrize("num_agents", bench_agents.TOWNS)
def test_the_kept_result_is_that_of_the_town(num_agents):
    """The same calls on any machine: they depend on the town, the rule and the engine's sizes."""
    found = bench_agents.town_of(num_agents, Times(**KEPT["times"]))
    assert found == KEPT[f"{num_agents} agents"]
