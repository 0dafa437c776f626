"""Requests to the engine, their answers, and the sampling of the next token.

Legend: B texts, R rows of logits, V vocabulary, K candidate tokens.
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
"""Reason for which an answer ended: ``max_tokens`` reached (``length``), a stop token (``stop``), no token allowed by
the constraint (``end``), cancelled by the caller (``cancelled``), or an exception of the constraint (``failed``)."""


_MOST = 2**31 - 1
"""Largest ``top_k`` that fits into int32; no vocabulary has as many tokens."""


@dataclass(frozen=True)
class Sampling:
    """Rule by which the next token is chosen.

    Attributes:
        temperature: softmax temperature; 0 for always the likeliest token.
        top_k: number of likeliest tokens to sample from.
        top_p: minimum total probability of the likeliest tokens to sample from (nucleus sampling).
        seed: seed of the random numbers.
        stream: number of the random stream; texts with the same seed but different streams are independent.

    Raises:
        SettingError: a value is out of range.
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
"""Greedy decoding: always the likeliest token."""


class Constraint(Protocol):
    """Constraint on the next token, updated as the text grows; each request needs its own instance."""

    def allowed(self) -> np.ndarray | None:
        """Returns which tokens may come next, bool[V], or None if all may; a mask of all False ends the answer."""

    def accept(self, token: int) -> None:
        """Updates the constraint with the chosen token, which is an allowed one."""


@dataclass(frozen=True, eq=False)
class Request:
    """Request to continue a text, to score it, or both.

    Attributes:
        tokens: the text, at least one token.
        max_tokens: maximum number of tokens to add; 0 to score only.
        sampling: rule by which tokens are chosen.
        stop_tokens: tokens that end the answer; the answer includes the one that ends it.
        constraint: constraint on the new tokens; None for no constraint.
        scored_from: index of the first token of the text to score; None to score no token.
    """

    tokens: Sequence[int]
    max_tokens: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    stop_tokens: frozenset[int] = frozenset()
    constraint: Constraint | None = None
    scored_from: int | None = None


@dataclass(eq=False)
class Answer:
    """Answer to a request, which grows with the steps of the engine.

    Attributes:
        request: request that is answered.
        tokens: new tokens so far.
        log_probs: log-probability of each new token, before temperature, top-k and top-p.
        text_log_probs: log-probability of each token of the text from ``scored_from`` on.
        is_likeliest: whether each scored token of the text is the likeliest one.
        reason: reason for which the answer ended; None while it grows.
        error: exception raised by the constraint, or None.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    text_log_probs: np.ndarray = field(default_factory=lambda: np.zeros(0))
    is_likeliest: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    reason: Reason | None = None
    error: Exception | None = None


class Choices(NamedTuple):
    """Sampling settings of B texts, as arrays."""

    row_B: jax.Array  # int32, row of the text's logits
    temperature_B: jax.Array  # float32
    top_k_B: jax.Array  # int32
    top_p_B: jax.Array  # float32
    seed_B: jax.Array  # uint32
    stream_B: jax.Array  # uint32
    number_B: jax.Array  # uint32, number of tokens generated so far

    @classmethod
    def of(cls, samplings: "list[tuple[int, Sampling, int]]", size: int) -> "Choices":
        """Collects texts' (row, settings, number of generated tokens) into NumPy arrays, padded to ``size`` texts."""
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
    """Samples a token for each text by inverse transform sampling.

    Probabilities are sorted in descending order, and the token is chosen at which their cumulative sum exceeds a
    uniform random number. The result depends only on the text's own logits, settings and number of generated tokens, so
    a text gets the same token regardless of the other texts in the batch.

    Args:
        logits_RV: logits of the rows that ``choices`` refers to.
        choices: sampling settings of each text.
        allowed_BV: tokens to choose from; None for all.
        num_candidates: K, number of likeliest tokens to sort: the largest ``top_k``, at most V.

    Returns:
        (tokens, int32[B]; log-probability of each token before temperature, top-k and top-p, [B]).
    """
    logits_BV = logits_RV[choices.row_B]
    log_total_B = jax.nn.logsumexp(logits_BV, axis=1)
    if allowed_BV is not None:
        logits_BV = jnp.where(allowed_BV, logits_BV, -jnp.inf)
    values_BK, candidates_BK = largest(logits_BV, num_candidates)
    temperature_B = jnp.maximum(choices.temperature_B.astype(values_BK.dtype), 1e-6)
    weights_BK = jnp.exp((values_BK - values_BK[:, :1]) / temperature_B[:, None])
    weights_BK = jnp.where(jnp.arange(num_candidates)[None] < choices.top_k_B[:, None], weights_BK, 0)
    # Top-p: keep each candidate if the sum of the probabilities before it is below top_p; this always keeps the first.
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
    """Returns a uniform random number in [0, 1), keyed by all three arguments."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), stream), number)
    return jax.random.uniform(key, (), jnp.float32)
