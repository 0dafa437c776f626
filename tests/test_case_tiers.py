"""Tiers of cases: each is in one, and a name that no case has is a mistake."""

import pytest

from tests.case_tiers import tiered


def test_cases_that_are_not_named_are_slow():
    found = tiered({"a": 1, "b": 2, "c": 3}, quick=("c",), long=("a",))
    assert [(one.id, one.values, [mark.name for mark in one.marks]) for one in found] == [
        ("a", (1,), ["long"]),
        ("b", (2,), ["slow"]),
        ("c", (3,), []),
    ]


def test_a_name_that_no_case_has_is_refused():
    with pytest.raises(AssertionError, match=r"there are no cases \['d', 'e'\]"):
        tiered({"a": 1}, quick=("a", "d"), long=("e",))
