"""Answers to many requests at once, of one model on one device."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from swift.errors import SettingError, check_count
from swift.experts import ExpertConfig
from swift.generate.drafts import Draft, Drafts
from swift.generate.paged_model import COLUMNS_PER_BLOCK, Passages, Scores, empty_pages, extend
from swift.generate.passages import Passage, as_arrays, decoding_passages, note_scores, plan_passages
from swift.generate.request import Answer, Reason, Request
from swift.generate.sampling import Choices, choose
from swift.models import GPT, Weights

_FEW_CANDIDATES = 64
"""Candidates of a choice, unless a request has more."""


@dataclass(frozen=True)
class TextEngineConfig:
    """Sizes of the engine's arrays, and so of its two programs.

    Attributes:
        batch: texts at work at most; each call that decodes adds a token to every one.
        cache_tokens: tokens whose keys and values are kept; None: for as many texts as the batch, of all positions.
        prefill_passages: passages in a call that reads prompts; a long prompt takes several.
        prefill_length: tokens of such a passage, at most.
        share_prefixes: whether texts share the keys and values of common beginnings.

    Raises:
        SettingError: a value cannot be.
    """

    batch: int = 16
    cache_tokens: int | None = None
    prefill_passages: int = 8
    prefill_length: int = 64
    share_prefixes: bool = True

    def __post_init__(self) -> None:
        for name in ("batch", "prefill_passages", "prefill_length"):
            check_count(f"TextEngineConfig.{name}", getattr(self, name), least=1)
        if self.cache_tokens is not None:
            check_count("TextEngineConfig.cache_tokens", self.cache_tokens, least=1)


@dataclass
class Computed:
    """Counts of what an engine has computed so far.

    Attributes:
        prompt_tokens: tokens computed of texts as they were admitted.
        new_tokens: tokens chosen.
        calls: calls of the model.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    calls: int = 0


