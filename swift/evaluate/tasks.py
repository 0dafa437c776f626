"""Questions with right answers, and the task files that contain them.

A task file has a JSON object on each line: a question, or settings for the later questions of a task. The file is
untrusted: every invalid line is reported, with the field and the allowed values.
"""

import hashlib
import json
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from swift.errors import MAX_TOKENS, SettingError
from swift.files import read_regular

_SHOWN = 60
"""Maximum number of characters of a value that an error message shows."""


@dataclass(frozen=True)
class Selection:
    """Answer key of a question with choices, from which the model chooses the likeliest text.

    Attributes:
        choices: texts that may follow the prompt.
        answer: index of the right choice, from 0.
    """

    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class Completion:
    """Answer key of a question without choices: right texts, or a pattern to find in the model's text.

    Attributes:
        answers: right texts; empty if there is a pattern.
        pattern: regular expression to search for in the model's text.
        extract: regular expression; its first match in the model's text, or the first group of the match if it has
            groups, is compared with the answers instead of the whole text.
        ignore_case: whether to ignore the case of letters.
        stop: texts at which the model's text ends; they are not included in it.
        max_tokens: maximum number of tokens of the model's text.
    """

    answers: tuple[str, ...] = ()
    pattern: str | None = None
    extract: str | None = None
    ignore_case: bool = False
    stop: tuple[str, ...] = ()
    max_tokens: int = 64


@dataclass(frozen=True)
class Question:
    """Question of a task, with its answer key.

    Attributes:
        line: line in the task file, from 1.
        task: name of the task.
        prompt: text that the model is given, including the task's prefix.
        right: answer key.
        name: ``id`` of the question in the task file, or None.
    """

    line: int
    task: str
    prompt: str
    right: Selection | Completion
    name: str | int | None = None

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics to which the question contributes."""
        return ("accuracy", "accuracy_per_byte") if isinstance(self.right, Selection) else ("match",)


def before_stops(text: str, stops: Sequence[str]) -> str:
    """Cuts a text at the first occurrence of any stop text.

    >>> before_stops("Paris.\\nQ: And", [".", "\\n"])
    'Paris'
    """
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def is_match(right: Completion, text: str) -> bool:
    """Whether a model's text is right; white space around the text and the answers is ignored.

    >>> is_match(Completion(("18",), extract=r"#### (-?[0-9]+)"), "9 + 9 are 18\\n#### 18")
    True
    >>> is_match(Completion(("Paris",)), " Paris\\n"), is_match(Completion(pattern="^[0-9]+$"), "seven")
    (True, False)
    """
    flags = re.IGNORECASE if right.ignore_case else re.NOFLAG
    if right.pattern is not None:
        return re.search(right.pattern, text, flags) is not None
    if right.extract is not None:
        match = re.search(right.extract, text, flags)
        if match is None:
            return False
        text = (match[1] if match.re.groups else match[0]) or ""
    return _plain(text, right.ignore_case) in {_plain(answer, right.ignore_case) for answer in right.answers}


def _plain(text: str, ignore_case: bool) -> str:
    return text.strip().casefold() if ignore_case else text.strip()


@dataclass(frozen=True)
class TaskFile:
    """Questions read from a task file.

    Attributes:
        name: name of the file, without directory and suffix.
        digest: SHA-256 of the file's content.
        questions: questions in the order of the file's lines.
    """

    name: str
    digest: str
    questions: tuple[Question, ...]


class _Verbatim(str):
    """Value that error messages show without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


_NOT_GIVEN = _Verbatim("(not given)")


class _Mistake(Exception):
    """Raised if a field in a line is invalid, with its name, its value, and a description of the allowed values."""

    def __init__(self, field: str, value: object, allowed: str):
        super().__init__(field)
        self.field, self.value, self.allowed = field, value, allowed


def read_tasks(path: Path, setting: str = "--tasks") -> tuple[TaskFile, list[SettingError]]:
    """Reads a task file.

    Args:
        path: path of the file.
        setting: name of the argument that specified the file, for error messages.

    Returns:
        (questions of the valid lines, an error for each invalid line).

    Raises:
        SettingError: the file cannot be read, or has neither questions nor invalid lines.
    """
    try:
        content = read_regular(path)
    except OSError as error:
        raise SettingError(setting, str(path), f"cannot be read: {error.strerror}") from error
    questions: list[Question] = []
    mistakes: list[SettingError] = []
    shared: dict[str, dict[str, Any]] = {}
    kinds: dict[str, tuple[str, int]] = {}
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.removeprefix(BOM_UTF8).strip():  # in concatenated files, each file may begin with a byte-order mark
            continue
        try:
            fields = _checked(_object(line))
            task = fields.setdefault("task", path.stem)
            if "prompt" not in fields:
                shared[task] = shared.get(task, {}) | _settings(fields)
                continue
            question = _question(number, shared.get(task, {}) | fields)
            kind, first = kinds.setdefault(task, (type(question.right).__name__, number))
            if kind != type(question.right).__name__:
                allowed = f"must be given for all questions of a task or for none, and line {first} differs"
                raise _Mistake("choices", fields.get("choices", _NOT_GIVEN), allowed)
            questions.append(question)
        except _Mistake as mistake:
            where = f"{path}, line {number}" + (f", {mistake.field}" if mistake.field else "")
            mistakes.append(SettingError(where, _shown(mistake.value), mistake.allowed))
    if not questions and not mistakes:
        raise SettingError(setting, str(path), "must have at least one line with a prompt")
    return TaskFile(path.stem, hashlib.sha256(content).hexdigest(), tuple(questions)), mistakes


