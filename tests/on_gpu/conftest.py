"""Tests that need one NVIDIA GPU: each is skipped on a machine without (``make test-gpu``)."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    here = [item for item in items if HERE in item.path.parents]
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        for item in here:
            item.add_marker(pytest.mark.skip(reason="this machine has no NVIDIA GPU"))
