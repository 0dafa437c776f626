"""Checks a user's block in all the ways in which its modules are used, before anything else starts.

Legend: B sequences, T positions, D model dim, S slots, R rows of a slot.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from swift.errors import SettingError, error_line
from swift.models.config import ModelConfig

_SEQUENCES, _ROWS = 2, 5


def check_block(config: ModelConfig) -> None:
    """Checks the modules of ``ModelConfig.block`` by abstract evaluation, which needs only shapes.

    Raises:
        SettingError: a module cannot be created or applied, or has variables other than parameters.
    """
    if (block := config.block) is None:
        return
    x_BTD = jax.ShapeDtypeStruct((_SEQUENCES, config.sequence_length, config.model_dim), jnp.float32)
    document_BT = jax.ShapeDtypeStruct(x_BTD.shape[:2], jnp.int32)
    attention = _made(block, "attention", lambda rngs: block.attention(config, rngs))
    for documents in ((), (document_BT,)):
        _check_result(block, "attention", attention, (x_BTD, *documents))
    layers = config.moe_layers
    if not all(layers):
        network = _made(block, "network", lambda rngs: block.network(config, config.ffn_dim, rngs))
        _check_result(block, "network", network, (x_BTD,))
    if any(layers):
        expert = _made(block, "network", lambda rngs: block.network(config, config.expert_width, rngs))
        graphdef, state = nnx.split(expert)
        num_slots = config.model_dim + 1  # differs from the model dim, so that contracting rows with the slot dim fails
        slots = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((num_slots, *leaf.shape), leaf.dtype), state)
        rows_SRD = jax.ShapeDtypeStruct((num_slots, _ROWS, config.model_dim), jnp.float32)
        slots_text = " of several experts (multiply by weights with matmul(x, weight) alone, not with nnx.Linear)"
        _check_result(block, "network", nnx.merge(graphdef, slots), (rows_SRD,), slots_text, matmul=jnp.matmul)


def _made(block: Any, part: str, make: Callable[[nnx.Rngs], Any]) -> Any:
    try:
        module = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    except Exception as error:  # raised by the user's code
        allowed = f"its {part} cannot be made: {error_line(error)}"
        raise SettingError("ModelConfig.block", block, allowed) from error
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        if not isinstance(variable, nnx.Param) or not jnp.issubdtype(variable.get_value().dtype, jnp.floating):
            name = ".".join(map(str, path))
            allowed = (
                f"its {part} has {name!r}, a {type(variable).__name__} of {variable.get_value().dtype}; it may have "
                "floating-point nnx.Param alone, since every iteration can be computed again (an nnx.Dropout works "
                "with deterministic=True and without rngs)"
            )
            raise SettingError("ModelConfig.block", block, allowed)
    return module


def _check_result(
    block: Any, part: str, module: Any, args: tuple[Any, ...], slots_text: str = "", **options: Any
) -> None:
    graphdef, state = nnx.split(module)
    try:
        result = jax.eval_shape(lambda state, *args: nnx.merge(graphdef, state)(*args, **options), state, *args)
    except Exception as error:  # raised by the user's code
        allowed = f"its {part} does not work on rows{slots_text}: {error_line(error)}"
        raise SettingError("ModelConfig.block", block, allowed) from error
    if getattr(result, "shape", None) != args[0].shape:
        shape = list(getattr(result, "shape", [])) or type(result).__name__
        allowed = f"its {part} must return {list(args[0].shape)} of rows{slots_text}, and returns {shape}"
        raise SettingError("ModelConfig.block", block, allowed)
