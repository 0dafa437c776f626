"""Scores a task file's questions: all are submitted to an engine at once, so that they share prefixes.

The score of a choice is the log-probability of its tokens as a continuation of the prompt.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from swift.data.tokenizer import Tokenizer, prompt_tokens, text_tokens
from swift.errors import RunError, SettingError
from swift.evaluate.results import Judgement
from swift.evaluate.tasks import Completion, Question, Selection, before_stops, is_match
from swift.generate.engine import TextEngine
from swift.generate.programs import Until, decoded
from swift.generate.request import GREEDY, Answer, Request

_CALLS = 8
"""Number of model calls between checks for answered questions."""


@dataclass(frozen=True)
class Continuation:
    """Text whose last part is to be scored.

    Attributes:
        tokens: tokens of the text, without those that were dropped.
        scored_from: index in ``tokens`` of the first token to score.
        unseen_tokens: number of first tokens that were dropped to fit into the model's positions.
    """

    tokens: tuple[int, ...]
    scored_from: int
    unseen_tokens: int

    @property
    def request(self) -> Request:
        """Request that scores the continuation."""
        return Request(self.tokens, scored_from=self.scored_from)


def continuation_of(tokenizer: Tokenizer, begin: str, end: str, num_positions: int) -> Continuation | None:
    """Tokenizes a text and its continuation.

    Both are tokenized together. The tokens after the longest common prefix with the tokens of ``begin`` alone are
    scored, since a token may cross the boundary: for example, the token `` yes`` if ``begin`` ends with a space.

    Args:
        tokenizer: tokenizer of the model.
        begin: text before the continuation; if no token of it remains unscored, a separator is prepended.
        end: text to score.
        num_positions: number of positions of the model; the first tokens of a longer text are dropped. The last token
            needs no position, since nothing follows it.

    Returns:
        The continuation, or None if it has no tokens to score, or if these and one token before them do not fit.
    """
    tokens, prompt_tokens = (text_tokens(tokenizer, text) for text in (begin + end, begin))
    start = _common_beginning(tokens, prompt_tokens)
    if start == 0:
        tokens, start = [tokenizer.separator, *tokens], 1
    return seen(tokens, start, num_positions)


def seen(tokens: Sequence[int], scored_from: int, num_positions: int) -> Continuation | None:
    """Drops the first tokens of a text that has more tokens than fit into the model's positions.

    Returns None if there is no token to score, or if no token is left before the first scored one.
    """
    unseen = max(0, len(tokens) - num_positions - 1)
    if not unseen < scored_from < len(tokens):
        return None
    return Continuation(tuple(tokens[unseen:]), scored_from - unseen, unseen)


def _common_beginning(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns the length of the prefix that two token sequences share."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((number for number, (a, b) in pairs if a != b), min(len(first), len(second)))


@dataclass(frozen=True, eq=False)
class PendingQuestion:
    """Question with the requests whose answers decide it.

    Attributes:
        question: question to answer.
        requests: one request for each choice, or one that continues the prompt.
        unseen_tokens: see ``Judgement``.
    """

    question: Question
    requests: tuple[Request, ...]
    unseen_tokens: int


def prepare_questions(
    engine: TextEngine, tokenizer: Tokenizer, path: str, questions: Sequence[Question]
) -> list[PendingQuestion]:
    """Builds the requests for questions, without computing anything.

    Args:
        engine: engine that will answer the questions; of a text longer than its positions it sees only the last tokens.
        tokenizer: tokenizer of the model.
        path: path of the task file, for error messages.
        questions: questions to prepare.

    Raises:
        SettingError: a choice has no tokens, or more tokens than the model has positions.
    """
    asked, num_positions = [], engine.gpt.config.sequence_length
    for question in questions:
        if isinstance(question.right, Completion):
            asked.append(_prepare_completion(engine, tokenizer, question, question.right))
            continue
        continuations = [
            continuation_of(tokenizer, question.prompt, end, num_positions) for end in question.right.choices
        ]
        for end, continuation in zip(question.right.choices, continuations, strict=True):
            if continuation is None:
                allowed = f"must be of 1 to {num_positions} tokens, by the tokenizer and the positions of the model"
                raise SettingError(f"{path}, line {question.line}, choices", end[:60], allowed)
        known = [continuation for continuation in continuations if continuation is not None]
        unseen = max(continuation.unseen_tokens for continuation in known)
        asked.append(PendingQuestion(question, tuple(continuation.request for continuation in known), unseen))
    return asked


def _prepare_completion(
    engine: TextEngine, tokenizer: Tokenizer, question: Question, right: Completion
) -> PendingQuestion:
    tokens = prompt_tokens(tokenizer, question.prompt)
    seen = tokens[-engine.gpt.config.sequence_length :]
    until = Until(tokenizer, tokens, right.stop, engine.gpt.vocab_size) if right.stop else None
    request = Request(seen, right.max_tokens, GREEDY, frozenset({tokenizer.separator}), until)
    return PendingQuestion(question, (request,), len(tokens) - len(seen))


def ask(engine: TextEngine, tokenizer: Tokenizer, asked: Sequence[PendingQuestion]) -> Iterator[list[Judgement]]:
    """Runs an engine until all questions are answered.

    Args:
        engine: idle engine.
        tokenizer: tokenizer of the model.
        asked: questions from ``prepare_questions``.

    Yields:
        After each model call, the judgements of newly answered questions, an empty list in most cases. In total there
        is one judgement for each question.

    Raises:
        RunError: the model's log-probabilities are not finite.
    """
    waiting = [(question, [engine.submit(request) for request in question.requests]) for question in asked]
    try:
        for number in count(1):
            engine.step()
            if number % _CALLS and not engine.is_idle:
                yield []
                continue
            done = [all(answer.reason is not None for answer in answers) for _, answers in waiting]
            judgements = [
                _judgement_of(tokenizer, *pair) for pair, is_done in zip(waiting, done, strict=True) if is_done
            ]
            waiting = [pair for pair, is_done in zip(waiting, done, strict=True) if not is_done]
            yield judgements
            if not waiting:
                return
    finally:
        for _, answers in waiting:
            for answer in answers:
                engine.cancel(answer)


def _judgement_of(tokenizer: Tokenizer, asked: PendingQuestion, answers: Sequence[Answer]) -> Judgement:
    """Judges the answers to a question."""
    question, right = asked.question, asked.question.right
    failed = next((answer.error for answer in answers if answer.error is not None), None)
    if failed is not None:
        raise failed
    about = question.line, question.task
    if isinstance(right, Completion):
        (answer,) = answers
        tokens = [token for token in answer.tokens if token != tokenizer.separator]
        text = before_stops(decoded(tokenizer, tokens, answer.request.tokens), right.stop)
        correct = {"match": is_match(right, text)}
        return Judgement(*about, correct, None, text, asked.unseen_tokens, question.name)
    log_probs = np.array([answer.text_log_probs.sum() for answer in answers], float)
    if not np.isfinite(log_probs).all():
        raise RunError(f"the model's probabilities are not numbers, as with the question of line {question.line}")
    correct = judged(right, log_probs)
    return Judgement(*about, correct, tuple(log_probs.tolist()), None, asked.unseen_tokens, question.name)


def judged(right: Selection, log_probs: np.ndarray) -> dict[str, bool]:
    """Determines whether the right choice has the largest log-probability, and the largest log-probability per byte.

    Leading white space of a choice does not count towards its length, as in lm-eval's ``acc_norm``, which counts
    characters instead of bytes.
    """
    lengths = np.array([len(choice.lstrip().encode()) for choice in right.choices])
    values = zip(("accuracy", "accuracy_per_byte"), (log_probs, log_probs / lengths), strict=True)
    return {metric: int(value.argmax()) == right.answer for metric, value in values}
