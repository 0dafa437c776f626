"""A check that an optimizer uses the parameters for weight decay alone, so that decay can leave some of them out.

Left out, a parameter is given to the optimizer as zero. That is the update without decay where the parameters are
scaled and added, and nothing else, to the gradients (L2 regularization) or to the updates (decoupled weight decay):

    update(g, p) = update(g + c * p, 0) + d * p    with c >= 0 and d <= 0
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

_NUM_ELEMENTS, _NUM_STEPS, _TOLERANCE = 256, 4, 1e-3


def only_decays(optimizer: optax.GradientTransformation) -> bool:
    """Whether an elementwise optimizer uses the parameters for weight decay alone.

    It is tried on random numbers, in a state after a few updates.

    Args:
        optimizer: elementwise transformation, at a learning rate above zero.

    >>> only_decays(optax.adamw(0.1)), only_decays(optax.chain(optax.sgd(0.1), optax.keep_params_nonnegative()))
    (True, False)
    """
    random = np.random.default_rng(0)
    gradients_SE = jnp.asarray(random.normal(size=(_NUM_STEPS, _NUM_ELEMENTS)), jnp.float32)
    params_E = jnp.asarray(random.normal(size=_NUM_ELEMENTS), jnp.float32)
    state, state_of_zeros = optimizer.init(params_E), optimizer.init(jnp.zeros_like(params_E))
    if not all(map(np.array_equal, jax.tree.leaves(state), jax.tree.leaves(state_of_zeros))):
        return False  # it keeps where they were, and would see them elsewhere
    for gradients_E in gradients_SE[:-1]:
        _, state = optimizer.update(gradients_E, state, params_E)

    def update(gradients_E: jax.Array, params_E: jax.Array) -> jax.Array:
        return optimizer.update(gradients_E, state, params_E)[0]

    gradients_E, ones_E, zeros_E = gradients_SE[-1], jnp.ones_like(params_E), jnp.zeros_like(params_E)
    updates_E, by_gradient_E = jax.jvp(update, (gradients_E, params_E), (ones_E, zeros_E))
    _, by_param_E = jax.jvp(update, (gradients_E, params_E), (zeros_E, ones_E))
    columns_E2 = np.stack([by_gradient_E, ones_E], axis=-1).astype(np.float64)
    (c, d), *_ = np.linalg.lstsq(columns_E2, np.asarray(by_param_E, np.float64), rcond=1e-4)
    without_E = update(gradients_E + c * params_E, zeros_E) + d * params_E
    error = float(jnp.abs(updates_E - without_E).max() / jnp.maximum(jnp.abs(updates_E).max(), 1e-30))
    return bool(error < _TOLERANCE and c > -_TOLERANCE and d < _TOLERANCE)
