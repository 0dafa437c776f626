"""Texts continued by a trained model, several at once.

Legend: B texts, T columns of a window, V vocabulary.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from swift.data import Tokenizer
from swift.errors import SettingError, check_count, check_number, check_seed
from swift.experts import ExpertConfig
from swift.models import GPT, KvCache, Weights, extend
from swift.train.checkpoints import load_wide
from swift.train.settings import Experiment

MAX_TOKENS = 1_000_000
"""Tokens that a text is continued by at most."""
_TOKENS_BEFORE = 16
"""Tokens of the prompt with which the first new ones are decoded."""


@dataclass(frozen=True)
class Sampling:
    """The choice of the next token.

    Attributes:
        temperature: temperature of the choice; 0 always takes the likeliest token.
        top_k: number of the likeliest tokens to choose from.
        top_p: the likeliest tokens to choose from have at least this probability together.
        seed: seed of the choices.

    Raises:
        SettingError: a value cannot be.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("--temperature", self.temperature, least=0)
        check_count("--top-k", self.top_k, least=1)
        check_number("--top-p", self.top_p, above=0)
        if self.top_p > 1:
            raise SettingError("--top-p", self.top_p, "must be at most 1")
        check_seed("--seed", self.seed)

    def choose(self, logits_BV: Float[Array, "B V"], key: jax.Array) -> Int[Array, " B"]:
        """Chooses a token for each text; the choice for a text does not depend on those after it."""
        values_BK, candidates_BK = jax.lax.top_k(logits_BV, min(self.top_k, logits_BV.shape[1]))
        scaled_BK = values_BK / jnp.maximum(jnp.asarray(self.temperature, values_BK.dtype), 1e-6)
        probs_BK = jax.nn.softmax(scaled_BK)
        # Of the tokens in order, those before which less than top_p is reached.
        is_kept_BK = jnp.cumsum(probs_BK, axis=1) - probs_BK < self.top_p
        scaled_BK = jnp.where(is_kept_BK, scaled_BK, -jnp.inf)
        keys_B = [key if text == 0 else jax.random.fold_in(key, text) for text in range(len(logits_BV))]
        chosen_B = jnp.stack([jax.random.categorical(k, row) for k, row in zip(keys_B, scaled_BK, strict=True)])
        return jnp.take_along_axis(candidates_BK, chosen_B[:, None], axis=1)[:, 0]


def generate(
    experiment: Experiment, path: Path, prompts: Sequence[str], num_tokens: int, sampling: Sampling
) -> Iterator[tuple[int, str]]:
    """Continues texts, piece by piece.

    Args:
        experiment: settings of the model.
        path: model directory.
        prompts: texts to continue.
        num_tokens: number of tokens to add to each.
        sampling: choice of the tokens.

    Returns:
        (number of the prompt, new text of it), as soon as its characters are complete.

    Raises:
        SettingError: the model or the number of tokens cannot be; at once, not with the first piece.
    """
    check_count("--tokens", num_tokens, least=1)
    if num_tokens > MAX_TOKENS:
        raise SettingError("--tokens", num_tokens, f"must be at most {MAX_TOKENS:,}")
    gpt, weights = load_wide(experiment, path)
    tokenizer = experiment.data.tokenizer
    texts = [[int(token) for token in tokenizer.encode(prompt)] or [tokenizer.separator] for prompt in prompts]
    return _pieces(tokenizer, texts, continuation(gpt, experiment.experts, weights, texts, num_tokens, sampling))


def _pieces(
    tokenizer: Tokenizer, texts: Sequence[Sequence[int]], added: Iterable[np.ndarray]
) -> Iterator[tuple[int, str]]:
    shown = [Shown(tokenizer, tokens[-_TOKENS_BEFORE:]) for tokens in texts]
    for tokens_B in added:
        for number, (text, token) in enumerate(zip(shown, tokens_B, strict=True)):
            piece = text.after(int(token))
            if piece:
                yield number, piece


def continuation(
    gpt: GPT,
    experts: ExpertConfig,
    weights: Weights,
    texts: Sequence[Sequence[int]],
    num_tokens: int,
    sampling: Sampling,
) -> Iterator[np.ndarray]:
    """Yields the next token of every text, int32[B], ``num_tokens`` times.

    Keys and values are kept until a text fills the window of the model's positions; from then on the whole window,
    which moves on by a token, is computed for each token, as its positions have changed.
    """
    length = gpt.config.sequence_length
    tokens_BL = [list(text) for text in texts]
    dtype = jax.tree.leaves(weights)[0].dtype

    @partial(jax.jit, donate_argnums=1)
    def step(weights: Weights, cache: KvCache, new_BT: Any, first: Any, padding_B: Any, key: Any) -> Any:
        logits_BV, cache = extend(gpt, experts, weights, cache, new_BT, first, padding_B)
        return sampling.choose(logits_BV, key), cache

    cache, used, room = None, 0, 0
    for done, key in enumerate(jax.random.split(jax.random.key(sampling.seed), num_tokens)):
        if cache is None or used == room:
            new_BT, padding_B = _window(tokens_BL, length)
            columns = new_BT.shape[1]
            room = max(columns, min(length + int(padding_B.min()), columns + num_tokens - done))
            cache, used = KvCache.empty(gpt, len(texts), room, dtype), 0
        else:
            new_BT = np.array([[text[-1]] for text in tokens_BL], np.int32)
        chosen_B, cache = step(weights, cache, new_BT, np.int32(used), padding_B, key)
        used += new_BT.shape[1]
        chosen_B = np.asarray(chosen_B)
        for text, token in zip(tokens_BL, chosen_B, strict=True):
            text.append(int(token))
        yield chosen_B


def _window(texts: Sequence[Sequence[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """The last tokens of texts as columns that end together, and how many of them are padding."""
    longest = min(length, max(map(len, texts)))
    columns = min(length, 1 << (longest - 1).bit_length())  # few numbers of columns, so few programs
    window_BT, padding_B = np.zeros((len(texts), columns), np.int32), np.zeros(len(texts), np.int32)
    for row, text in enumerate(texts):
        seen = text[-columns:]
        window_BT[row, columns - len(seen) :] = seen
        padding_B[row] = columns - len(seen)
    return window_BT, padding_B


class Shown:
    """The text of tokens, in pieces of whole characters.

    Args:
        tokenizer: tokenizer that decodes them.
        before: tokens that they follow, and that are not shown: some tokenizers begin a text without its first space.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()):
        self._tokenizer, self._seen = tokenizer, list(before)
        self._shown = tokenizer.decode(np.array(self._seen)) if self._seen else ""

    def after(self, token: int) -> str:
        """The text that a token completes; empty within a character of several tokens."""
        self._seen.append(token)
        text = self._tokenizer.decode(np.array(self._seen))
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        piece, self._shown = text[len(self._shown) :], text
        return piece