class TextEngine:
    """Continues and scores texts; requests come at any time, and share what they can.

    An answer does not depend on the other requests, their order, or the memory, but for rounding: a choice is keyed by
    its request's seed and stream and by its number in the answer.

    Args:
        gpt: architecture.
        experts: settings of the experts; every token is served by all that it is routed to.
        weights: weights of whole experts.
        config: sizes.
    """

    def __init__(self, gpt: GPT, experts: ExpertConfig, weights: Weights, config: TextEngineConfig | None = None):
        self.config = config = config or TextEngineConfig()
        self.gpt, self.computed = gpt, Computed()
        self._experts, self._weights = experts, weights
        self._num_positions = gpt.config.sequence_length
        self._num_columns = -(-self._num_positions // COLUMNS_PER_BLOCK) * COLUMNS_PER_BLOCK
        self.num_pages = config.cache_tokens or config.batch * self._num_positions
        self._drafts = Drafts(self.num_pages, self._num_columns, config.batch, config.share_prefixes)
        self._pages = empty_pages(gpt, self.num_pages, jax.tree.leaves(weights)[0].dtype)

    @property
    def is_idle(self) -> bool:
        """Whether every request has its answer."""
        return not self._drafts.at_work and not self._drafts.num_waiting

    def submit(self, request: Request) -> Answer:
        """Adds a request.

        Returns:
            The answer, which ``step`` fills in.

        Raises:
            SettingError: the request cannot be answered by this engine.
        """
        self._check(request)
        answer = Answer(request)
        self._drafts.add(answer)
        return answer

    def answers(self, requests: Iterable[Request]) -> list[Answer]:
        """Answers requests, and whatever was submitted before."""
        answers = [self.submit(request) for request in requests]
        while not self.is_idle:
            self.step()
        return answers

    def cancel(self, answer: Answer) -> None:
        """Ends a request; what it has so far stays in the answer."""
        if answer.reason is None:
            self._drafts.cancel(answer)
            answer.reason = "cancelled"

    def step(self) -> None:
        """Makes one call of the model: reads prompts if any were admitted, else adds a token to every text."""
        self._drafts.admit()
        at_work, config = self._drafts.at_work, self.config
        if not at_work:
            return
        if all(text.is_prefilled for text in at_work):
            passages, shape = decoding_passages(at_work), (config.batch, 1)
        else:
            in_order = sorted(at_work, key=lambda text: text.number)
            passages, shape = plan_passages(in_order, config.prefill_passages, config.prefill_length), None
            self.computed.prompt_tokens += sum(passage.end - passage.first for passage in passages)
        shape = shape or (config.prefill_passages, config.prefill_length)
        arrays = as_arrays(passages, *shape, self._num_columns, self.num_pages)
        scores, self._pages = _extend(self.gpt, self._experts, self._weights, self._pages, arrays)
        self.computed.calls += 1
        if (arrays.label_RC >= 0).any():
            log_probs, likeliest = np.asarray(scores.log_prob_RC), np.asarray(scores.likeliest_RC)
            for passage, log_prob_C, likeliest_C in zip(passages, log_probs, likeliest, strict=False):
                note_scores(passage, log_prob_C, likeliest_C)
        self._continue(passages, scores.logits_RV)

    def _continue(self, passages: Sequence[Passage], logits_RV: jax.Array) -> None:
        """Chooses the next token of every text that has its logits."""
        places: list[tuple[int, Draft, np.ndarray | None]] = []
        for row, passage in enumerate(passages):
            for text in passage.continued:
                constraint = text.answer.request.constraint
                allowed = None if constraint is None else constraint.allowed()
                if text.num_wanted == 0:
                    self._finish(text, "length")
                elif allowed is not None and not allowed.any():
                    self._finish(text, "end")
                else:
                    places.append((row, text, allowed))
        if not places:
            return
        samplings = [(row, text.answer.request.sampling, len(text.answer.tokens)) for row, text, _ in places]
        candidates = max(_FEW_CANDIDATES, *(sampling.top_k for _, sampling, _ in samplings))
        vocab = self.gpt.vocab_size
        token_B, log_prob_B = choose(
            logits_RV,
            Choices.of(samplings, self.config.batch),
            self._allowed([allowed for _, _, allowed in places]),
            num_candidates=vocab if candidates > _FEW_CANDIDATES else min(vocab, candidates),
        )
        chosen = zip(places, np.asarray(token_B).tolist(), np.asarray(log_prob_B).tolist(), strict=False)
        going_on = [(text, token) for (_, text, _), token, log_prob in chosen if self._accept(text, token, log_prob)]
        self._drafts.append(going_on, self._num_positions)

    def _accept(self, text: Draft, token: int, log_prob: float) -> bool:
        """Adds a token to an answer; False if it was the last one."""
        answer, request = text.answer, text.answer.request
        answer.tokens.append(token)
        answer.log_probs.append(log_prob)
        self.computed.new_tokens += 1
        if request.constraint is not None:
            request.constraint.accept(token)
        if token in request.stop_tokens:
            self._finish(text, "stop")
        elif text.num_wanted == 0:
            self._finish(text, "length")
        return answer.reason is None

    def _finish(self, text: Draft, reason: Reason) -> None:
        text.answer.reason = reason
        self._drafts.finish(text)

    def _allowed(self, masks: Sequence[np.ndarray | None]) -> np.ndarray | None:
        if all(mask is None for mask in masks):
            return None
        allowed_BV = np.ones((self.config.batch, self.gpt.vocab_size), bool)
        for row, mask in enumerate(masks):
            if mask is not None:
                allowed_BV[row] = mask
        return allowed_BV

    def _check(self, request: Request) -> None:
        tokens, vocab = request.tokens, self.gpt.vocab_size
        if not len(tokens):
            raise SettingError("len(Request.tokens)", 0, "must be at least 1")
        if len(tokens) > self._num_positions:
            allowed = f"must be at most {self._num_positions}, the positions of the model"
            raise SettingError("len(Request.tokens)", len(tokens), allowed)
        wrong = next((token for token in tokens if not 0 <= token < vocab), None)
        if wrong is not None:
            raise SettingError("Request.tokens", wrong, f"must be tokens from 0 to {vocab - 1}")
        check_count("Request.max_tokens", request.max_tokens, least=0)
        needed = min(len(tokens) + request.max_tokens, self._num_positions)
        if needed > self.num_pages:
            allowed = f"must be at most {self.num_pages - len(tokens)}: the engine keeps {self.num_pages} tokens"
            raise SettingError("Request.max_tokens", request.max_tokens, f"{allowed} (TextEngineConfig.cache_tokens)")
        scored_from = request.scored_from
        if scored_from is not None and not 1 <= scored_from <= len(tokens):
            raise SettingError("Request.scored_from", scored_from, f"must be from 1 to {len(tokens)}")


def _extend_pages(
    gpt: GPT, experts: ExpertConfig, weights: Weights, pages: jax.Array, passages: Passages
) -> tuple[Scores, jax.Array]:
    return extend(gpt, experts, weights, pages, passages)


_extend = jax.jit(_extend_pages, static_argnums=(0, 1), donate_argnums=3)
