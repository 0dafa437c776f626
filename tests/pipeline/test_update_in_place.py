"""The update writes the optimizer's state where it is."""

import re

import jax.numpy as jnp
import pytest

from swift.mesh.per_rank import RANKED
from swift.pipeline.step.update import EmbeddingAndHead, apply_gradients

pytestmark = pytest.mark.usefixtures("x64")


def test_an_update_on_cpus_copies_no_state(rig):
    """The compiled program has no copy of master weights or moments, whose old buffers are donated."""
    spec = rig(topology=(1, 1, 2), window=1).spec
    state = spec.abstract(with_slots=True)

    def update(state, gradients):
        popularity_LE = jnp.zeros((spec.num_moe_layers, spec.experts.num_classes), jnp.int32)
        return apply_gradients(spec, state, gradients, popularity_LE, EmbeddingAndHead(True, True))

    jitted = spec.jitted(update, (spec.specs, RANKED), spec.specs, donate_argnums=0)
    program = jitted.lower(state, state.master).compile().as_text()
    entry = program[program.index("ENTRY") :]
    arrays = re.findall(r"(%\S+) = f64\[1,\S+ parameter", entry)
    assert len(arrays) >= 3 * len(spec.layouts)
    assert [name for name in arrays if re.search(rf" copy\({re.escape(name)}\)", entry)] == []
