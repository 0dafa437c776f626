"""Results of an evaluation of models: judgements, scores, and differences between two models.

Scores and differences have confidence intervals of 95 %. A file of results is one JSON document of one or several
models, which anybody may have made: what is read is checked, and a score is counted again from the answers, never taken
from the file.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from swift.errors import SettingError
from swift.files import read_regular, replace_file

_QUANTILE = 1.959963984540054
"""97.5 % of a normal distribution lie below it."""

DIRECTORY = "evaluations"
"""Directory of a run or a model in which its results are."""
_FORMAT = 1
_METRICS = ({"accuracy", "accuracy_per_byte"}, {"match"})


class Interval(NamedTuple):
    """Both ends of an interval."""

    low: float
    high: float


def share_interval(correct: int, count: int) -> Interval:
    """Computes Wilson's score interval of a share; it is right for few questions and for shares near 0 and 1, too.

    Args:
        correct: questions that were answered correctly.
        count: all questions, at least one.
    """
    square = _QUANTILE**2
    middle = (correct + square / 2) / (count + square)
    half = _QUANTILE / (count + square) * math.sqrt(correct * (count - correct) / count + square / 4)
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return Interval(low if correct else 0.0, high if correct < count else 1.0)


def difference_interval(both: int, only_first: int, only_second: int, neither: int) -> Interval:
    """Computes the interval of the first share less the second, of two models that were asked the same questions.

    Questions that are hard for one are mostly hard for the other, so it is narrower than that of two samples. It is
    Newcombe's square-and-add interval from Wilson's (Statistics in Medicine 17, 1998, pages 2635 to 2650, method 10).

    Args:
        both: questions that both have answered correctly.
        only_first: those that only the first has.
        only_second: those that only the second has.
        neither: those that neither has; together there is at least one.
    """
    count = both + only_first + only_second + neither
    first, second = (both + only_first) / count, (both + only_second) / count
    first_interval = share_interval(both + only_first, count)
    second_interval = share_interval(both + only_second, count)
    correlation = _correlation(both, only_first, only_second, neither)

    def distance(first_margin: float, second_margin: float) -> float:
        square = first_margin**2 - 2 * correlation * first_margin * second_margin + second_margin**2
        return math.sqrt(max(0.0, square))

    difference = first - second
    low = difference - distance(first - first_interval.low, second_interval.high - second)
    high = difference + distance(first_interval.high - first, second - second_interval.low)
    return Interval(max(-1.0, low), min(1.0, high))


def _correlation(both: int, only_first: int, only_second: int, neither: int) -> float:
    """Estimates the correlation of both models' answers, with a correction for continuity."""
    margins = (both + only_first) * (only_second + neither) * (both + only_second) * (only_first + neither)
    if margins == 0:
        return 0.0
    count = both + only_first + only_second + neither
    excess = float(both * neither - only_first * only_second)
    if excess > 0:
        excess = max(0.0, excess - count / 2)
    return excess / math.sqrt(margins)


@dataclass(frozen=True)
class Judgement:
    """A model's answer to a question.

    Attributes:
        line: line of the question in the task file.
        task: name of its task.
        correct: whether it is right, by name of the score.
        log_probs: log-probability of each choice; None where there are no choices.
        text: text with which the model continued; None where there are choices.
        unseen_tokens: first tokens of the question that the model did not see, since it has too few positions.
        name: the question's own ``id``.
    """

    line: int
    task: str
    correct: Mapping[str, bool]
    log_probs: tuple[float, ...] | None = None
    text: str | None = None
    unseen_tokens: int = 0
    name: str | int | None = None


@dataclass(frozen=True)
class Score:
    """The share of a task's questions that a model has answered correctly.

    Attributes:
        task: name of the task.
        metric: ``accuracy`` (the choice with the largest log-probability), ``accuracy_per_byte`` (the largest one for
            each byte of the choice), or ``match``.
        correct: questions that were answered correctly.
        questions: questions that were answered.
    """

    task: str
    metric: str
    correct: int
    questions: int

    @property
    def share(self) -> float:
        """Correct answers for each question."""
        return self.correct / self.questions

    @property
    def interval(self) -> Interval:
        """95 % confidence interval of the share."""
        return share_interval(self.correct, self.questions)


