"""Double precision for whole runs, and programs that they share."""

import jax
import pytest

from tests.shared_programs import shared_programs


@pytest.fixture(scope="module")
def double_precision():
    """Sets double precision as the command line does: in all threads, those that load a checkpoint included."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture(scope="session")
def compiled():
    """Programs that runs of this process have compiled."""
    return {}


@pytest.fixture(scope="module", autouse=True)
def programs(compiled):
    """Each program is compiled once for the runs that have the same settings."""
    with shared_programs(compiled):
        yield
