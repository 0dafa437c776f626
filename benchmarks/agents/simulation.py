"""Agents on one engine: each step's prompts are answered one after the other, those of different agents together."""

import heapq
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from .order import Rule
from .town import RADIUS, Call, State, Town


@dataclass(frozen=True)
class Times:
    """An engine's sizes, and the times of its two calls as measured; a call takes as long however much it has to do.

    Attributes:
        batch: prompts that are answered at the same time at most.
        passages: passages of a call that reads.
        passage_length: tokens of a passage at most; a longer prompt takes several.
        decode_s: seconds of a call that adds a token to each prompt that is read.
        read_s: seconds of a call that reads, and adds the first token to what it has read to the end.
    """

    batch: int
    passages: int
    passage_length: int
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


class Calls(NamedTuple):
    """Calls of the model."""

    reading: int
    decoding: int

    def plus(self, reading: int, decoding: int) -> "Calls":
        """Adds calls."""
        return Calls(self.reading + reading, self.decoding + decoding)


class AnyEngine(Protocol):
    """An engine that answers prompts, simulated or real."""

    @property
    def now(self) -> float:
        """Seconds so far."""

    def submit(self, step: int, agent: int, call: Call) -> None:
        """Adds a prompt of an agent's step."""

    def advance(self) -> list[int]:
        """Runs until a prompt is answered; returns the agents whose prompts are."""


class Engine:
    """The generation engine, call by call, without a model; of the prompts that wait, that of who is behind is first.

    Attributes:
        num_calls: calls so far.
    """

    def __init__(self, times: Times):
        self.num_calls, self._times = Calls(0, 0), times
        self._waiting: list[tuple[int, int, Call]] = []
        self._unread: dict[int, int] = {}
        self._left: dict[int, int] = {}

    @property
    def now(self) -> float:
        """Seconds so far."""
        return self.num_calls.reading * self._times.read_s + self.num_calls.decoding * self._times.decode_s

    def submit(self, step: int, agent: int, call: Call) -> None:
        """Adds a prompt."""
        heapq.heappush(self._waiting, (step, agent, call))

    def advance(self) -> list[int]:
        """Runs until a prompt is answered; returns the agents whose prompts are."""
        while True:
            while self._waiting and len(self._left) < self._times.batch:
                _, agent, call = heapq.heappop(self._waiting)
                self._unread[agent] = -(-call.prompt_tokens // self._times.passage_length)
                self._left[agent] = call.new_tokens
            served = self._read() if self._unread else self._decode()
            done = [agent for agent in served if self._left[agent] == 0]
            for agent in done:
                del self._left[agent]
            if done:
                return done

    def _read(self) -> list[int]:
        """Reads passages in the order of the prompts; those read to the end have their first token."""
        self.num_calls = self.num_calls.plus(1, 0)
        room, read = self._times.passages, []
        for agent, passages in list(self._unread.items()):
            taken = min(room, passages)
            room, self._unread[agent] = room - taken, passages - taken
            if taken == passages:
                del self._unread[agent]
                self._left[agent] -= 1
                read.append(agent)
            if room == 0:
                break
        return read

    def _decode(self) -> list[int]:
        """Adds as many tokens to all as the first that ends has left."""
        tokens = min(self._left.values())
        self.num_calls = self.num_calls.plus(0, tokens)
        self._left = {agent: left - tokens for agent, left in self._left.items()}
        return list(self._left)


def run_town(town: Town, num_steps: int, rule: Rule, engine: AnyEngine) -> Ended:
    """Runs all agents of a town for a number of steps.

    Args:
        town: the rules of the town.
        num_steps: steps of each agent.
        rule: whose step may be next.
        engine: engine that answers the prompts.
    """
    return _Run(town, num_steps, rule, engine).ended()


class _Run:
    def __init__(self, town: Town, num_steps: int, rule: Rule, engine: AnyEngine):
        self._town, self._num_steps, self._rule, self._engine = town, num_steps, rule, engine
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