@dataclass(frozen=True)
class Evaluation:
    """A model's answers to the questions of a task file.

    Attributes:
        model: name of the model.
        path: directory of the run or the model.
        step: iteration of the checkpoint; None for a model directory.
        weights: SHA-256 of all weights.
        tasks: name of the task file.
        tasks_digest: SHA-256 of its content.
        num_questions: its questions.
        seconds: time in which they were answered.
        judgements: answers, in the order of their lines.
    """

    model: str
    path: str
    step: int | None
    weights: str
    tasks: str
    tasks_digest: str
    num_questions: int
    seconds: float
    judgements: tuple[Judgement, ...]

    @property
    def is_complete(self) -> bool:
        """Whether every question is answered."""
        return len(self.judgements) == self.num_questions

    @property
    def num_cut(self) -> int:
        """Questions of which the model did not see the beginning."""
        return sum(judgement.unseen_tokens > 0 for judgement in self.judgements)

    @property
    def scores(self) -> list[Score]:
        """A score for every task and metric, in the order of the tasks."""
        counts: dict[tuple[str, str], list[bool]] = defaultdict(list)
        for judgement in self.judgements:
            for metric, is_correct in judgement.correct.items():
                counts[judgement.task, metric].append(is_correct)
        tasks = list(dict.fromkeys(task for task, _ in counts))
        ordered = sorted(counts, key=lambda key: tasks.index(key[0]))
        return [Score(*key, sum(counts[key]), len(counts[key])) for key in ordered]


@dataclass(frozen=True)
class Difference:
    """Difference in how often two models are right, over the questions that both have answered.

    Attributes:
        task: name of the task.
        metric: see ``Score``.
        both: questions that both have answered correctly.
        only_first: those that only the one has.
        only_second: those that only the other has.
        neither: those that neither has.
    """

    task: str
    metric: str
    both: int
    only_first: int
    only_second: int
    neither: int

    @property
    def questions(self) -> int:
        """Questions that both have answered."""
        return self.both + self.only_first + self.only_second + self.neither

    @property
    def share(self) -> float:
        """The one's share of correct answers less the other's."""
        return (self.only_first - self.only_second) / self.questions

    @property
    def interval(self) -> Interval:
        """95 % confidence interval of the difference."""
        return difference_interval(self.both, self.only_first, self.only_second, self.neither)


def differences(evaluation: Evaluation, other: Evaluation) -> Iterator[Difference]:
    """Compares two models question by question.

    Args:
        evaluation: answers of a model.
        other: answers of another model to the same task file.

    Yields:
        A difference for every task and metric of which both have answered a question.
    """
    assert evaluation.tasks_digest == other.tasks_digest, "answers to other questions"
    other_judgements = {judgement.line: judgement for judgement in other.judgements}
    for score in evaluation.scores:
        pairs = [
            (judgement.correct[score.metric], other_judgements[judgement.line].correct[score.metric])
            for judgement in evaluation.judgements
            if judgement.task == score.task and judgement.line in other_judgements
        ]
        if pairs:
            counts = [pairs.count(pair) for pair in ((True, True), (True, False), (False, True), (False, False))]
            yield Difference(score.task, score.metric, *counts)


def document_of(evaluations: Sequence[Evaluation], *, with_answers: bool = True) -> dict[str, Any]:
    """Makes the document of results: scores of each model, and differences of each from the first.

    Args:
        evaluations: results, all of one task file.
        with_answers: whether to include the answer to every question.
    """
    first, models = evaluations[0], []
    for evaluation in evaluations:
        answers = {"judgements": [_sparse(judgement) for judgement in evaluation.judgements]} if with_answers else {}
        facts = {f.name: getattr(evaluation, f.name) for f in fields(evaluation) if f.name != "judgements"}
        scores = [_score(score) for score in evaluation.scores]
        facts |= {"complete": evaluation.is_complete, "cut": evaluation.num_cut, "scores": scores}
        models.append(facts | answers)
    pairs = [
        {"model": other.model, "less": first.model, **_difference(difference)}
        for other in evaluations[1:]
        for difference in differences(other, first)
    ]
    return {"format": _FORMAT, "models": models, "differences": pairs}


