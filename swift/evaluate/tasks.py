"""Questions to a model, and the answers that are right."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Selection:
    """One of several texts is right: that which the model finds likeliest.

    Attributes:
        choices: texts that may follow the prompt.
        answer: number of the right one, from 0.
    """

    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class Completion:
    """The text with which the model continues is right if it is one of some texts, or if a pattern is found in it.

    Attributes:
        answers: right texts; none where there is a pattern.
        pattern: regular expression that a right text has somewhere.
        extract: regular expression whose first match is compared with the answers: its first group, if it has groups.
        ignore_case: whether capital letters count as small ones.
        stop: texts at which the model's ends; they are not part of it.
        max_tokens: its tokens at most.
    """

    answers: tuple[str, ...] = ()
    pattern: str | None = None
    extract: str | None = None
    ignore_case: bool = False
    stop: tuple[str, ...] = ()
    max_tokens: int = 64


@dataclass(frozen=True)
class Question:
    """A question of a task.

    Attributes:
        line: its line in the task file, from 1.
        task: name of the task.
        prompt: text that the model is given, with its prefix.
        right: what is right.
        name: the ``id`` that the file gives it.
    """

    line: int
    task: str
    prompt: str
    right: Selection | Completion
    name: str | int | None = None

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        """Names of the scores that it counts for."""
        return ("accuracy", "accuracy_per_byte") if isinstance(self.right, Selection) else ("match",)


def before_stops(text: str, stops: Sequence[str]) -> str:
    """Cuts a text where the first of several others begins.

    >>> before_stops("Paris.\\nQ: And", [".", "\\n"])
    'Paris'
    """
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def is_match(right: Completion, text: str) -> bool:
    """Tells whether a model's text is right; white space around it and around the answers does not count.

    >>> is_match(Completion(("18",), extract=r"#### (-?[0-9]+)"), "9 + 9 are 18\\n#### 18")
    True
    >>> is_match(Completion(("Paris",)), " Paris\\n"), is_match(Completion(pattern="^[0-9]+$"), "seven")
    (True, False)
    """
    flags = re.IGNORECASE if right.ignore_case else re.NOFLAG
    if right.pattern is not None:
        return re.search(right.pattern, text, flags) is not None
    if right.extract is not None:
        found = re.search(right.extract, text, flags)
        if found is None:
            return False
        text = (found[1] if found.re.groups else found[0]) or ""
    return _plain(text, right.ignore_case) in {_plain(answer, right.ignore_case) for answer in right.answers}


def _plain(text: str, ignore_case: bool) -> str:
    return text.strip().casefold() if ignore_case else text.strip()
