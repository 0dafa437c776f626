"""A program without what only its compiler needed is smaller, and computes the same bit for bit."""

import pickle
import pickletools

import jax
import jaxlib
import numpy as np
import pytest
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from swift.pipeline.reconfigure import trimming
from swift.pipeline.reconfigure.executable_cache import ExecutableCache
from swift.pipeline.reconfigure.trimming import trimmed
from tests.compiling import compiled_as_in_a_run

pytestmark = pytest.mark.long
CASE = {"topology": (2, 2, 1), "failed": {(1, 0)}, "dtype": "float32"}


@pytest.fixture(scope="module")
def compiled(rig):
    """A window with experts, loops, branches and unequal peers, without JAX's own cache, as the processes of a run."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    one = rig(**CASE)
    drawn = one.draw(0)
    inputs = one.start(drawn), *one.put_table(one.table), one.put_batches(drawn.batches, one.table)
    with compiled_as_in_a_run():
        step = one.step.lower(*inputs).compile()
    yield one, step, serialize_executable.serialize(step)[0]  # a sort that has run cannot be serialized
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture
def payload(compiled):
    return compiled[2]


def test_programs_are_kept_as_they_were_compiled_unless_asked_for(compiled, tmp_path):
    one, step, _ = compiled
    kept = ExecutableCache(tmp_path).get("window", lambda: step, list(one.spec.live.mesh.devices.flat))
    assert kept.as_text().count(" fusion(") == step.as_text().count(" fusion(")


def test_a_program_that_was_kept_leaves_bit_for_bit_what_the_compiled_one_does(compiled, tmp_path):
    one, step, _ = compiled
    kept = ExecutableCache(tmp_path, trims=True).get("window", lambda: step, list(one.spec.live.mesh.devices.flat))
    assert kept.as_text().count(" fusion(") < step.as_text().count(" fusion(") / 2
    for seed in range(2):
        drawn = one.draw(seed)
        jax.tree.map(np.testing.assert_array_equal, *(jax.device_get(one.run(drawn, which)) for which in (step, kept)))


@pytest.mark.slow
@pytest.mark.skipif(
    not jaxlib.__version__.startswith(trimming._TRIED), reason="programs of this version are left as they are"
)
def test_it_is_much_smaller_and_is_not_trimmed_twice(payload):
    less = trimmed(payload)
    assert len(less) < 0.7 * len(payload)
    assert trimmed(less) == less


@pytest.mark.parametrize("damage", [lambda program: bytes(len(program)), lambda program: program[: len(program) // 2]])
def test_what_is_not_understood_stays_as_it_is(damage, payload, monkeypatch):
    monkeypatch.setattr(trimming, "_TRIED", (jaxlib.__version__,))
    program = max((part for _, part, _ in pickletools.genops(payload) if isinstance(part, bytes)), key=len)
    for other in (pickle.dumps(("exec", damage(program), 1)), pickle.dumps(1), b"no pickle"):
        assert trimmed(other) == other


def test_programs_of_other_versions_stay_as_they_are(payload, monkeypatch):
    monkeypatch.setattr(jaxlib, "__version__", "0.99")
    assert trimmed(payload) is payload
