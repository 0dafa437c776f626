"""Results as files: one JSON document of one or several models, which anybody may have made.

What is read is checked; a score is counted anew from the answers, never taken from the file.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from swift.errors import SettingError
from swift.evaluate.results import Difference, Evaluation, Judgement, Score, differences
from swift.files import read_regular, replace_file

DIRECTORY = "evaluations"
"""Directory of a run or a model in which its results are."""
_FORMAT = 1
_METRICS = ({"accuracy", "accuracy_per_byte"}, {"match"})


def document_of(evaluations: Sequence[Evaluation], *, with_answers: bool = True) -> dict[str, Any]:
    """Makes the document of results: scores of each model, and differences of each from the first.

    Args:
        evaluations: results, all of one task file.
        with_answers: whether to include the answer to every question.
    """
    first, models = evaluations[0], []
    for one in evaluations:
        answers = {"judgements": [_sparse(judgement) for judgement in one.judgements]} if with_answers else {}
        facts = {field.name: getattr(one, field.name) for field in fields(one) if field.name != "judgements"}
        scores = [_score(score) for score in one.scores]
        models.append({**facts, "complete": one.is_complete, "cut": one.num_cut, "scores": scores, **answers})
    pairs = [
        {"model": other.model, "less": first.model, **_difference(found)}
        for other in evaluations[1:]
        for found in differences(other, first)
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
    found = [one for path in paths for one in read_evaluations(path)]
    return sorted(found, key=lambda one: (one.tasks, one.tasks_digest, one.step or 0))


class _Damage(Exception):
    """A value that no results have."""


def _sparse(judgement: Judgement) -> dict[str, Any]:
    """The fields of a judgement that are not empty."""
    return {name: value for name, value in asdict(judgement).items() if value is not None and value != 0}


def _score(score: Score) -> dict[str, Any]:
    counts = {"correct": score.correct, "questions": score.questions}
    return {"task": score.task, "metric": score.metric, "share": score.share, **score.interval._asdict(), **counts}


def _difference(found: Difference) -> dict[str, Any]:
    counts = {"both": found.both, "only_model": found.only_first, "only_less": found.only_second}
    counts |= {"neither": found.neither, "questions": found.questions}
    share = {"difference": found.share, **found.interval._asdict()}
    return {"task": found.task, "metric": found.metric, **share, **counts}


def _of(value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:
        raise _Damage
    return value


def _evaluation(model: Mapping[str, Any]) -> Evaluation:
    texts = {name: _of(model[name], str) for name in ("model", "path", "weights", "tasks", "tasks_digest")}
    numbers = {"step": _of(model["step"], int, type(None)), "seconds": _of(model["seconds"], int, float)}
    judgements = tuple(_judgement(one) for one in _of(model["judgements"], list))
    count = _of(model["num_questions"], int)
    if len({one.line for one in judgements}) < len(judgements) or len(judgements) > count:
        raise _Damage
    kinds: dict[str, set[str]] = {}
    for one in judgements:
        if kinds.setdefault(one.task, set(one.correct)) != set(one.correct):
            raise _Damage
    return Evaluation(**texts, **numbers, num_questions=count, judgements=judgements)


def _judgement(one: Mapping[str, Any]) -> Judgement:
    correct, log_probs = _of(one["correct"], dict), one.get("log_probs")
    if set(correct) not in _METRICS or not all(type(value) is bool for value in correct.values()):
        raise _Damage
    if log_probs is not None:
        log_probs = tuple(_of(value, int, float) for value in _of(log_probs, list))
        if not all(map(math.isfinite, log_probs)):
            raise _Damage
    line, task, text = _of(one["line"], int), _of(one["task"], str), _of(one.get("text"), str, type(None))
    rest = _of(one.get("unseen_tokens", 0), int), _of(one.get("name"), str, int, type(None))
    return Judgement(line, task, correct, log_probs, text, *rest)
