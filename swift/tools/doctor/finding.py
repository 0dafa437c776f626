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


def size_text(num_bytes: int) -> str:
    """Formats a number of bytes.

    >>> size_text(64_000_000), size_text(2_500_000_000)
    ('64 MB', '2.5 GB')
    """
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"
