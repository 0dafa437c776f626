"""A run of four workers and an elastic one of four ranks, each in its first generation."""

import pytest

from swift.elastic.membership.messages import ActivateGeneration
from tests.elastic.membership.script import RANKS, Script, script_live


@pytest.fixture
def live():
    """A run whose first generation is live, with everybody in iteration 5."""
    return script_live()


@pytest.fixture
def elastic():
    """The same of an elastic run of four ranks."""
    script = Script(RANKS, is_elastic=True)
    script.start(*RANKS)
    script.ready(*RANKS)
    script.tick()
    script.formed(dict.fromkeys(RANKS, ()))
    assert script.tick() == [ActivateGeneration(1, None)]
    script.beat(dict.fromkeys(RANKS, 5))
    return script
