"""Optimizers for sliced parameters: any elementwise one of optax, with linear warm-up and cosine decay."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.extend
import jax.numpy as jnp
import optax

from swift.errors import SettingError, check_count, check_number

LAYOUTS = ("decoupled", "coupled")

# Primitives that mix the elements of an array: an update that applies one of these to a whole array is not elementwise.
# Reductions of one-element arrays, which learning-rate schedules use, do not count. Random numbers are listed too,
# because every rank would draw the same ones for its slice.
_MIXING = ("reduce", "dot_general", "sort", "cum", "gather", "scatter", "conv", "fft", "qr", "svd", "eigh", "random")
_PROBE_SHAPE = (128, 128)  # two large dims, where Adafactor factors its moments and Muon orthogonalises


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning-rate schedule.

    Weight decay, if the optimizer has it, applies to every parameter, including norms and embeddings: the optimizer
    sees slices of a layer's flat vector and cannot mask individual parameters.

    Attributes:
        name: elementwise optimizer of optax: ``adamw``, ``sgd``, ``lion``, ...
        options: further keyword arguments of the optimizer.
        peak_learning_rate: learning rate after the warm-up.
        warmup_steps: iterations over which the learning rate rises from zero.
        final_learning_rate: learning rate at the end of the run, reached along a cosine.
        clip_norm: largest global norm of the gradient; None for no clipping.
        layout: ``decoupled``, or ``coupled`` for the baselines' optimizer state, tied to where experts are placed.
    """

    name: str = "adamw"
    options: Mapping[str, Any] = field(default_factory=lambda: {"b1": 0.9, "b2": 0.95, "weight_decay": 0.1})
    peak_learning_rate: float = 1e-3
    warmup_steps: int = 20
    final_learning_rate: float = 1e-4
    clip_norm: float | None = 1.0
    layout: Literal["decoupled", "coupled"] = "decoupled"

    def __post_init__(self) -> None:
        check_number("OptimizerConfig.peak_learning_rate", self.peak_learning_rate, least=0)
        check_number("OptimizerConfig.final_learning_rate", self.final_learning_rate, least=0)
        check_count("OptimizerConfig.warmup_steps", self.warmup_steps, least=0)
        if self.clip_norm is not None:
            check_number("OptimizerConfig.clip_norm", self.clip_norm, above=0)
        if self.layout not in LAYOUTS:
            raise SettingError("OptimizerConfig.layout", self.layout, f"choose one of {', '.join(LAYOUTS)}")


def learning_rate(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Linear warm-up, then a cosine to the final rate at the last iteration, as a function of completed iterations."""
    if config.warmup_steps >= num_steps:
        allowed = f"must be below Experiment.num_steps = {num_steps}"
        raise SettingError("OptimizerConfig.warmup_steps", config.warmup_steps, allowed)
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0 if config.warmup_steps else config.peak_learning_rate,
        peak_value=config.peak_learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=num_steps,
        end_value=config.final_learning_rate,
    )
    # optax counts from zero, which would waste the first iteration at a learning rate of zero.
    return lambda count: schedule(count + 1)


def make_optimizer(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    """Makes the optax transformation and checks that it is valid on slices.

    Clipping is not part of it, because the global norm needs all slices.

    Raises:
        SettingError: optax has no such optimizer, the optimizer rejects the options, or it is not elementwise.
    """
    if not hasattr(optax, config.name) and hasattr(optax.contrib, config.name):
        allowed = (
            "is in optax.contrib, which is not supported: many of its optimizers mix the elements of an array, as "
            "muon does, and every rank updates only a slice of each expert: use adamw, sgd, lion or another "
            "elementwise optimizer"
        )
        raise SettingError("OptimizerConfig.name", config.name, allowed)
    create = getattr(optax, config.name, None)
    if config.name.startswith("_") or not callable(create) or "learning_rate" not in _parameters(create):
        raise SettingError("OptimizerConfig.name", config.name, "optax has no such optimizer; try adamw, sgd or lion")
    options = [name for name in _parameters(create) if name != "learning_rate"]
    unknown = [name for name in config.options if name not in options]
    if unknown:
        allowed = f"optax.{config.name} has no option {unknown[0]!r}; its options are {', '.join(options)}"
        raise SettingError("OptimizerConfig.options", dict(config.options), allowed)
    try:
        optimizer = create(learning_rate(config, num_steps), **config.options)
        mixing = mixing_primitive(optimizer)
    except (TypeError, ValueError) as error:
        allowed = f"does not work with OptimizerConfig.options = {dict(config.options)} ({error})"
        raise SettingError("OptimizerConfig.name", config.name, allowed) from None
    if mixing is not None:
        raise SettingError(
            "OptimizerConfig.name",
            config.name,
            f"is not elementwise (it applies {mixing!r} to a whole array), and every rank updates only a slice of "
            "each expert: use an elementwise optimizer such as adamw, sgd or lion",
        )
    return optimizer


def _parameters(create: Any) -> list[str]:
    try:
        return list(inspect.signature(create).parameters)
    except (TypeError, ValueError):
        return []


def mixing_primitive(optimizer: optax.GradientTransformation) -> str | None:
    """Finds a primitive by which an update mixes the elements of an array; None if the update is elementwise.

    >>> mixing_primitive(optax.sgd(0.1)) is None, mixing_primitive(optax.lamb(0.1))
    (True, 'reduce_sum')
    """
    params = {"probe": jax.ShapeDtypeStruct(_PROBE_SHAPE, jnp.float32)}

    def update(params: Any, gradients: Any) -> Any:
        return optimizer.update(gradients, optimizer.init(params), params)

    return _find_mixing(jax.make_jaxpr(update)(params, params).jaxpr)


def _find_mixing(jaxpr: Any) -> str | None:
    for equation in jaxpr.eqns:
        large = any(getattr(v.aval, "size", 1) > 1 for v in (*equation.invars, *equation.outvars))
        if large and equation.primitive.name.startswith(_MIXING):
            return equation.primitive.name
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(value, "jaxpr", value)
            found = _find_mixing(inner) if hasattr(inner, "eqns") else None
            if found is not None:
                return found
    return None
