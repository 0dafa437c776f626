"""Optimizers that are valid on slices, and their schedule."""

import jax
import numpy as np
import optax
import pytest

from swift.errors import SettingError
from swift.experts.elementwise import why_not_elementwise
from swift.experts.optimizer import OptimizerConfig, learning_rate, make_optimizer


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "lion", "rmsprop", "adagrad", "yogi", "adabelief"])
def test_elementwise_optimizers_update_slices_as_they_update_the_whole(name):
    optimizer = make_optimizer(OptimizerConfig(name=name, options={}, warmup_steps=0), num_steps=10)
    random = np.random.default_rng(0)
    params, gradients = random.standard_normal((2, 6, 8)).astype(np.float32)

    def three_steps(params, gradients):
        state = optimizer.init(params)
        for _ in range(3):
            updates, state = optimizer.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
        return params

    whole = three_steps(params, gradients)
    sliced = [three_steps(params[:, i : i + 2], gradients[:, i : i + 2]) for i in range(0, 8, 2)]
    np.testing.assert_array_equal(np.concatenate(sliced, axis=1), whole)


@pytest.mark.parametrize("name", ["lamb", "lars", "adafactor", "novograd", "fromage", "dowg"])
def test_optimizers_that_mix_numbers_are_refused_with_the_reason(name):
    with pytest.raises(
        SettingError, match=rf"OptimizerConfig\.name = '{name}': is not elementwise \(it applies 'reduce"
    ):
        make_optimizer(OptimizerConfig(name=name, options={}), num_steps=100)


def test_muon_is_refused():
    with pytest.raises(SettingError, match=r"OptimizerConfig\.name = 'muon': is not elementwise \(it applies '"):
        make_optimizer(OptimizerConfig(name="muon", options={}), num_steps=100)


@pytest.mark.parametrize("name", ["ademamix", "schedule_free_adamw"])
def test_elementwise_optimizers_of_contrib_are_taken(name):
    assert make_optimizer(OptimizerConfig(name=name, options={}), num_steps=100)


def test_decay_of_matrices_needs_an_optimizer_that_uses_parameters_for_decay_alone():
    config = OptimizerConfig(name="schedule_free_adamw", options={"weight_decay": 0.1}, decayed="matrices")
    with pytest.raises(SettingError, match=r"must be 'all' with OptimizerConfig\.name = 'schedule_free_adamw'"):
        make_optimizer(config, num_steps=100)
    assert make_optimizer(OptimizerConfig(name="lion", options={"weight_decay": 0.1}, decayed="matrices"), 100)


def test_noise_is_refused_because_all_ranks_would_draw_the_same():
    assert why_not_elementwise(optax.noisy_sgd(0.1, key=jax.random.key(0))) is not None


def test_a_clip_by_norm_inside_the_chain_is_refused():
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    assert why_not_elementwise(chain) is not None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "adamm"}, "OptimizerConfig.name = 'adamm': optax has no such optimizer"),
        ({"name": "chain"}, "optax has no such optimizer"),
        ({"name": "sgd", "options": {"b1": 0.9}}, "optax.sgd has no option 'b1'; its options are momentum"),
        ({"warmup_steps": 100}, "OptimizerConfig.warmup_steps = 100: must be below num_steps = 100"),
        ({"clip_norm": 0.0}, "OptimizerConfig.clip_norm = 0.0: must be a number above 0"),
        ({"peak_learning_rate": "fast"}, "OptimizerConfig.peak_learning_rate = 'fast': must be a number of at least 0"),
        ({"layout": "sideways"}, "OptimizerConfig.layout = 'sideways': must be one of decoupled, coupled"),
    ],
)
def test_impossible_settings_are_refused(config, message):
    with pytest.raises(SettingError) as error:
        make_optimizer(OptimizerConfig(**config), num_steps=100)
    assert message in str(error.value)


def test_schedule_warms_up_and_decays():
    schedule = learning_rate(OptimizerConfig(warmup_steps=10, peak_learning_rate=1.0, final_learning_rate=0.1), 100)
    rates = [float(schedule(step)) for step in (0, 4, 9, 54, 99)]
    np.testing.assert_allclose(rates, [0.1, 0.5, 1.0, 0.55, 0.1], atol=1e-6)