def write_evaluations(path: Path, evaluations: Sequence[Evaluation]) -> None:
    """Writes results; the file is never half-written.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(exist_ok=True)
    replace_file(path, json.dumps(document_of(evaluations), indent=1, allow_nan=False).encode())


def read_evaluations(path: Path) -> list[Evaluation]:
    """Reads results.

    Raises:
        SettingError: the file cannot be read, or is damaged.
    """
    try:
        document = json.loads(read_regular(path))
    except OSError as error:
        raise SettingError("results", str(path), f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        document = None
    try:
        if document["format"] != _FORMAT:
            raise SettingError("results", str(path), f"are of format {document['format']!r}: only {_FORMAT} is known")
        return [_evaluation(model) for model in document["models"]]
    except (KeyError, TypeError, AttributeError, _Damage):
        raise SettingError("results", str(path), "are damaged: write them again with `swift evaluate`") from None


def stored_evaluations(directory: Path) -> list[Evaluation]:
    """Reads all results that lie with a run or a model, by name of the task file and iteration.

    Raises:
        SettingError: a file is damaged.
    """
    paths = sorted((directory / DIRECTORY).glob("[!.]*.json"))
    evaluations = [evaluation for path in paths for evaluation in read_evaluations(path)]
    return sorted(evaluations, key=lambda evaluation: (evaluation.tasks, evaluation.tasks_digest, evaluation.step or 0))


class _Damage(Exception):
    """A value that no results have."""


def _sparse(judgement: Judgement) -> dict[str, Any]:
    """The fields of a judgement that are not empty."""
    return {name: value for name, value in asdict(judgement).items() if value is not None and value != 0}


def _score(score: Score) -> dict[str, Any]:
    counts = {"correct": score.correct, "questions": score.questions}
    return {"task": score.task, "metric": score.metric, "share": score.share, **score.interval._asdict(), **counts}


def _difference(difference: Difference) -> dict[str, Any]:
    counts = {"both": difference.both, "only_model": difference.only_first, "only_less": difference.only_second}
    counts |= {"neither": difference.neither, "questions": difference.questions}
    share = {"difference": difference.share, **difference.interval._asdict()}
    return {"task": difference.task, "metric": difference.metric, **share, **counts}


def _of(value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:
        raise _Damage
    return value


def _evaluation(model: Mapping[str, Any]) -> Evaluation:
    texts = {name: _of(model[name], str) for name in ("model", "path", "weights", "tasks", "tasks_digest")}
    numbers = {"step": _of(model["step"], int, type(None)), "seconds": _of(model["seconds"], int, float)}
    judgements = tuple(_judgement(entry) for entry in _of(model["judgements"], list))
    count = _of(model["num_questions"], int)
    if len({judgement.line for judgement in judgements}) < len(judgements) or len(judgements) > count:
        raise _Damage
    kinds: dict[str, set[str]] = {}
    for judgement in judgements:
        if kinds.setdefault(judgement.task, set(judgement.correct)) != set(judgement.correct):
            raise _Damage
    return Evaluation(**texts, **numbers, num_questions=count, judgements=judgements)


def _judgement(entry: Mapping[str, Any]) -> Judgement:
    correct, log_probs = _of(entry["correct"], dict), entry.get("log_probs")
    if set(correct) not in _METRICS or not all(type(value) is bool for value in correct.values()):
        raise _Damage
    if log_probs is not None:
        log_probs = tuple(_of(value, int, float) for value in _of(log_probs, list))
        if not all(map(math.isfinite, log_probs)):
            raise _Damage
    line, task, text = _of(entry["line"], int), _of(entry["task"], str), _of(entry.get("text"), str, type(None))
    rest = _of(entry.get("unseen_tokens", 0), int), _of(entry.get("name"), str, int, type(None))
    return Judgement(line, task, correct, log_probs, text, *rest)
