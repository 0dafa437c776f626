"""Generation engine: continuous batching of requests to one model."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import jax
import numpy as np

from swift.errors import SettingError, check_count
from swift.experts.config import ExpertConfig
from swift.generate.paged_model import (
    COLUMNS_PER_BLOCK,
    Passage,
    as_arrays,
    decoding_passages,
    empty_pages,
    extend,
    note_scores,
    on_every,
    plan_passages,
    rank_mesh,
    spread_experts,
)
from swift.generate.request import Answer, Choices, Reason, Request, choose
from swift.generate.texts import SequencePool, TokenSequence
from swift.models.gpt import GPT, Weights

_FEW_CANDIDATES = 64
"""Number of candidate tokens that are sorted for sampling, unless a request has a larger ``top_k``."""


@dataclass(frozen=True)
class TextEngineConfig:
    """Settings of the engine; its sizes fix the array shapes in the two compiled programs, prefill and decode.

    Attributes:
        batch: maximum number of texts that run at the same time; a decoding call adds a token to each.
        cache_tokens: number of tokens that the KV cache can hold; None for enough for ``batch`` texts of full length.
        prefill_passages: number of passages in a prefill call; a long prompt is split into several passages.
        prefill_length: maximum number of tokens in a passage.
        share_prefixes: whether texts share the KV cache of common prefixes.
        expert_ranks: number of devices over which the experts of every layer are distributed; the rest of the model and
            the KV cache are replicated.

    Raises:
        SettingError: a value is out of range.
    """

    batch: int = 16
    cache_tokens: int | None = None
    prefill_passages: int = 8
    prefill_length: int = 64
    share_prefixes: bool = True
    expert_ranks: int = 1

    def __post_init__(self) -> None:
        for name in ("batch", "prefill_passages", "prefill_length", "expert_ranks"):
            check_count(f"TextEngineConfig.{name}", getattr(self, name), least=1)
        if self.cache_tokens is not None:
            check_count("TextEngineConfig.cache_tokens", self.cache_tokens, least=1)


@dataclass
class Computed:
    """Counters of an engine's work so far.

    Attributes:
        prompt_tokens: number of tokens computed in prefill.
        new_tokens: number of tokens generated.
        calls: number of model calls.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    calls: int = 0


