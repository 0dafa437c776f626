"""Findings: one line each."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "note", "missing"]
"""Whether something is as it should be, may cost speed or concern some runs only, or is in the way of a run."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        topic: what it belongs to, a word.
        verdict: whether it is as it should be.
        text: what was found, and what to do where it is not as it should be.
    """

    topic: str
    verdict: Verdict
    text: str
