"""Requests to the engine, their answers, and the choice of the next token.

Legend: B texts, R rows of logits, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from swift.errors import SettingError, check_count, check_number, check_seed
from swift.largest import largest

Reason = Literal["length", "stop", "end", "cancelled", "failed"]
"""End of an answer: as many tokens as asked for, a stop token, nothing allowed after it, at the caller's
wish, or because its constraint raised an error."""


_MOST = 2**31 - 1
"""Largest ``top_k`` that an array of int32 holds; no vocabulary has as many tokens."""


@dataclass(frozen=True)
class Sampling:
    """The choice of the next token.

    Attributes:
        temperature: temperature of the choice; 0 always takes the likeliest token.
        top_k: number of the likeliest tokens to choose from.
        top_p: the likeliest tokens to choose from have at least this probability together.
        seed: seed of the choices.
        stream: number of a text among those of one seed, whose choices are independent.

    Raises:
        SettingError: a value cannot be.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 1.0
    seed: int = 0
    stream: int = 0

    def __post_init__(self) -> None:
        check_number("--temperature", self.temperature, least=0)
        check_count("--top-k", self.top_k, least=1)
        check_number("--top-p", self.top_p, above=0)
        if self.top_p > 1:
            raise SettingError("--top-p", self.top_p, "must be at most 1")
        check_seed("--seed", self.seed)
        check_seed("Sampling.stream", self.stream)


GREEDY = Sampling(temperature=0.0, top_k=1)
"""Always the likeliest token."""


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
        reason: reason why it ended; None before.
        error: what its constraint raised.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    text_log_probs: np.ndarray = field(default_factory=lambda: np.zeros(0))
    is_likeliest: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    reason: Reason | None = None
    error: Exception | None = None


class Choices(NamedTuple):
    """The choice of a token for each of B texts, as data."""

    row_B: jax.Array  # int32, row of its logits
    temperature_B: jax.Array  # float32
    top_k_B: jax.Array  # int32
    top_p_B: jax.Array  # float32
    seed_B: jax.Array  # uint32
    stream_B: jax.Array  # uint32
    number_B: jax.Array  # uint32, tokens of the text that were chosen before

    @classmethod
    def of(cls, samplings: "list[tuple[int, Sampling, int]]", size: int) -> "Choices":
        """Collects (row, settings, number) of texts as NumPy arrays, and fills up to a fixed number of them."""
        full = samplings + [(0, GREEDY, 0)] * (size - len(samplings))
        columns = [
            (row, s.temperature, min(s.top_k, _MOST), s.top_p, s.seed, s.stream, number) for row, s, number in full
        ]
        dtypes = (np.int32, np.float32, np.int32, np.float32, np.uint32, np.uint32, np.uint32)
        arrays = [np.array(column, dtype) for column, dtype in zip(zip(*columns, strict=True), dtypes, strict=True)]
        return cls(*arrays)  # type: ignore[arg-type]


@partial(jax.jit, static_argnames="num_candidates")
def choose(
    logits_RV: Float[Array, "R V"], choices: Choices, allowed_BV: Bool[Array, "B V"] | None, *, num_candidates: int
) -> tuple[Any, Any]:
    """Chooses a token for each text; the choice depends on nothing but its own logits, settings and number.

    One uniform number decides: the token at which the sum of the probabilities, the largest first, exceeds it. So the
    same text gets the same token whatever else is in the batch.

    Args:
        logits_RV: logits.
        choices: how to choose.
        allowed_BV: tokens to choose from; None: all.
        num_candidates: largest ``top_k``, at most V.

    Returns:
        (int32[B], the tokens; [B], log-probability of each, before temperature and selection).
    """
    logits_BV = logits_RV[choices.row_B]
    log_total_B = jax.nn.logsumexp(logits_BV, axis=1)
    if allowed_BV is not None:
        logits_BV = jnp.where(allowed_BV, logits_BV, -jnp.inf)
    values_BK, candidates_BK = largest(logits_BV, num_candidates)
    temperature_B = jnp.maximum(choices.temperature_B.astype(values_BK.dtype), 1e-6)
    weights_BK = jnp.exp((values_BK - values_BK[:, :1]) / temperature_B[:, None])
    weights_BK = jnp.where(jnp.arange(num_candidates)[None] < choices.top_k_B[:, None], weights_BK, 0)
    # Of the candidates in order, those before which less than top_p is reached.
    sums_BK = jnp.cumsum(weights_BK, axis=1)
    weights_BK = jnp.where(sums_BK - weights_BK < choices.top_p_B[:, None] * sums_BK[:, -1:], weights_BK, 0)
    uniform_B = jax.vmap(_uniform)(choices.seed_B, choices.stream_B, choices.number_B).astype(weights_BK.dtype)
    sums_BK = jnp.cumsum(weights_BK, axis=1)
    reached_BK = sums_BK > uniform_B[:, None] * sums_BK[:, -1:]
    chosen_B = jnp.where(choices.temperature_B > 0, jnp.argmax(reached_BK, axis=1), 0)
    token_B = jnp.take_along_axis(candidates_BK, chosen_B[:, None], axis=1)[:, 0]
    value_B = jnp.take_along_axis(values_BK, chosen_B[:, None], axis=1)[:, 0]
    return token_B, value_B - log_total_B


def _uniform(seed: jax.Array, stream: jax.Array, number: jax.Array) -> jax.Array:
    """A number from 0 to 1, below it."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), stream), number)
    return jax.random.uniform(key, (), jnp.float32)
