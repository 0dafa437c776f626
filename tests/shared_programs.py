"""Programs that runs of one process share under pytest: a short run mostly traces and compiles its step."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import pytest

from swift.checkpoint.config import CheckpointConfig
from swift.config.experiment import Experiment
from swift.data.config import DataConfig
from swift.pipeline.reconfigure.compiled_steps import Steps, program_key
from swift.train import build

NOT_COMPILED: dict[str, Any] = {
    "data": DataConfig(),
    "failures": (),
    "checkpoint": CheckpointConfig(every=0),
    "seed": 0,
    "eval_every": 0,
    "num_eval_batches": 1,
    "patience": None,
    "min_improvement": 0.0,
    "target_loss": None,
}
"""Settings that no program depends on, but for the size of the vocabulary and the separator of documents."""


@contextmanager
def shared_programs(kept: dict[Any, Any]) -> Iterator[None]:
    """Has runs take the programs that others with the same settings have compiled, as long as the context lasts.

    Programs that are compiled quickly and those compiled as a run does are kept apart. A test that patches what is
    traced must not use shared programs: it would be given, or leave to others, what was traced otherwise.

    Args:
        kept: the programs by what they depend on; it is added to.
    """
    make_spec, get = build.make_step_spec, Steps._get

    def step_spec(experiment: Experiment, *given: Any) -> Any:
        spec = make_spec(experiment, *given)
        if type(experiment) is Experiment:
            object.__setattr__(spec.gpt, "compiled_as", (*compiled_as(experiment), spec.gpt.separator))
        return spec

    def get_shared(steps: Steps, kind: Any) -> Any:
        settings = getattr(steps.spec.gpt, "compiled_as", None)
        if settings is None:
            return get(steps, kind)
        program = program_key(steps.configuration, steps.spec.live.num_ranks, kind, keep_state=steps._keeps_state)
        where = repr(steps.spec.live.rows), tuple(device.id for device in steps.spec.live.mesh.devices.flat)
        options = jax.config.read("jax_enable_x64"), jax.config.read("jax_disable_most_optimizations")
        key = settings, repr(program), where, steps._num_sequences, options
        if key not in kept:
            kept[key] = get(steps, kind)
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "make_step_spec", step_spec)
        patch.setattr(Steps, "_get", get_shared)
        yield


def compiled_as(experiment: Experiment) -> Any:
    """The settings that a program depends on; classes of the user's own stand for their code."""
    own = experiment.placement, experiment.optimizer.transformation, experiment.optimizer.schedule
    return repr(replace(experiment, **NOT_COMPILED)), experiment.vocab_size, tuple(map(type, own))
