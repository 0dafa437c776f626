"""Double precision for whole runs, and programs that those of a module share."""

import jax
import pytest

from tests.shared_programs import shared_programs


@pytest.fixture(scope="module")
def double_precision():
    """Sets double precision as the command line does: in all threads, those that load a checkpoint included."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture(scope="module", autouse=True)
def programs():
    """Each program is compiled once for the runs of a module that have the same settings."""
    with shared_programs({}):
        yield
