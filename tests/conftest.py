"""Eight emulated devices for all tests, and no silent broadcasts."""

from pathlib import Path

import jax
import pytest

from swift.mesh import emulate_devices

emulate_devices(8)
# Many tests compile the same small programs, some in another process.
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent.parent / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
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
