"""Answers to many requests at once, of one model."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import jax
import numpy as np

from swift.errors import SettingError, check_count
from swift.experts.config import ExpertConfig
from swift.generate.paged_model import (
    COLUMNS_PER_BLOCK,
    TokenChunk,
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
"""Candidates of a choice, unless a request has more."""


@dataclass(frozen=True)
class TextEngineConfig:
    """Sizes of the engine's arrays, and so of its two programs.

    Attributes:
        batch: texts that run at a time, at most; each call that decodes adds a token to every one.
        cache_tokens: tokens whose keys and values are kept; None: for as many texts as the batch, of all positions.
        prefill_passages: passages in a call that reads prompts; a long prompt takes several.
        prefill_length: tokens of such a passage, at most.
        share_prefixes: whether texts share the keys and values of common beginnings.
        expert_ranks: devices over which the experts of every layer are spread; the rest of the model and the keys and
            values are on each.

    Raises:
        SettingError: a value cannot be.
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
        weights: weights of whole experts, on the host or on a device.
        config: sizes.
    """

    def __init__(self, gpt: GPT, experts: ExpertConfig, weights: Weights, config: TextEngineConfig | None = None):
        self.config = config = config or TextEngineConfig()
        if gpt.separator is not None:
            allowed = "must be None: a text that is asked about is one document"
            raise SettingError("GPT.separator", gpt.separator, allowed)
        if gpt.config.block is not None:
            raise SettingError("ModelConfig.block", gpt.config.block, "must be None: it has no keys and values to keep")
        self.gpt, self.computed = gpt, Computed()
        self._experts, self._ranks = experts, rank_mesh(config.expert_ranks, gpt.num_classes)
        self.weights = spread_experts(gpt, weights, self._ranks)
        self._num_positions = gpt.config.sequence_length
        self._num_columns = -(-self._num_positions // COLUMNS_PER_BLOCK) * COLUMNS_PER_BLOCK
        self.num_pages = config.cache_tokens or config.batch * self._num_positions
        sizes = self.num_pages, self._num_columns, self._num_positions
        self.drafts = SequencePool(*sizes, config.batch, config.share_prefixes)
        self._decoded_last = False
        self._empty_pages()

    def _empty_pages(self) -> None:
        dtype = jax.tree.leaves(self.weights)[0].dtype
        self._pages = empty_pages(self.gpt, self.num_pages, dtype, on_every(self._ranks))

    @property
    def is_idle(self) -> bool:
        """Whether every request has its answer."""
        return self.num_unanswered == 0

    @property
    def num_unanswered(self) -> int:
        """Requests that have no answer yet."""
        return len(self.drafts.running) + self.drafts.num_waiting

    def submit(self, request: Request) -> Answer:
        """Adds a request.

        Returns:
            The answer, which ``step`` fills in.

        Raises:
            SettingError: the request cannot be answered by this engine.
        """
        tokens, answer = self._checked(request), Answer(request)
        allowed = None if request.constraint is None else _allowed(request, self.gpt.vocab_size)
        if allowed is not None and not allowed.any():
            answer.reason = "end"
            return answer
        if request.max_tokens == 0 and request.scored_from is not None:
            tokens = tokens[: max(1, len(tokens) - 1)]  # nothing follows the last one
        self.drafts.add(answer, tokens, allowed)
        return answer

    def submit_all(self, requests: Iterable[Request]) -> list[Answer]:
        """Adds requests, as ``submit`` does: all of them or, where anything ends that, none."""
        answers: list[Answer] = []
        with self._cancelling(answers):
            answers += map(self.submit, requests)
        return answers

    def answers(self, requests: Iterable[Request]) -> list[Answer]:
        """Answers requests, and whatever was submitted before."""
        answers = self.submit_all(requests)
        with self._cancelling(answers):
            while not self.is_idle:
                self.step()
        return answers

    @contextmanager
    def _cancelling(self, answers: Sequence[Answer]) -> Iterator[None]:
        """Ends requests where the block is interrupted or fails."""
        try:
            yield
        except BaseException:
            for answer in answers:
                self.cancel(answer)
            raise

    def cancel(self, answer: Answer) -> None:
        """Ends a request; what it has so far stays in the answer."""
        if answer.reason is None:
            self.drafts.cancel(answer)
            answer.reason = "cancelled"

    def step(self) -> None:
        """Makes one call of the model, which reads texts or adds a token to every one that is read.

        Raises:
            BaseException: whatever ends the call, such as KeyboardInterrupt; the requests then begin again where their
                answers are.
        """
        self.drafts.admit()
        if not self.drafts.running:
            return
        try:
            passages, logits_RV = self._call()
            chosen = self._chosen(passages, logits_RV)
            self.drafts.append([(draft, token) for draft, (token, sure) in chosen if self._accept(draft, token, sure)])
        except BaseException:
            self.drafts.forget()
            self._empty_pages()
            raise

    def _call(self) -> tuple[list[TokenChunk], jax.Array]:
        """Runs the model once; returns (the passages, their logits)."""
        config, drafts = self.config, self.drafts.running
        read = [draft for draft in drafts if draft.is_read]
        unread = sorted((draft for draft in drafts if not draft.is_read), key=lambda draft: draft.read_order)
        # Texts that slide are read again for every token, and take turns with those that are not.
        only_slid = all(draft.has_slid for draft in unread)
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
        self, passages: Sequence[TokenChunk], logits_RV: jax.Array
    ) -> list[tuple[TokenSequence, tuple[int, float]]]:
        """Chooses the next (token, log-probability) of every text that has its logits."""
        places: list[tuple[int, TokenSequence]] = []
        for row, passage in enumerate(passages):
            for draft in passage.continued:
                if draft.num_wanted:
                    places.append((row, draft))
                else:
                    self._finish(draft, "length")
        if not places:
            return []
        samplings = [(row, draft.answer.request.sampling, len(draft.answer.tokens)) for row, draft in places]
        candidates, vocab = max(sampling.top_k for _, sampling, _ in samplings), self.gpt.vocab_size
        token_B, log_prob_B = choose(
            logits_RV,
            Choices.of(samplings, self.config.batch),
            _masks([draft.allowed for _, draft in places], (self.config.batch, self.gpt.vocab_size)),
            num_candidates=vocab if candidates > _FEW_CANDIDATES else min(vocab, _FEW_CANDIDATES),
        )
        values = zip(np.asarray(token_B).tolist(), np.asarray(log_prob_B).tolist(), strict=True)
        return list(zip((draft for _, draft in places), values, strict=False))

    def _accept(self, draft: TokenSequence, token: int, log_prob: float) -> bool:
        """Adds a token to an answer; False if it was the last one."""
        answer, request = draft.answer, draft.answer.request
        answer.tokens.append(token)
        answer.log_probs.append(log_prob)
        self.computed.new_tokens += 1
        if request.constraint is not None:
            try:
                request.constraint.accept(token)
                draft.allowed = _allowed(request, self.gpt.vocab_size)
            except Exception as error:  # a caller's code, which must not end the work of others
                answer.error = error
                self._finish(draft, "failed")
                return False
        if token in request.stop_tokens:
            self._finish(draft, "stop")
        elif draft.allowed is not None and not draft.allowed.any():
            self._finish(draft, "end")
        elif draft.num_wanted == 0:
            self._finish(draft, "length")
        return answer.reason is None

    def _finish(self, draft: TokenSequence, reason: Reason) -> None:
        draft.answer.reason = reason
        self.drafts.finish(draft)

    def _checked(self, request: Request) -> np.ndarray:
        """Checks a request; returns its tokens, int32."""
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
    """Asks a request's constraint for the tokens that may come next."""
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
