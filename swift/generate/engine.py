"""Answers to many requests at once, of one model on one device."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from swift.errors import SettingError, check_count
from swift.experts import ExpertConfig
from swift.generate.paged_model import COLUMNS_PER_BLOCK, Runs, Scores, empty_pages, extend
from swift.generate.request import Answer, Reason, Request
from swift.generate.runs import Run, as_arrays, decoding_runs, note_scores, plan_runs
from swift.generate.sampling import Choices, choose
from swift.generate.texts import Text, Texts
from swift.models import GPT, Weights

_FEW_CANDIDATES = 64
"""Candidates of a choice, unless a request has more."""


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of the engine's arrays, and so of its two programs.

    Attributes:
        batch: texts at work at most; each call that decodes adds a token to every one.
        cache_tokens: tokens whose keys and values are kept; None: for as many texts as the batch, of all positions.
        prefill_runs: runs of tokens in a call that reads prompts; a long prompt takes several.
        prefill_run_length: tokens of such a run at most.
        share_prefixes: whether texts share the keys and values of common beginnings.

    Raises:
        SettingError: a value cannot be.
    """

    batch: int = 16
    cache_tokens: int | None = None
    prefill_runs: int = 8
    prefill_run_length: int = 64
    share_prefixes: bool = True

    def __post_init__(self) -> None:
        for name in ("batch", "prefill_runs", "prefill_run_length"):
            check_count(f"EngineConfig.{name}", getattr(self, name), least=1)
        if self.cache_tokens is not None:
            check_count("EngineConfig.cache_tokens", self.cache_tokens, least=1)


@dataclass
class Work:
    """What an engine has computed so far.

    Attributes:
        prompt_tokens: tokens computed of texts as they were admitted.
        new_tokens: tokens chosen.
        calls: calls of the model.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    calls: int = 0


class Engine:
    """Continues and scores texts; requests come at any time, and share what they can.

    An answer does not depend on the other requests, their order, or the memory, but for rounding: a choice is keyed by
    its request's seed and stream and by its number in the answer.

    Args:
        gpt: architecture.
        experts: settings of the experts; every token is served by all that it is routed to.
        weights: weights of whole experts.
        config: sizes.
    """

    def __init__(self, gpt: GPT, experts: ExpertConfig, weights: Weights, config: EngineConfig | None = None):
        self.config = config = config or EngineConfig()
        self.gpt, self.work = gpt, Work()
        self._experts, self._weights = experts, weights
        self._num_positions = gpt.config.sequence_length
        self._num_columns = -(-self._num_positions // COLUMNS_PER_BLOCK) * COLUMNS_PER_BLOCK
        self.num_slots = config.cache_tokens or config.batch * self._num_positions
        self._texts = Texts(self.num_slots, self._num_columns, config.batch, config.share_prefixes)
        self._pages = empty_pages(gpt, self.num_slots, jax.tree.leaves(weights)[0].dtype)

    @property
    def is_idle(self) -> bool:
        """Whether every request has its answer."""
        return not self._texts.at_work and not self._texts.num_waiting

    def submit(self, request: Request) -> Answer:
        """Adds a request.

        Returns:
            The answer, which ``step`` fills in.

        Raises:
            SettingError: the request cannot be answered by this engine.
        """
        self._check(request)
        answer = Answer(request)
        self._texts.add(answer)
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
            self._texts.cancel(answer)
            answer.reason = "cancelled"

    def step(self) -> None:
        """Makes one call of the model: reads prompts if any were admitted, else adds a token to every text."""
        self._texts.admit()
        at_work, config = self._texts.at_work, self.config
        if not at_work:
            return
        if all(text.is_prefilled for text in at_work):
            runs, shape = decoding_runs(at_work), (config.batch, 1)
        else:
            in_order = sorted(at_work, key=lambda text: text.number)
            runs, shape = plan_runs(in_order, config.prefill_runs, config.prefill_run_length), None
            self.work.prompt_tokens += sum(run.end - run.first for run in runs)
        shape = shape or (config.prefill_runs, config.prefill_run_length)
        arrays = as_arrays(runs, *shape, self._num_columns, self.num_slots)
        scores, self._pages = _extend(self.gpt, self._experts, self._weights, self._pages, arrays)
        self.work.calls += 1
        if (arrays.label_RC >= 0).any():
            log_probs, likeliest = np.asarray(scores.log_prob_RC), np.asarray(scores.likeliest_RC)
            for run, log_prob_C, likeliest_C in zip(runs, log_probs, likeliest, strict=False):
                note_scores(run, log_prob_C, likeliest_C)
        self._continue(runs, scores.logits_RV)

    def _continue(self, runs: Sequence[Run], logits_RV: jax.Array) -> None:
        """Chooses the next token of every text that has its logits."""
        places: list[tuple[int, Text, np.ndarray | None]] = []
        for row, run in enumerate(runs):
            for text in run.continued:
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
        self._texts.append(going_on, self._num_positions)

    def _accept(self, text: Text, token: int, log_prob: float) -> bool:
        """Adds a token to an answer; False if it was the last one."""
        answer, request = text.answer, text.answer.request
        answer.tokens.append(token)
        answer.log_probs.append(log_prob)
        self.work.new_tokens += 1
        if request.constraint is not None:
            request.constraint.accept(token)
        if token in request.stop_tokens:
            self._finish(text, "stop")
        elif text.num_wanted == 0:
            self._finish(text, "length")
        return answer.reason is None

    def _finish(self, text: Text, reason: Reason) -> None:
        text.answer.reason = reason
        self._texts.finish(text)

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
        if needed > self.num_slots:
            allowed = f"must be at most {self.num_slots - len(tokens)}: the engine keeps {self.num_slots} tokens"
            raise SettingError("Request.max_tokens", request.max_tokens, f"{allowed} (EngineConfig.cache_tokens)")
        scored_from = request.scored_from
        if scored_from is not None and not 1 <= scored_from <= len(tokens):
            raise SettingError("Request.scored_from", scored_from, f"must be from 1 to {len(tokens)}")


def _extend_pages(
    gpt: GPT, experts: ExpertConfig, weights: Weights, pages: jax.Array, runs: Runs
) -> tuple[Scores, jax.Array]:
    return extend(gpt, experts, weights, pages, runs)


_extend = jax.jit(_extend_pages, static_argnums=(0, 1), donate_argnums=3)