def _object(line: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise _Mistake(twice, pairs[-1][1], "must be given once")
        return dict(pairs)

    try:
        fields = json.loads(line.decode("utf-8").removeprefix("\ufeff"), object_pairs_hook=once)
    except (ValueError, RecursionError):  # a UnicodeDecodeError is a ValueError
        raise _Mistake("", line.decode("utf-8", "replace"), "must be a JSON object in UTF-8") from None
    if not isinstance(fields, dict):
        raise _Mistake("", fields, 'must be a JSON object, such as {"prompt": ..., "answer": ...}')
    return fields


def _is_text(value: object) -> bool:
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _is_filled(value: object) -> bool:
    return _is_text(value) and value != ""


def _is_list(value: object, holds: Callable[[object], bool], least: int) -> bool:
    return isinstance(value, list) and len(value) >= least and all(map(holds, value))


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_choices(value: object) -> bool:
    return _is_list(value, lambda choice: _is_text(choice) and bool(str(choice).strip()), 2)


def _is_regex(value: object) -> bool:
    if not _is_filled(value):
        return False
    try:
        re.compile(str(value))
    except (re.error, OverflowError, RecursionError) as error:
        first = (str(error).splitlines() or ["it is too deep"])[0]
        raise _Mistake("", value, f"must be a regular expression of Python: {first}") from None
    return True


_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "task": (_is_filled, "must be a text that is not empty"),
    "id": (lambda value: _is_text(value) or _is_count(value, 0), "must be a text or a whole number of at least 0"),
    "prefix": (_is_text, "must be a text"),
    "prompt": (_is_text, "must be a text"),
    "choices": (_is_choices, "must be a list of at least two texts, each with more than white space"),
    "answer": (
        lambda value: _is_text(value) or _is_count(value, 0) or _is_list(value, _is_text, 1),
        "must be the number of a choice, from 0, or without choices a text or a list of texts",
    ),
    "pattern": (_is_regex, "must be a regular expression"),
    "extract": (_is_regex, "must be a regular expression"),
    "ignore_case": (lambda value: isinstance(value, bool), "must be true or false"),
    "stop": (
        lambda value: _is_filled(value) or _is_list(value, _is_filled, 0),
        "must be a text or a list of texts, none of them empty",
    ),
    "max_tokens": (
        lambda value: _is_count(value, 1) and value <= MAX_TOKENS,
        f"must be a whole number from 1 to {MAX_TOKENS:,}",
    ),
}
"""Check of each field's value, and a description of the allowed values."""
_OF_ONE = ("answer", "pattern", "id")
"""Fields of a single question, which a line of settings cannot have."""
_OF_COMPLETIONS = ("pattern", "extract", "ignore_case", "stop", "max_tokens")


def _checked(fields: dict[str, Any]) -> dict[str, Any]:
    """Checks each field independently of the others."""
    for name, value in fields.items():
        if name not in _FIELDS:
            raise _Mistake(name, value, f"is not a field: a line has {', '.join(_FIELDS)}")
        is_allowed, allowed = _FIELDS[name]
        try:
            if not is_allowed(value):
                raise _Mistake(name, value, allowed)
        except _Mistake as mistake:
            raise _Mistake(name, value, mistake.allowed) from None
    return fields


def _settings(fields: dict[str, Any]) -> dict[str, Any]:
    """Checks a line without a prompt, and returns its settings for the later questions of the task."""
    for name in _OF_ONE:
        if name in fields:
            raise _Mistake("prompt", _NOT_GIVEN, f"must be given with {name}")
    return {name: value for name, value in fields.items() if name != "task"}


def _question(line: int, fields: Mapping[str, Any]) -> Question:
    prompt = fields.get("prefix", "") + fields["prompt"]
    right = _selection(fields) if "choices" in fields else _completion(fields)
    return Question(line, fields["task"], prompt, right, fields.get("id"))


def _selection(fields: Mapping[str, Any]) -> Selection:
    for name in _OF_COMPLETIONS:
        if name in fields:
            raise _Mistake(name, fields[name], "cannot be combined with choices")
    choices, answer = fields["choices"], fields.get("answer", _NOT_GIVEN)
    twice = next((choice for choice in choices if choices.count(choice) > 1), None)
    if twice is not None:
        raise _Mistake("choices", twice, "must be different texts")
    if not _is_count(answer, 0) or answer >= len(choices):
        raise _Mistake("answer", answer, f"must be the number of a choice, from 0 to {len(choices) - 1}")
    return Selection(tuple(choices), answer)


def _completion(fields: Mapping[str, Any]) -> Completion:
    answer, pattern = fields.get("answer"), fields.get("pattern")
    if answer is None and pattern is None:
        raise _Mistake("answer", _NOT_GIVEN, "must be given, or a pattern, or choices and the number of the right one")
    if answer is not None and pattern is not None:
        raise _Mistake("pattern", pattern, "cannot be combined with an answer")
    if isinstance(answer, int):
        raise _Mistake("answer", answer, "must be a text or a list of texts; or give choices instead")
    if pattern is not None and "extract" in fields:
        raise _Mistake("extract", fields["extract"], "needs an answer, and cannot be combined with a pattern")
    stop = fields.get("stop", ())
    return Completion(
        (answer,) if isinstance(answer, str) else tuple(answer or ()),
        pattern,
        fields.get("extract"),
        fields.get("ignore_case", False),
        (stop,) if isinstance(stop, str) else tuple(stop),
        fields.get("max_tokens", Completion.max_tokens),
    )


def _shown(value: object) -> object:
    """Formats a value for an error message, and truncates it if it is long."""
    text = value if isinstance(value, _Verbatim) else json.dumps(value)
    return _Verbatim(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
