"""A run of processes that has gone for three iterations."""

import pytest

from tests.elastic.reporting.histories import ALL, History


@pytest.fixture
def live():
    """Two seconds to start, then three iterations of a second each; all are in the fourth."""
    history = History().start(*ALL).at(2).form(held=()).enter(1)
    for step in (1, 2, 3):
        history.at(2 + step).finish(step).enter(step + 1)
    return history
