"""Eight emulated devices for all tests, and no silent broadcasts."""

import jax
import pytest

from swift.mesh import emulate_devices

emulate_devices(8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="module")
def x64():
    """Double precision for the tests of a module."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def strict_types():
    """No silent change of type; optax and Flax do not keep to it, so only code of ours alone is held to it."""
    with jax.numpy_dtype_promotion("strict"):
        yield