class TextEngine:
    """Continues and scores texts; requests may be submitted at any time and share the KV cache of common prefixes.

    Apart from rounding, an answer does not depend on the other requests, their order, or the cache size: the random
    number for a token is determined by the request's seed and stream and the token's position in the answer.

    Args:
        gpt: architecture of the model.
        experts: settings of the experts; routing is dropless.
        weights: weights of whole experts, on the host or on a device.
        config: settings of the engine; None for the defaults.
    """

    def __init__(self, gpt: GPT, experts: ExpertConfig, weights: Weights, config: TextEngineConfig | None = None):
        self.config = config = config or TextEngineConfig()
        if gpt.separator is not None:
            allowed = "must be None: a text that is asked about is one document"
            raise SettingError("GPT.separator", gpt.separator, allowed)
        if gpt.config.block is not None:
            raise SettingError("ModelConfig.block", gpt.config.block, "must be None: it has no keys and values to keep")
        gpt.router.check_generates()
        self.gpt, self.computed = gpt, Computed()
        self._experts, self._ranks = experts, rank_mesh(config.expert_ranks, gpt.num_classes)
        self.weights = spread_experts(gpt, weights, self._ranks)
        self._num_positions = gpt.config.sequence_length
        self._num_columns = -(-self._num_positions // COLUMNS_PER_BLOCK) * COLUMNS_PER_BLOCK
        self.num_pages = config.cache_tokens or config.batch * self._num_positions
        sizes = self.num_pages, self._num_columns, self._num_positions
        self.pool = SequencePool(*sizes, config.batch, config.share_prefixes)
        self._decoded_last = False
        self._empty_pages()

    def _empty_pages(self) -> None:
        dtype = jax.tree.leaves(self.weights)[0].dtype
        self._pages = empty_pages(self.gpt, self.num_pages, dtype, on_every(self._ranks))

    @property
    def is_idle(self) -> bool:
        """Whether the answers to all requests are complete."""
        return self.num_unanswered == 0

    @property
    def num_unanswered(self) -> int:
        """Number of requests whose answers are not complete."""
        return len(self.pool.running) + self.pool.num_waiting

    def submit(self, request: Request) -> Answer:
        """Adds a request to the queue.

        Returns:
            The answer, which later calls of ``step`` fill in.

        Raises:
            SettingError: the request cannot be answered by this engine.
        """
        tokens, answer = self._checked(request), Answer(request)
        allowed = None if request.constraint is None else _allowed(request, self.gpt.vocab_size)
        if allowed is not None and not allowed.any():
            answer.reason = "end"
            return answer
        if request.max_tokens == 0 and request.scored_from is not None:
            tokens = tokens[: max(1, len(tokens) - 1)]  # the last token is only scored, so it needs no forward pass
        self.pool.add(answer, tokens, allowed)
        return answer

    def submit_all(self, requests: Iterable[Request]) -> list[Answer]:
        """Submits several requests; if one is rejected, or the call is interrupted, all of them are cancelled."""
        answers: list[Answer] = []
        with self._cancelling(answers):
            answers += map(self.submit, requests)
        return answers

    def answers(self, requests: Iterable[Request]) -> list[Answer]:
        """Submits requests and runs the engine until these and all earlier requests are answered."""
        answers = self.submit_all(requests)
        with self._cancelling(answers):
            while not self.is_idle:
                self.step()
        return answers

    @contextmanager
    def _cancelling(self, answers: Sequence[Answer]) -> Iterator[None]:
        """Cancels the requests of ``answers`` if the ``with`` block raises or is interrupted."""
        try:
            yield
        except BaseException:
            for answer in answers:
                self.cancel(answer)
            raise

    def cancel(self, answer: Answer) -> None:
        """Cancels a request unless it is already answered; the answer keeps its tokens so far."""
        if answer.reason is None:
            self.pool.cancel(answer)
            answer.reason = "cancelled"

    def step(self) -> None:
        """Calls the model once: either to prefill texts, or to decode one token for every prefilled text.

        Raises:
            BaseException: the call fails or is interrupted. The KV cache is then emptied, and every request continues
                later from the tokens that its answer has.
        """
        self.pool.admit()
        if not self.pool.running:
            return
        try:
            passages, logits_RV = self._call()
            chosen = self._chosen(passages, logits_RV)
            self.pool.append(
                [(sequence, token) for sequence, (token, sure) in chosen if self._accept(sequence, token, sure)]
            )
        except BaseException:
            # The pages are donated to ``extend``, so their contents are lost after a failed call.
            self.pool.forget()
            self._empty_pages()
            raise

    def _call(self) -> tuple[list[Passage], jax.Array]:
        """Runs the model once; returns (passages, logits after each passage)."""
        config, sequences = self.config, self.pool.running
        read = [sequence for sequence in sequences if sequence.is_read]
        unread = sorted((s for s in sequences if not s.is_read), key=lambda s: s.read_order)
        # A text that slides is prefilled again for every token, so alternate between prefill and decoding to avoid
        # starving the other texts.
        only_slid = all(sequence.has_slid for sequence in unread)
        if not unread or (read and only_slid and not self._decoded_last):
            passages, shape = decoding_passages(read), (config.batch, 1)
        else:
            shape = config.prefill_passages, min(config.prefill_length, self._num_positions)
            passages = plan_passages(unread, *shape)
            self.computed.prompt_tokens += sum(passage.end - passage.first for passage in passages)
        self._decoded_last = shape == (config.batch, 1)
        arrays = as_arrays(passages, *shape, self._num_columns, self.num_pages)
        scores, self._pages = extend(self.gpt, self._experts, self.weights, self._pages, arrays, self._ranks)
        self.computed.calls += 1
        if any(passage.scored for passage in passages):
            log_prob_RC, likeliest_RC = np.asarray(scores.log_prob_RC), np.asarray(scores.likeliest_RC)
            for row, passage in enumerate(passages):
                note_scores(passage, log_prob_RC[row], likeliest_RC[row])
        return passages, scores.logits_RV

    def _chosen(
        self, passages: Sequence[Passage], logits_RV: jax.Array
    ) -> list[tuple[TokenSequence, tuple[int, float]]]:
        """Chooses the next (token, log-probability) for every text whose logits have been computed."""
        places: list[tuple[int, TokenSequence]] = []
        for row, passage in enumerate(passages):
            for sequence in passage.continued:
                if sequence.num_wanted:
                    places.append((row, sequence))
                else:
                    self._finish(sequence, "length")
        if not places:
            return []
        samplings = [(row, sequence.answer.request.sampling, len(sequence.answer.tokens)) for row, sequence in places]
        candidates, vocab = max(sampling.top_k for _, sampling, _ in samplings), self.gpt.vocab_size
        token_B, log_prob_B = choose(
            logits_RV,
            Choices.of(samplings, self.config.batch),
            _masks([sequence.allowed for _, sequence in places], (self.config.batch, self.gpt.vocab_size)),
            num_candidates=vocab if candidates > _FEW_CANDIDATES else min(vocab, _FEW_CANDIDATES),
        )
        values = zip(np.asarray(token_B).tolist(), np.asarray(log_prob_B).tolist(), strict=True)
        return list(zip((sequence for _, sequence in places), values, strict=False))

    def _accept(self, sequence: TokenSequence, token: int, log_prob: float) -> bool:
        """Adds a token to an answer; returns whether the answer continues."""
        answer, request = sequence.answer, sequence.answer.request
        answer.tokens.append(token)
        answer.log_probs.append(log_prob)
        self.computed.new_tokens += 1
        if request.constraint is not None:
            try:
                request.constraint.accept(token)
                sequence.allowed = _allowed(request, self.gpt.vocab_size)
            except Exception as error:  # errors in the caller's code must not affect other requests
                answer.error = error
                self._finish(sequence, "failed")
                return False
        if token in request.stop_tokens:
            self._finish(sequence, "stop")
        elif sequence.allowed is not None and not sequence.allowed.any():
            self._finish(sequence, "end")
        elif sequence.num_wanted == 0:
            self._finish(sequence, "length")
        return answer.reason is None

    def _finish(self, sequence: TokenSequence, reason: Reason) -> None:
        sequence.answer.reason = reason
        self.pool.finish(sequence)

    def _checked(self, request: Request) -> np.ndarray:
        """Validates a request and returns its tokens, int32."""
        tokens, vocab = np.asarray(request.tokens, np.int64), self.gpt.vocab_size
        most, reason = self._num_positions, "the positions of the model"
        if self.num_pages < most:
            most, reason = self.num_pages, "the tokens that the engine keeps (TextEngineConfig.cache_tokens)"
        if request.max_tokens == 0 and request.scored_from is not None:
            most, reason = most + 1, f"one more than {reason}, since nothing follows the last"
        if not 1 <= len(tokens) <= most:
            raise SettingError("len(Request.tokens)", len(tokens), f"must be from 1 to {most}, {reason}")
        wrong = tokens[(tokens < 0) | (tokens >= vocab)]
        if wrong.size:
            raise SettingError("Request.tokens", int(wrong[0]), f"must be tokens from 0 to {vocab - 1}")
        check_count("Request.max_tokens", request.max_tokens, least=0)
        if min(len(tokens) + request.max_tokens, self._num_positions) > self.num_pages:
            allowed = f"must be at most {self.num_pages - len(tokens)}: the engine keeps {self.num_pages} tokens"
            raise SettingError("Request.max_tokens", request.max_tokens, f"{allowed} (TextEngineConfig.cache_tokens)")
        scored_from = request.scored_from
        if scored_from is not None and not 1 <= scored_from <= len(tokens):
            raise SettingError("Request.scored_from", scored_from, f"must be from 1 to {len(tokens)}")
        return tokens.astype(np.int32)


def _allowed(request: Request, vocab_size: int) -> np.ndarray | None:
    """Returns the constraint's mask of allowed next tokens, bool[V], or None if all are allowed."""
    assert request.constraint is not None
    allowed = request.constraint.allowed()
    if allowed is not None and allowed.shape != (vocab_size,):
        shape = f"must be a mask of {vocab_size} tokens"
        raise SettingError("Constraint.allowed", f"a mask of shape {allowed.shape}", shape)
    return allowed


def _masks(masks: Sequence[np.ndarray | None], shape: tuple[int, int]) -> np.ndarray | None:
    if all(mask is None for mask in masks):
        return None
    allowed_BV = np.ones(shape, bool)
    for row, mask in enumerate(masks):
        if mask is not None:
            allowed_BV[row] = mask
    return allowed_BV
