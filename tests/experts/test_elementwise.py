"""The verdict on optimizers, against updates of slices and of the whole: NumPy and optax alone."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from swift.experts.elementwise import why_not_elementwise


@jax.enable_x64(True)
def slices_are_updated_as_the_whole(optimizer, num_steps):
    """Whether any slice, down to an element, is updated as within its array, by gradients of many sizes."""
    random = np.random.default_rng(0)
    start_XY = random.normal(size=(4, 6))
    sizes_T11 = 10.0 ** random.integers(-3, 4, (num_steps, 1, 1))
    gradients_TXY = (random.normal(size=(num_steps, 4, 6)) + 3 * random.normal(size=(4, 6))) * sizes_T11

    def trained(*rows_and_columns):
        params, gradients = {"w": start_XY[rows_and_columns]}, gradients_TXY[(slice(None), *rows_and_columns)]
        state = optimizer.init(params)

        def step(carry, gradient):
            params, state = carry
            updates, state = optimizer.update({"w": gradient}, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), params["w"]

        return np.asarray(jax.lax.scan(step, (params, state), gradients)[1])

    whole_TXY = trained(slice(None), slice(None))
    for where in ((slice(0, 2), slice(0, 3)), (slice(2, 4), slice(3, 6)), (slice(3, 4), slice(0, 1))):
        if not np.allclose(trained(*where), whole_TXY[(slice(None), *where)], rtol=1e-9, atol=1e-12):
            return False
    return True


def applied(change):
    """An optimizer that applies a function to every array of the gradients."""
    return optax.stateless(lambda gradients, _: jax.tree.map(change, gradients))


def counted(change):
    """The same, of the number of the update, too."""

    def update(gradients, count, _=None):
        return jax.tree.map(partial(change, count), gradients), count + 1

    return optax.GradientTransformation(lambda _: jnp.zeros((), jnp.int32), update)


def carried(change):
    """The same, of an array that it keeps."""

    def update(gradients, kept, _=None):
        both = jax.tree.map(change, gradients, kept)
        return both, both

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def newton(g):
    """A square root by a loop, element by element."""
    return jax.lax.fori_loop(0, 5, lambda _, root: (root + (jnp.abs(g) + 1) / root) / 2, jnp.ones_like(g))


def until_all_are_small(g):
    return jax.lax.while_loop(lambda x: jnp.abs(x).max() > 1, lambda x: x / 2, g)


MIXED = {
    "roll": applied(lambda g: jnp.roll(g, 1, axis=1)),
    "rev": applied(lambda g: g[::-1]),
    "flip and back, of half": applied(lambda g: g + jnp.flip(g, axis=0)),
    "transpose": applied(lambda g: g.reshape(g.shape[::-1]).T),
    "concatenate": applied(lambda g: jnp.concatenate([g[1:], g[:1]])),
    "an element": applied(lambda g: g + g[0, 0] if g.ndim == 2 else g + g[0]),
    "rows by number": counted(lambda count, g: g + jax.lax.dynamic_slice_in_dim(g, count % len(g), 1)),
    "a row is set": applied(lambda g: g.at[0].set(0)),
    "sort": applied(lambda g: jnp.sort(g, axis=None).reshape(g.shape)),
    "cumsum": applied(lambda g: jnp.cumsum(g).reshape(g.shape)),
    "count of signs": applied(lambda g: g * jnp.sum(g > 0)),
    "any": applied(lambda g: jnp.where(jnp.any(g > 2), 0, g)),
    "softmax": applied(lambda g: jax.nn.softmax(g.ravel()).reshape(g.shape)),
    "a place": applied(lambda g: g * jnp.arange(g.size).reshape(g.shape)),
    "a mask of places": applied(lambda g: jnp.where(jnp.eye(*g.shape, dtype=bool) if g.ndim == 2 else True, g, 0)),
    "size": applied(lambda g: g / g.size**0.5),
    "late": counted(lambda count, g: jax.lax.cond(count == 7, lambda g: g - g.mean(), lambda g: g, g)),
    "a loop": applied(lambda g: jax.lax.scan(lambda total, x: (total + x, total), g[0], g)[1]),
    "a loop that ends by the largest": applied(until_all_are_small),
    "kept and turned": carried(lambda g, kept: g + jnp.flip(kept)),
    "noise": optax.add_noise(0.1, 0.5, key=0),
    "finite": optax.apply_if_finite(optax.clip_by_global_norm(1e3), 3),
    "a clip that hardly ever acts": optax.clip_by_global_norm(2e3),
    "mixed in between": optax.chain(optax.scale_by_adam(), optax.scale_by_trust_ratio(), optax.scale(0.1)),
}
ELEMENTWISE = {
    "reshaped and back": applied(lambda g: jnp.reshape(jnp.tanh(g.ravel()), g.shape)),
    "turned and back": applied(lambda g: jnp.flip(jnp.sqrt(jnp.abs(jnp.flip(g))))),
    "a loop": applied(newton),
    "a row after the other": applied(lambda g: jax.lax.map(lambda row: row * 2, g)),
    "by number": counted(lambda count, g: jax.lax.cond(count > 3, lambda g: g / 2, jnp.sign, g)),
    "kept": carried(lambda g, kept: jnp.where(jnp.abs(g) > 1, g, kept)),
    "of one": applied(lambda g: g * jnp.mean(jnp.ones(1))),
    "every third": optax.MultiSteps(optax.adam(0.1), 3).gradient_transformation(),
}


@pytest.mark.parametrize("name", MIXED)
def test_an_element_that_depends_on_others_or_its_place_is_seen(name):
    assert not slices_are_updated_as_the_whole(MIXED[name], 8)
    assert why_not_elementwise(MIXED[name]) is not None


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elements_that_are_moved_and_moved_back_are_elementwise(name):
    assert slices_are_updated_as_the_whole(ELEMENTWISE[name], 8)
    assert why_not_elementwise(ELEMENTWISE[name]) is None


def test_an_array_that_reads_another_one_is_seen():
    def swapped(gradients, _):
        one, *rest = jax.tree.leaves(gradients)
        largest = max((leaf for leaf in rest), key=jnp.size, default=one)
        return jax.tree.map(lambda leaf: leaf + largest[(0,) * largest.ndim], gradients)

    assert why_not_elementwise(optax.stateless(swapped)) is not None


def optimizers():
    """Every optimizer of optax with a learning rate that works with its defaults, by library and name."""
    for library in (optax, optax.contrib):
        for name, create in vars(library).items():
            if inspect.isfunction(create) and "learning_rate" in inspect.signature(create).parameters:
                required = [
                    parameter.name
                    for parameter in inspect.signature(create).parameters.values()
                    if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
                ]
                if set(required) <= {"learning_rate"} and not name.startswith("_"):
                    yield pytest.param(create, id=f"{library.__name__}.{name}")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Specifying a key", "ignore:`optimistic_adam`")
@pytest.mark.parametrize("create", list(optimizers()))
def test_every_optimizer_of_optax_is_judged_rightly(create):
    optimizer = create(1.0)
    try:
        works = slices_are_updated_as_the_whole(optimizer, 40)
    except (TypeError, ValueError) as error:  # it needs the loss, too
        with pytest.raises(type(error)):
            why_not_elementwise(optimizer)
        return
    assert (why_not_elementwise(optimizer) is None) == works
