"""The prompts of a town put to the generation engine itself."""

import heapq
import time

import numpy as np

from swift.generate.engine import TextEngine
from swift.generate.request import GREEDY, Answer, Request

from .simulation import Calls
from .town import Call

_BASE = 64
"""Prompts are told apart by their first tokens, below this, and are read in the order of their numbers."""


class Asked:
    """A generation engine that answers the prompts of a town: texts of noise, of the lengths that the calls have.

    Attributes:
        now: seconds of the engine's calls so far.
        num_calls: calls so far.
    """

    def __init__(self, engine: TextEngine, seed: int = 0):
        self.now, self.num_calls = 0.0, Calls(0, 0)
        self._engine, self._random = engine, np.random.default_rng(seed)
        self._waiting: list[tuple[int, int, Call]] = []
        self._answers: dict[int, Answer] = {}
        self._number = 0

    def submit(self, step: int, agent: int, call: Call) -> None:
        """Adds a prompt."""
        heapq.heappush(self._waiting, (step, agent, call))

    def advance(self) -> list[int]:
        """Runs until a prompt is answered; returns the agents whose prompts are."""
        while True:
            while self._waiting and len(self._answers) < self._engine.config.batch:
                _, agent, call = heapq.heappop(self._waiting)
                self._answers[agent] = self._engine.submit(Request(self._text(call), call.new_tokens, GREEDY))
            before, begun = self._engine.computed.prompt_tokens, time.perf_counter()
            self._engine.step()
            self.now += time.perf_counter() - begun
            has_read = self._engine.computed.prompt_tokens > before
            self.num_calls = self.num_calls.plus(int(has_read), int(not has_read))
            done = [agent for agent, answer in self._answers.items() if answer.reason is not None]
            for agent in done:
                del self._answers[agent]
            if done:
                return done

    def _text(self, call: Call) -> list[int]:
        self._number += 1
        first = [self._number // _BASE**place % _BASE for place in (2, 1, 0)]
        return [*first, *self._random.integers(0, _BASE, call.prompt_tokens - len(first)).tolist()]
