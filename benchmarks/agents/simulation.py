"""Agents on one engine: each step's prompts are answered one after the other, those of different agents together."""

import heapq
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .order import Rule
from .town import RADIUS, Call, State, Town


@dataclass(frozen=True)
class Times:
    """An engine's times, as measured.

    Attributes:
        batch: prompts that are answered at the same time at most.
        decode_s: seconds of a call that adds a token to each of them.
        read_s: seconds to read a token of a prompt, in which no token is added.
    """

    batch: int
    decode_s: float
    read_s: float


@dataclass(frozen=True)
class Ended:
    """A run that has ended.

    Attributes:
        states: last state of each agent.
        seconds: time that it took.
        seen: agents that each agent saw, by step and agent.
    """

    states: list[State]
    seconds: float
    seen: list[list[list[int]]]


class Engine:
    """Prompts at work, and those that wait: of the agent first that is behind."""

    def __init__(self, times: Times):
        self.now, self._times = 0.0, times
        self._waiting: list[tuple[int, int, Call]] = []
        self._left: dict[int, int] = {}

    def submit(self, step: int, agent: int, call: Call) -> None:
        """Adds a prompt."""
        heapq.heappush(self._waiting, (step, agent, call))

    def advance(self) -> list[int]:
        """Runs until a prompt is answered; returns the agents whose prompts are."""
        while self._waiting and len(self._left) < self._times.batch:
            _, agent, call = heapq.heappop(self._waiting)
            self.now += call.prompt_tokens * self._times.read_s
            self._left[agent] = call.new_tokens
        tokens = min(self._left.values())
        self.now += tokens * self._times.decode_s
        self._left = {agent: left - tokens for agent, left in self._left.items()}
        done = [agent for agent, left in self._left.items() if left == 0]
        for agent in done:
            del self._left[agent]
        return done


def run_town(town: Town, num_steps: int, rule: Rule, times: Times) -> Ended:
    """Runs all agents of a town for a number of steps.

    Args:
        town: the rules of the town.
        num_steps: steps of each agent.
        rule: whose step may be next.
        times: times of the engine.
    """
    return _Run(town, num_steps, rule, times).ended()


class _Run:
    def __init__(self, town: Town, num_steps: int, rule: Rule, times: Times):
        self._town, self._num_steps, self._rule, self._engine = town, num_steps, rule, Engine(times)
        agents = range(town.num_agents)
        self._states = [[town.begin(agent)] for agent in agents]
        self._step_A = np.zeros(town.num_agents, np.int64)
        self._place_A2 = np.array([states[0].place for states in self._states])
        self._place_SA2 = np.zeros((num_steps + 1, town.num_agents, 2), np.int64)
        self._place_SA2[0] = self._place_A2
        self._next: dict[int, State] = {}
        self._calls: dict[int, Iterator[Call]] = {}
        self._blocked: defaultdict[int, list[int]] = defaultdict(list)
        self._seen: list[list[list[int]]] = [[[] for _ in agents] for _ in range(num_steps)]

    def ended(self) -> Ended:
        self._start(list(range(self._town.num_agents)))
        while self._calls:
            for agent in self._engine.advance():
                self._start(self._go_on(agent))
        assert (self._step_A == self._num_steps).all(), "agents wait for each other"
        return Ended([states[-1] for states in self._states], self._engine.now, self._seen)

    def _start(self, agents: list[int]) -> None:
        """Starts the next step of each agent that need not wait, and of all for whom that makes the way free."""
        while agents:
            agent = agents.pop()
            step = int(self._step_A[agent])
            if step == self._num_steps:
                continue
            blocker = self._rule.blocker(agent, self._step_A, self._place_A2)
            if blocker >= 0:
                self._blocked[blocker].append(agent)
                continue
            seen = self._seen[step][agent] = self._seen_by(agent, step)
            known = [(other, self._states[other][step]) for other in seen]
            self._next[agent], calls = self._town.act(agent, step, self._states[agent][step], known)
            self._calls[agent] = iter(calls)
            agents += self._go_on(agent)

    def _go_on(self, agent: int) -> list[int]:
        """Submits the next prompt of an agent's step; after the last one, returns who may now be able to start."""
        call = next(self._calls[agent], None)
        if call is not None:
            self._engine.submit(int(self._step_A[agent]), agent, call)
            return []
        del self._calls[agent]
        state = self._next.pop(agent)
        self._states[agent].append(state)
        self._step_A[agent] += 1
        self._place_A2[agent] = self._place_SA2[self._step_A[agent], agent] = state.place
        return [agent, *self._blocked.pop(agent, [])]

    def _seen_by(self, agent: int, step: int) -> list[int]:
        """The agents within sight at a step; one that is behind is out of reach, or the rule is wrong."""
        there_A = self._step_A >= step
        distance_A = np.abs(self._place_SA2[step] - self._place_SA2[step, agent]).max(axis=1)
        found = np.flatnonzero(there_A & (distance_A <= RADIUS))
        return [other for other in found.tolist() if other != agent]
