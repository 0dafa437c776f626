"""Cases of a parametrized test by how often they are run."""

from collections.abc import Collection, Mapping
from typing import Any

import pytest

QUICK_TESTS = "not slow and not long"
"""Expression of pytest's ``-m`` for ``make test``."""
LONG_TESTS = "long and not slow"
"""The same for ``make test-long``, which CI runs, too."""


def tiered(cases: Mapping[str, Any], quick: Collection[str], long: Collection[str] = ()) -> list[Any]:
    """Marks named cases: those that are neither quick nor long are slow."""
    unknown = {*quick, *long} - cases.keys()
    assert not unknown, f"there are no cases {sorted(unknown)}"
    marks = {name: () if name in quick else (pytest.mark.long if name in long else pytest.mark.slow,) for name in cases}
    return [pytest.param(case, marks=marks[name], id=name) for name, case in cases.items()]
