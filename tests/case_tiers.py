"""Cases of a parametrized test by how often they are run."""

from collections.abc import Collection, Sequence
from typing import Any

import pytest

QUICK_TESTS = "not slow and not long"
"""Expression of pytest's ``-m`` for ``make test``."""
LONG_TESTS = "long and not slow"
"""The same for ``make test-long``, which CI runs, too."""


def tiered(cases: Sequence[Any], quick: Collection[int], long: Collection[int] = ()) -> list[Any]:
    """Marks cases, by number: those that are neither quick nor long are slow."""
    marks = [[] if n in quick else [pytest.mark.long if n in long else pytest.mark.slow] for n in range(len(cases))]
    return [pytest.param(case, marks=of) for case, of in zip(cases, marks, strict=True)]
