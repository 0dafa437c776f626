"""Agents that do not wait for all others end as those that do."""

import numpy as np
import pytest
from agents.order import Barrier, Known, Reach
from agents.simulation import Times, run_town
from agents.town import Town

TIMES = Times(batch=8, decode_s=0.01, read_s=0.0001)


@pytest.fixture(scope="module", params=[0, 1])
def town(request):
    """A town, and its run with a barrier."""
    town = Town(12, request.param)
    town.width = 20  # crowded
    return town, run_town(town, 80, Barrier(), TIMES)


def test_the_outcome_of_every_agent_is_that_of_the_barrier(town):
    rules, expected = town
    assert sum(len(seen) for step in expected.seen for seen in step) > 100
    found = run_town(rules, 80, Reach(), TIMES)
    assert found.states == expected.states
    assert found.seen == expected.seen
    assert found.seconds < expected.seconds
    again = run_town(rules, 80, Reach(), Times(batch=3, decode_s=0.02, read_s=0.001))
    assert again.states == expected.states


def test_the_oracle_is_the_fastest_and_ends_alike(town):
    rules, expected = town
    found = run_town(rules, 80, Known(expected.seen), TIMES)
    assert found.states == expected.states
    assert found.seconds <= run_town(rules, 80, Reach(), TIMES).seconds * 1.01


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
    pairs = [(run_town(town, 80, Barrier(), TIMES), run_town(town, 80, Blind(), TIMES)) for town in towns]
    assert any(one.states != other.states for one, other in pairs)


def test_one_agent_waits_for_nobody():
    found = [run_town(Town(1), 200, rule, TIMES).seconds for rule in (Barrier(), Reach())]
    assert found[0] == found[1] > 0
