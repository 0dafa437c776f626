"""Memory of the host while a state is converted for another cut, as NumPy tells it to Python."""

import tracemalloc
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

from swift.experts.state_layouts import Decoupled
from swift.pipeline.reconfigure.reshard import _reshard_group

STAGES, LAYERS, CLASSES, SIZE = 16, 2, 3, 1000


def spec(num_stages, num_ranks):
    """Stand-in for a spec whose stages have equally many blocks, with the attributes that a conversion reads."""
    index = np.arange(STAGES * LAYERS).reshape(num_stages, -1)
    layout = Decoupled(CLASSES, SIZE, num_ranks, jnp.dtype("float32"), jnp.dtype("float32"))
    return SimpleNamespace(layouts={"expert": layout}, model_index={"expert": index}, num_stages=num_stages)


def test_a_group_is_in_memory_twice_at_most():
    """Beside what is given: the group whole and converted, and a stage's part of either, of 16 and 8 stages."""
    old, new = spec(STAGES, 2), spec(STAGES // 2, 4)
    whole = np.random.default_rng(0).standard_normal((STAGES * LAYERS, CLASSES, SIZE), np.float32)
    given = np.stack([old.layouts["expert"].init(part, None) for part in whole.reshape(STAGES, LAYERS, CLASSES, SIZE)])
    tracemalloc.start()
    found = _reshard_group("expert", given, old, new)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    wanted = whole.reshape(STAGES // 2, 2 * LAYERS, CLASSES, 4, -1).swapaxes(2, 3)
    np.testing.assert_array_equal(found, wanted)
    assert peak < 2.3 * whole.nbytes
