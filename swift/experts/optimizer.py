"""Optimizers for sliced parameters: any elementwise one of optax, with linear warm-up and cosine decay.

Some parameters can be excluded from weight decay. An excluded parameter is passed to the optimizer as zero. This gives
the update without decay if all the optimizer does with the parameters is to scale them and add them to the gradients
(L2 regularization) or to the updates (decoupled weight decay). A trial checks this condition:

    update(g, p) = update(g + c * p, 0) + d * p    with c >= 0 and d <= 0
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from swift.errors import SettingError, check_choices, check_count, check_number, error_line
from swift.experts.elementwise import why_not_elementwise

_NUM_ELEMENTS, _NUM_STEPS, _TOLERANCE = 256, 4, 1e-3
"""Elements, updates and relative tolerance of the trial that checks whether parameters affect only weight decay."""


class CustomOptimizer(Protocol):
    """Interface of a user's optimizer: a frozen dataclass, so that a configuration can name it.

    The transformation has to be elementwise, since every rank updates only a slice of each expert, in arrays of any
    shape. If weight decay applies only to matrices, the other parameters are passed as zeros, so the transformation
    must not use parameters for anything but weight decay.
    """

    @property
    def name(self) -> str:
        """Short name, stored in checkpoints to identify the optimizer that the moments belong to."""

    def make(self, learning_rate: optax.Schedule) -> optax.GradientTransformation:
        """Builds the transformation, such as an ``optax.chain``; the gradients that it receives are already clipped."""


class CustomSchedule(Protocol):
    """Interface of a user's learning-rate schedule: a frozen dataclass, so that a configuration can name it."""

    def schedule(self, num_steps: int) -> optax.Schedule:
        """Builds a function from the number of completed iterations to the learning rate; JAX traces the function.

        Args:
            num_steps: number of iterations of the run.
        """


@dataclass(frozen=True)
class OptimizerConfig:
    """Configuration of the optimizer and its learning-rate schedule.

    Attributes:
        name: elementwise optimizer of optax or optax.contrib: ``adamw``, ``sgd``, ``lion``, ``ademamix``, ...
        options: further keyword arguments of the optimizer.
        transformation: your own optimizer, instead of ``name`` and ``options``; None to use these.
        schedule: your own learning-rate schedule, instead of warm-up and cosine; None to use these.
        decayed: parameters to which weight decay applies: ``all``, or ``matrices``, which excludes embeddings, norms
            and biases.
        peak_learning_rate: learning rate after the warm-up.
        warmup_steps: iterations over which the learning rate rises from zero; None for 20, or for half of the
            iterations up to the end of the cosine if these are at most 20.
        final_learning_rate: learning rate at the end of the cosine and afterwards.
        decay_steps: iteration at which the cosine ends; None for the last one of the run.
        clip_norm: maximum global norm of the gradient; None for no clipping.
        moments: dtype of the moments: ``master`` for the dtype of the master weights, or ``bfloat16``, in which
            averages with a decay rate above 0.99 stop changing.
        memory: location of master weights and moments between updates: ``device``, or ``pinned_host``, from which an
            update fetches one layer at a time.
        layout: location of the experts' optimizer state: ``decoupled`` from their placement, or ``coupled`` to it, as
            in the baselines.
    """

    name: str = "adamw"
    options: Mapping[str, Any] = field(default_factory=lambda: {"b1": 0.9, "b2": 0.95, "weight_decay": 0.1})
    transformation: CustomOptimizer | None = None
    schedule: CustomSchedule | None = None
    decayed: Literal["all", "matrices"] = "all"
    peak_learning_rate: float = 1e-3
    warmup_steps: int | None = None
    final_learning_rate: float = 1e-4
    decay_steps: int | None = None
    clip_norm: float | None = 1.0
    layout: Literal["decoupled", "coupled"] = "decoupled"
    moments: Literal["master", "bfloat16"] = "master"
    memory: Literal["device", "pinned_host"] = "device"

    def __post_init__(self) -> None:
        check_number("OptimizerConfig.peak_learning_rate", self.peak_learning_rate, least=0)
        check_number("OptimizerConfig.final_learning_rate", self.final_learning_rate, least=0)
        if self.warmup_steps is not None:
            check_count("OptimizerConfig.warmup_steps", self.warmup_steps, least=0)
        if self.decay_steps is not None:
            check_count("OptimizerConfig.decay_steps", self.decay_steps, least=1)
        if self.clip_norm is not None:
            check_number("OptimizerConfig.clip_norm", self.clip_norm, above=0)
        check_choices(self)

    @property
    def moments_of(self) -> str:
        """Name of the optimizer, by which a checkpoint identifies its moments."""
        return self.name if self.transformation is None else self.transformation.name


