"""A town: agents walk between its places, make plans there, and speak with whom they meet.

All that an agent does follows from its own state and from those that it sees, as they are at the same step. Its memory
is a digest of everything that it has ever seen, the memories of others included: two runs in which an agent ends with
the same memory have gone the same way for all that mattered to it.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

Place = tuple[int, int]
RADIUS = 4
"""Distance up to which an agent sees another; a step covers a distance of one, diagonally too."""
SIDE_AGENTS = 25
"""Agents of a part of the town, as in Smallville; a larger town has more such parts."""
SIDE = 100
"""Length and width of such a part."""


@dataclass(frozen=True)
class Call:
    """A prompt: its tokens, without those that it begins with like an earlier one, and those of its answer."""

    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True)
class State:
    """An agent at a step.

    Attributes:
        place: where it is.
        goal: where it goes.
        busy: steps that it stays there.
        known: agents that it saw last.
        memory: digest of all that it has seen.
    """

    place: Place
    goal: Place
    busy: int
    known: frozenset[int]
    memory: bytes


class Town:
    """The rules.

    Args:
        num_agents: number of agents.
        seed: seed of all that is random.
    """

    def __init__(self, num_agents: int, seed: int = 0):
        self.num_agents, self.seed = num_agents, seed
        parts = -(-num_agents // SIDE_AGENTS)
        self.width, self.height = SIDE * parts, SIDE
        chance = random.Random(seed)
        self.places = [self._anywhere(chance) for _ in range(SIDE_AGENTS * parts)]

    def begin(self, agent: int) -> State:
        """The state of an agent before its first step: at home."""
        chance = random.Random(f"{self.seed} {agent}")
        home = self._anywhere(chance)
        return State(home, home, chance.randrange(30), frozenset(), bytes([agent % 256]))

    def act(self, agent: int, step: int, own: State, seen: Sequence[tuple[int, State]]) -> tuple[State, list[Call]]:
        """One step of an agent.

        Args:
            agent: number of the agent.
            step: number of the step.
            own: its state.
            seen: number and state of each other agent within ``RADIUS``, in the order of their numbers.

        Returns:
            (its next state, the prompts that this takes, one after the other).
        """
        text = repr((self.seed, agent, step, own.memory, [(one, state.place, state.memory) for one, state in seen]))
        memory = hashlib.blake2b(text.encode(), digest_size=8).digest()
        chance, calls = random.Random(memory), list[Call]()
        known = frozenset(one for one, _ in seen)
        calls += [Call(40, chance.randrange(10, 40)) for _ in sorted(known - own.known)]
        place, goal, busy = own.place, own.goal, own.busy
        if seen and chance.random() < 0.05:  # a word with whom it sees
            calls.append(Call(60, chance.randrange(20, 120)))
            busy = max(busy, 2)
        if busy:
            busy -= 1
        elif place == goal:
            calls += [Call(80, chance.randrange(40, 200)), Call(40, chance.randrange(10, 60))]
            # Mostly somewhere near; else through the town.
            near = sorted(self.places, key=lambda one: (distance(one, place), one))[1:6]
            goal = chance.choice(near if chance.random() < 0.9 else self.places)
            busy = chance.randrange(10, 60) if goal == place else 0
        else:
            place = _towards(place, goal)
            busy = chance.randrange(10, 60) if place == goal else 0
        return State(place, goal, busy, known, memory), calls

    def _anywhere(self, chance: random.Random) -> Place:
        return chance.randrange(self.width), chance.randrange(self.height)


def distance(one: Place, other: Place) -> int:
    """Steps from one place to another."""
    return max(abs(one[0] - other[0]), abs(one[1] - other[1]))


def _towards(place: Place, goal: Place) -> Place:
    dx, dy = ((goal[axis] > place[axis]) - (goal[axis] < place[axis]) for axis in (0, 1))
    return place[0] + dx, place[1] + dy
