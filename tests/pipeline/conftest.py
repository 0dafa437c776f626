"""Pipelines beside their plain models, each built once for all tests."""

from collections.abc import Callable
from functools import cache

import pytest

from tests.pipeline.cases import Case
from tests.pipeline.rig import Rig


@cache
def _rig(case: Case) -> Rig:
    return Rig(case)


@pytest.fixture(scope="session", name="rig")
def make_rig() -> Callable[..., Rig]:
    """The rig of a case, given the fields of ``Case`` that are not as usual; the same one for the same case."""
    return lambda **fields: _rig(Case(**fields | {"failed": frozenset(fields.get("failed", ()))}))