def with_warmup(config: OptimizerConfig, num_steps: int) -> OptimizerConfig:
    """Fills in ``warmup_steps`` if it is None, since its default depends on the length of the run.

    >>> [with_warmup(OptimizerConfig(), num_steps).warmup_steps for num_steps in (1, 10, 20, 21, 300)]
    [0, 5, 10, 20, 20]
    """
    if config.warmup_steps is not None:
        return config
    end = config.decay_steps or num_steps
    return replace(config, warmup_steps=20 if end > 20 else end // 2)


def learning_rate(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Returns the learning rate as a function of completed iterations: warm-up, cosine, then the final rate.

    Raises:
        SettingError: the warm-up is too long, or the user's schedule cannot be traced or does not return a number.
    """
    if config.schedule is not None:
        return _own_schedule(config.schedule, num_steps)
    name, end = ("OptimizerConfig.decay_steps", config.decay_steps)
    if end is None:
        name, end = ("num_steps", num_steps)
    warmup_steps = with_warmup(config, num_steps).warmup_steps or 0
    if warmup_steps >= end:
        raise SettingError("OptimizerConfig.warmup_steps", warmup_steps, f"must be below {name} = {end}")
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0 if warmup_steps else config.peak_learning_rate,
        peak_value=config.peak_learning_rate,
        warmup_steps=warmup_steps,
        decay_steps=end,
        end_value=config.final_learning_rate,
    )
    # optax counts from zero, which would waste the first iteration at a learning rate of zero.
    return lambda count: schedule(count + 1)


def make_optimizer(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    """Builds the optax transformation, with moments in the configured dtype, and checks that it works on slices.

    Clipping is not included, because the global norm needs the slices of all ranks.

    Raises:
        SettingError: optax has no such optimizer, the optimizer rejects the options, it is not elementwise, or it has
            no weight decay from which parameters could be excluded.
    """
    optimizer = _checked_optimizer(config, num_steps)
    return optimizer if config.moments == "master" else _narrow_moments(optimizer, jnp.bfloat16)


def _checked_optimizer(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    if config.transformation is not None:
        return _own_optimizer(config, learning_rate(config, num_steps))
    library = optax if hasattr(optax, config.name) else optax.contrib
    create, name = getattr(library, config.name, None), f"{library.__name__}.{config.name}"
    if config.name.startswith("_") or not callable(create) or "learning_rate" not in _parameters(create):
        raise SettingError("OptimizerConfig.name", config.name, "optax has no such optimizer; try adamw, sgd or lion")
    options = [name for name in _parameters(create) if name != "learning_rate"]
    unknown = [name for name in config.options if name not in options]
    if unknown:
        allowed = f"{name} has no option {unknown[0]!r}; its options are {', '.join(options)}"
        raise SettingError("OptimizerConfig.options", dict(config.options), allowed)
    try:
        optimizer = create(learning_rate(config, num_steps), **config.options)
        reason = why_not_elementwise(optimizer)
        decays = reason or config.decayed == "all" or _uses_params_only_for_decay(create(0.1, **config.options))
    except (TypeError, ValueError) as error:
        allowed = f"does not work with OptimizerConfig.options = {dict(config.options)} ({error})"
        raise SettingError("OptimizerConfig.name", config.name, allowed) from None
    if reason is not None:
        raise SettingError("OptimizerConfig.name", config.name, _not_elementwise(reason))
    if config.decayed != "all" and "weight_decay" not in options:
        allowed = f"needs an optimizer with weight decay, such as adamw or lion, and {name} has none"
        raise SettingError("OptimizerConfig.decayed", config.decayed, allowed)
    if not decays:
        raise SettingError("OptimizerConfig.decayed", config.decayed, _more_than_decay("name", config.name))
    return optimizer


def _own_schedule(custom: CustomSchedule, num_steps: int) -> optax.Schedule:
    try:
        schedule = custom.schedule(num_steps)
        rate = jax.eval_shape(lambda count: jnp.asarray(schedule(count)), jax.ShapeDtypeStruct((), jnp.int32))
    except Exception as error:  # raised by the user's code
        allowed = f"cannot be traced: {error_line(error)}"
        raise SettingError("OptimizerConfig.schedule", custom, allowed) from error
    if rate.shape != () or not jnp.issubdtype(rate.dtype, jnp.floating):
        allowed = f"must give one number, and gives {rate.dtype}{list(rate.shape)}"
        raise SettingError("OptimizerConfig.schedule", custom, allowed)
    return schedule


def _own_optimizer(config: OptimizerConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    custom = config.transformation
    assert custom is not None
    try:
        optimizer = custom.make(rate)
        reason = why_not_elementwise(optimizer)
        decays = (
            reason or config.decayed == "all" or _uses_params_only_for_decay(custom.make(optax.constant_schedule(0.1)))
        )
    except Exception as error:  # raised by the user's code
        allowed = f"does not work: {error_line(error)}"
        raise SettingError("OptimizerConfig.transformation", custom.name, allowed) from error
    if reason is not None:
        raise SettingError("OptimizerConfig.transformation", custom.name, _not_elementwise(reason))
    if not decays:
        allowed = _more_than_decay("transformation", custom.name)
        raise SettingError("OptimizerConfig.decayed", config.decayed, allowed)
    return optimizer


def _more_than_decay(setting: str, name: str) -> str:
    return (
        f"must be 'all' with OptimizerConfig.{setting} = {name!r}, which uses the parameters for more "
        "than to add a multiple of them to gradients or updates, and would see zeros in place of those left out"
    )


def _not_elementwise(reason: str) -> str:
    return (
        f"is not elementwise ({reason}), and every rank updates only a slice of "
        "each expert: use an elementwise optimizer such as adamw, sgd or lion"
    )


def _parameters(create: Any) -> list[str]:
    try:
        return list(inspect.signature(create).parameters)
    except (TypeError, ValueError):
        return []


def _uses_params_only_for_decay(optimizer: optax.GradientTransformation) -> bool:
    """Whether an elementwise optimizer uses the parameters only for weight decay.

    The trial uses random numbers and the optimizer state after a few updates.

    Args:
        optimizer: elementwise transformation, at a learning rate above zero.

    >>> _uses_params_only_for_decay(optax.adamw(0.1))
    True
    >>> _uses_params_only_for_decay(optax.chain(optax.sgd(0.1), optax.keep_params_nonnegative()))
    False
    """
    random = np.random.default_rng(0)
    gradients_SE = jnp.asarray(random.normal(size=(_NUM_STEPS, _NUM_ELEMENTS)), jnp.float32)
    params_E = jnp.asarray(random.normal(size=_NUM_ELEMENTS), jnp.float32)
    state, state_of_zeros = optimizer.init(params_E), optimizer.init(jnp.zeros_like(params_E))
    if not all(map(np.array_equal, jax.tree.leaves(state), jax.tree.leaves(state_of_zeros))):
        return False  # the state depends on the initial parameters, so zeros would change it
    for gradients_E in gradients_SE[:-1]:
        _, state = optimizer.update(gradients_E, state, params_E)

    def update(gradients_E: jax.Array, params_E: jax.Array) -> jax.Array:
        return optimizer.update(gradients_E, state, params_E)[0]

    # Fit c and d to the derivatives with respect to gradient and parameter, by least squares over all elements.
    gradients_E, ones_E, zeros_E = gradients_SE[-1], jnp.ones_like(params_E), jnp.zeros_like(params_E)
    updates_E, by_gradient_E = jax.jvp(update, (gradients_E, params_E), (ones_E, zeros_E))
    _, by_param_E = jax.jvp(update, (gradients_E, params_E), (zeros_E, ones_E))
    columns_E2 = np.stack([by_gradient_E, ones_E], axis=-1).astype(np.float64)
    (c, d), *_ = np.linalg.lstsq(columns_E2, np.asarray(by_param_E, np.float64), rcond=1e-4)
    without_E = update(gradients_E + c * params_E, zeros_E) + d * params_E
    error = float(jnp.abs(updates_E - without_E).max() / jnp.maximum(jnp.abs(updates_E).max(), 1e-30))
    return bool(error < _TOLERANCE and c > -_TOLERANCE and d < _TOLERANCE)


def _narrow_moments(optimizer: optax.GradientTransformation, dtype: DTypeLike) -> optax.GradientTransformation:
    """Stores an optimizer's moments in a narrower dtype, rounded after every update.

    Updates are computed in the dtype of the gradients. Since values are rounded to nearest, an average changes only if
    an update changes it by more than half a unit in the last place, 1/256 of its value in bfloat16. The average must
    therefore decay faster than that.

    >>> state = _narrow_moments(optax.adam(0.1), jnp.bfloat16).init({"w": jnp.zeros(3)})
    >>> sorted({leaf.dtype.name for leaf in jax.tree.leaves(state)})
    ['bfloat16', 'int32']
    """

    def init(params: Any) -> Any:
        return _cast(optimizer.init(params), dtype)

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        wide = jnp.result_type(*jax.tree.leaves(gradients))
        updates, after = optimizer.update(gradients, _cast(state, wide), params)
        return updates, _cast(after, dtype)

    return optax.GradientTransformation(init, update)


def _cast(state: Any, dtype: DTypeLike) -> Any:
    """Casts a state's floating-point arrays; counters and scalars keep their dtype."""

    def cast(leaf: Any) -> Any:
        is_moment = jnp.ndim(leaf) > 0 and jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.floating)
        return jnp.asarray(leaf).astype(dtype) if is_moment else leaf

    return jax.tree.map(cast, state)
