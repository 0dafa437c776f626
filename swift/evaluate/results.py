"""Results of evaluations: judgements, scores, and differences between two models, with 95 % confidence intervals.

A result file is a JSON document with the results of one or several models. It is untrusted: its values are checked when
it is read, and scores are recomputed from the answers instead of taken from the file.
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
"""The 97.5 % quantile of the standard normal distribution."""

DIRECTORY = "evaluations"
"""Subdirectory of a run or model directory that holds its results."""
_FORMAT = 1
_METRICS = ({"accuracy", "accuracy_per_byte"}, {"match"})


class Interval(NamedTuple):
    """Confidence interval with its two bounds."""

    low: float
    high: float


def share_interval(correct: int, count: int) -> Interval:
    """Computes the 95 % Wilson score interval of a share; it is accurate for few questions and shares near 0 and 1.

    Args:
        correct: number of questions that were answered correctly.
        count: total number of questions, at least one.
    """
    square = _QUANTILE**2
    middle = (correct + square / 2) / (count + square)
    half = _QUANTILE / (count + square) * math.sqrt(correct * (count - correct) / count + square / 4)
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return Interval(low if correct else 0.0, high if correct < count else 1.0)


def difference_interval(both: int, only_first: int, only_second: int, neither: int) -> Interval:
    """Computes the 95 % interval for the difference of two models' shares on the same questions: first minus second.

    Questions that are hard for one model are mostly hard for the other, so the interval is narrower than for two
    independent samples. It is Newcombe's square-and-add interval for paired data, based on Wilson's intervals
    (Statistics in Medicine 17, 1998, pages 2635 to 2650, method 10).

    Args:
        both: number of questions that both models answered correctly.
        only_first: number of questions that only the first model answered correctly.
        only_second: number of questions that only the second model answered correctly.
        neither: number of questions that neither model answered correctly. The four counts must not all be 0.
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
    """Estimates the correlation of the two models' answers (phi), with a continuity correction."""
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
    """Answer of a model to a question, and whether it is correct.

    Attributes:
        line: line of the question in the task file.
        task: name of the question's task.
        correct: whether the answer is right, by metric.
        log_probs: log-probability of each choice; None for a question without choices.
        text: text with which the model continued; None for a question with choices.
        unseen_tokens: number of first tokens of the question that did not fit into the model's positions.
        name: ``id`` of the question in the task file, or None.
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
    """Share of a task's questions that a model answered correctly, by one metric.

    Attributes:
        task: name of the task.
        metric: ``accuracy`` (largest log-probability), ``accuracy_per_byte`` (largest log-probability per byte of the
            choice), or ``match``.
        correct: number of questions that were answered correctly.
        questions: number of questions that were answered.
    """

    task: str
    metric: str
    correct: int
    questions: int

    @property
    def share(self) -> float:
        """Share of correct answers."""
        return self.correct / self.questions

    @property
    def interval(self) -> Interval:
        """95 % confidence interval of the share."""
        return share_interval(self.correct, self.questions)


@dataclass(frozen=True)
class Evaluation:
    """A model's answers to the questions in a task file.

    Attributes:
        model: name of the model.
        path: run or model directory.
        step: iteration of the checkpoint; None for a model directory.
        weights: SHA-256 of all weights.
        tasks: name of the task file.
        tasks_digest: SHA-256 of the task file's content.
        num_questions: number of questions in the task file.
        seconds: time that the answers took, in seconds.
        judgements: judged answers, in the order of the file's lines.
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
        """Number of questions whose beginning did not fit into the model's positions."""
        return sum(judgement.unseen_tokens > 0 for judgement in self.judgements)

    @property
    def scores(self) -> list[Score]:
        """Score for every task and metric, in the order of the tasks."""
        counts: dict[tuple[str, str], list[bool]] = defaultdict(list)
        for judgement in self.judgements:
            for metric, is_correct in judgement.correct.items():
                counts[judgement.task, metric].append(is_correct)
        tasks = list(dict.fromkeys(task for task, _ in counts))
        ordered = sorted(counts, key=lambda key: tasks.index(key[0]))
        return [Score(*key, sum(counts[key]), len(counts[key])) for key in ordered]


@dataclass(frozen=True)
class Difference:
    """Difference between two models' scores, over the questions that both have answered.

    Attributes:
        task: name of the task.
        metric: see ``Score``.
        both: number of questions that both models answered correctly.
        only_first: number of questions that only the first model answered correctly.
        only_second: number of questions that only the second model answered correctly.
        neither: number of questions that neither model answered correctly.
    """

    task: str
    metric: str
    both: int
    only_first: int
    only_second: int
    neither: int

    @property
    def questions(self) -> int:
        """Number of questions that both models have answered."""
        return self.both + self.only_first + self.only_second + self.neither

    @property
    def share(self) -> float:
        """Difference between the shares of correct answers: first minus second."""
        return (self.only_first - self.only_second) / self.questions

    @property
    def interval(self) -> Interval:
        """95 % confidence interval of the difference."""
        return difference_interval(self.both, self.only_first, self.only_second, self.neither)


def differences(evaluation: Evaluation, other: Evaluation) -> Iterator[Difference]:
    """Compares two models question by question.

    Args:
        evaluation: answers of the first model.
        other: answers of the second model to the same task file.

    Yields:
        A difference for every task and metric for which both have answered at least one question.
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
    """Builds the results as a JSON document: each model's scores, and its differences from the first model.

    Args:
        evaluations: results of several models for the same task file.
        with_answers: whether to include the answers to all questions.
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
    """Writes a result file atomically.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(exist_ok=True)
    replace_file(path, json.dumps(document_of(evaluations), indent=1, allow_nan=False).encode())


def read_evaluations(path: Path) -> list[Evaluation]:
    """Reads a result file.

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
    """Reads all results in a run or model directory, sorted by task file and iteration.

    Raises:
        SettingError: a file is damaged.
    """
    paths = sorted((directory / DIRECTORY).glob("[!.]*.json"))
    evaluations = [evaluation for path in paths for evaluation in read_evaluations(path)]
    return sorted(evaluations, key=lambda evaluation: (evaluation.tasks, evaluation.tasks_digest, evaluation.step or 0))


class _Damage(Exception):
    """Raised if a result file has a value that Swift never writes."""


def _sparse(judgement: Judgement) -> dict[str, Any]:
    """Returns the fields of a judgement that are neither None nor 0."""
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
