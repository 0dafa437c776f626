"""Double precision for whole runs."""

import jax
import pytest


@pytest.fixture(scope="module")
def double_precision():
    """Sets double precision as the command line does: in all threads, those that load a checkpoint included."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
