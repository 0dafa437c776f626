"""Runs of real processes that heed marks, see ``hooks``."""

import os

import pytest

from tests.elastic import runs
from tests.elastic.moved_blocks.runs_with_moves import HOOKS


@pytest.fixture
def marks(tmp_path, monkeypatch):
    """The directory of the marks; all Python processes from now on heed them."""
    paths = [str(HOOKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setattr(runs, "PATIENCE_S", 3600)
    return tmp_path
