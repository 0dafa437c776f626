"""Requests to the engine, and their answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from swift.generate.sampling import Sampling

Reason = Literal["length", "stop", "end", "cancelled", "failed"]
"""End of an answer: as many tokens as asked for, a stop token, nothing allowed after it, at the caller's
wish, or because its constraint raised an error."""


class Constraint(Protocol):
    """Tokens that may come next, as the text grows. It belongs to one request."""

    def allowed(self) -> np.ndarray | None:
        """Tells which tokens may come next, bool[V], none of them at the end; None: all."""

    def accept(self, token: int) -> None:
        """Adds a token that was allowed."""


@dataclass(frozen=True, eq=False)
class Request:
    """A text to continue, or to score.

    Attributes:
        tokens: the text, at least one token.
        max_tokens: tokens to add at most; 0 to score only.
        sampling: choice of the tokens.
        stop_tokens: tokens at which the answer ends; they are part of it.
        constraint: tokens that are allowed; None: all.
        scored_from: number of the first token of the text whose log-probability is wanted; None: of none.
    """

    tokens: Sequence[int]
    max_tokens: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    stop_tokens: frozenset[int] = frozenset()
    constraint: Constraint | None = None
    scored_from: int | None = None


@dataclass(eq=False)
class Answer:
    """The tokens that continue a text, as far as they are there.

    Attributes:
        request: what was asked for.
        tokens: new tokens.
        log_probs: log-probability of each, whatever its temperature.
        text_log_probs: log-probability of every token of the text from ``scored_from`` on.
        is_likeliest: whether each of these was the likeliest token.
        reason: why it ended; None before.
        error: what its constraint raised.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    text_log_probs: np.ndarray = field(default_factory=lambda: np.zeros(0))
    is_likeliest: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    reason: Reason | None = None
    error: Exception | None = None
