"""The choice of a token, against the probabilities that define it."""

import jax.numpy as jnp
import numpy as np
import pytest

from swift.errors import SettingError
from swift.generate.request import Choices, Sampling, choose


def test_choices():
    """A token of the likeliest k, among those that reach the probability p, as often as it is likely."""
    logits = jnp.log(jnp.array([[0.05, 0.5, 0.15, 0.3]]))

    def shares(temperature, top_k, top_p=1.0):
        each = [(0, Sampling(temperature, top_k, top_p, seed=1, stream=stream), 0) for stream in range(4000)]
        tokens, _ = choose(logits, Choices.of(each, 4000), None, num_candidates=4)
        return (np.bincount(np.asarray(tokens), minlength=4) / 4000)[[1, 3, 2, 0]]

    np.testing.assert_allclose(shares(1.0, 4), [0.5, 0.3, 0.15, 0.05], atol=0.03)
    np.testing.assert_allclose(shares(1.0, 2), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(shares(1.0, 4, 0.6), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(shares(1.0, 4, 0.4), [1, 0, 0, 0])
    np.testing.assert_allclose(shares(0.0, 4), [1, 0, 0, 0])
    squares = np.array([0.5, 0.3, 0.15, 0.05]) ** 2
    np.testing.assert_allclose(shares(0.5, 4), squares / squares.sum(), atol=0.03)


def test_a_choice_is_its_own_at_every_number_of_every_stream():
    logits = jnp.zeros((1, 64))

    def chosen(**changes):
        each = [(0, Sampling(1.0, 64, **({"seed": 5} | changes)), number) for number in range(8)]
        return tuple(np.asarray(choose(logits, Choices.of(each, 8), None, num_candidates=64)[0]).tolist())

    assert chosen() == chosen()
    assert len({chosen(), chosen(seed=6), chosen(stream=1)}) == 3
    assert len(set(chosen())) > 4


@pytest.mark.parametrize(("p", "allowed"), [(0.0, "must be a number above 0"), (1.5, "must be at most 1")])
def test_a_probability_that_cannot_be(p, allowed):
    with pytest.raises(SettingError, match=f"--top-p = {p}: {allowed}"):
        Sampling(top_p=p)
