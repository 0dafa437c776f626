"""Extensions of a user: an optimizer, a schedule, an observer, data in memory; and a run from Python alone."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from swift.checkpoint.config import CheckpointConfig
from swift.config.experiment import Experiment
from swift.config.stored import config_text
from swift.data.config import DataConfig
from swift.data.sources import TextFiles
from swift.errors import SettingError
from swift.experts.config import ExpertConfig
from swift.experts.optimizer import OptimizerConfig, make_optimizer
from swift.experts.placement.policy import Static
from swift.models.config import ModelConfig
from swift.pipeline.step.single_worker import put_batch, single_worker_step
from swift.runlog.observers import Observer
from swift.runlog.reading import read_run
from swift.topology import Topology
from swift.train.build import make_loader, make_step_spec
from swift.train.start import TrainOptions
from swift.train.trainer import train


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus")
    for number in range(20):
        (directory / f"{number}.txt").write_text(f"{number} experts " * 40)
    return Experiment(
        model=ModelConfig(num_layers=1, model_dim=16, num_heads=2, ffn_dim=16, sequence_length=16, moe_pattern=(True,)),
        experts=ExpertConfig(num_classes=4, slots_per_rank=2),
        topology=Topology(num_expert_ranks=4),
        data=DataConfig(TextFiles(str(directory / "*.txt")), validation_share=0.3),
        optimizer=OptimizerConfig(warmup_steps=0),
        num_steps=3,
        sequences_per_microbatch=8,
        eval_every=0,
        checkpoint=CheckpointConfig(every=0),
    )


@dataclass(frozen=True)
class Erasing:
    """Takes from every parameter what weight decay is given of it, whatever the gradient."""

    name = "erasing"

    def make(self, learning_rate):
        del learning_rate

        def update(gradients, state, params):
            del gradients
            return jax.tree.map(jnp.negative, params), state

        return optax.GradientTransformation(lambda _: (), update)


@pytest.mark.parametrize("layout", ["decoupled", "coupled"])
def test_weight_decay_leaves_out_embeddings_norms_and_biases(experiment, layout):
    optimizer = OptimizerConfig(transformation=Erasing(), decayed="matrices", layout=layout, warmup_steps=0)
    setup = replace(experiment, optimizer=optimizer, placement=Static())
    spec = make_step_spec(setup)
    state = spec.init(jax.random.key(0))
    before = jax.device_get(spec.gpt.unpack(spec.gather_master_weights(state)))
    state, _ = single_worker_step(spec)(state, put_batch(make_loader(setup, "train").batch(0), spec.live))
    after = jax.device_get(spec.gpt.unpack(spec.gather_master_weights(state)))

    def dims(name, leaf):
        return leaf.ndim - (name == "expert")  # which has a dim of experts

    num = {"kept": 0, "erased": 0}
    for name, states in before.items():
        for old, new in zip(jax.tree.leaves(states), jax.tree.leaves(after[name]), strict=True):
            is_erased = name != "embedding" and dims(name, old) > 1
            num["erased" if is_erased else "kept"] += 1
            np.testing.assert_array_equal(new, np.zeros_like(old) if is_erased else old)
            assert np.abs(old).max() > 0 or not is_erased
    assert min(num.values()) > 2, num


@dataclass(frozen=True)
class Followed:
    """Adam, before or after which something else is done."""

    before: object = optax.identity()
    after: object = optax.identity()
    name = "followed"

    def make(self, learning_rate):
        return optax.chain(self.before, optax.adam(learning_rate), self.after)


def by_params(change):
    return optax.stateless(lambda updates, params: jax.tree.map(change, updates, params))


DECAYS = {
    "none": Followed(),
    "L2 regularization": Followed(before=optax.add_decayed_weights(0.1)),
    "decoupled": Followed(after=optax.add_decayed_weights(-0.01)),
    "both": Followed(optax.add_decayed_weights(0.1), optax.add_decayed_weights(-0.01)),
    "all at once": Erasing(),
}
NO_DECAYS = {
    "positive": Followed(after=optax.keep_params_nonnegative()),
    "bounded": Followed(after=by_params(lambda update, param: jnp.clip(param + update, -1, 1) - param)),
    "rounded": Followed(after=by_params(lambda update, param: jnp.round(param + update) - param)),
    "relative": Followed(after=by_params(lambda update, param: update * jnp.abs(param))),
    "growth": Followed(after=optax.add_decayed_weights(0.1)),
}


@pytest.mark.parametrize("own", [*DECAYS, *NO_DECAYS])
def test_decay_of_matrices_is_refused_where_parameters_matter_besides(own):
    config = OptimizerConfig(transformation=(DECAYS | NO_DECAYS)[own], decayed="matrices")
    make_optimizer(replace(config, decayed="all"), 100)
    if own in DECAYS:
        make_optimizer(config, 100)
        return
    refused = r"OptimizerConfig\.decayed = 'matrices': must be 'all' with OptimizerConfig\.transformation = 'followed'"
    with pytest.raises(SettingError, match=refused):
        make_optimizer(config, 100)


def test_decay_of_matrices_needs_an_optimizer_that_decays():
    with pytest.raises(
        SettingError, match=r"OptimizerConfig\.decayed = 'matrices': needs an optimizer with weight decay"
    ):
        make_optimizer(OptimizerConfig(name="sgd", options={}, decayed="matrices"), 100)


@dataclass(frozen=True)
class Chain:
    scale: float = 1.0
    name = "my chain"

    def make(self, learning_rate):
        last = optax.scale_by_trust_ratio() if self.scale < 0 else optax.scale(self.scale)
        return optax.chain(optax.scale_by_adam(), last, optax.scale_by_learning_rate(learning_rate))


@dataclass(frozen=True)
class Halves:
    """Half the learning rate in every iteration; ``shape`` of them at once."""

    shape: tuple[int, ...] = ()

    def schedule(self, num_steps):
        return lambda count: jnp.full(self.shape, num_steps / 2.0**count)


def test_an_optimizer_that_mixes_elements_is_refused():
    with pytest.raises(SettingError, match=r"OptimizerConfig\.transformation = 'my chain': is not elementwise \(it"):
        make_optimizer(OptimizerConfig(transformation=Chain(-1.0)), 100)
    with pytest.raises(SettingError, match=r"transformation = 'my chain': does not work: TypeError: "):
        make_optimizer(OptimizerConfig(transformation=Chain("x")), 100)


def test_a_schedule_gives_one_number():
    with pytest.raises(
        SettingError, match=r"OptimizerConfig\.schedule = .*: must give one number, and gives float32\[2\]"
    ):
        make_optimizer(OptimizerConfig(schedule=Halves((2,))), 100)


class Listening(Observer):
    def __init__(self):
        self.rates, self.events = [], []

    def on_step(self, record):
        self.rates.append(record["learning_rate"])

    def on_event(self, event):
        self.events.append(event["event"])


def test_a_run_needs_only_an_experiment_and_a_directory(experiment, tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr("swift.train.trainer.enable_compilation_cache", lambda: kept.append("compiled programs"))
    optimizer = OptimizerConfig(transformation=Chain(), schedule=Halves(), warmup_steps=0)
    setup, listening = replace(experiment, optimizer=optimizer), Listening()
    summary = train(setup, TrainOptions(tmp_path / "mine", observers=(listening,)))
    assert listening.rates == [3, 1.5, 0.75]
    assert listening.events == ["start", "finish"]
    assert np.isfinite(summary["final_loss"])
    assert kept == ["compiled programs"]  # as a command does
    assert (tmp_path / "mine" / "config.gin").read_text() == config_text(setup)
    assert "OptimizerConfig.transformation = @Chain()" in config_text(setup)

    optax_only = replace(setup, optimizer=replace(optimizer, transformation=None, name="adam", options={}))
    train(optax_only, tmp_path / "theirs")
    losses = [[record["loss"] for record in read_run(tmp_path / name).metrics] for name in ("mine", "theirs")]
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.long
def test_a_run_with_narrow_moments_is_resumed(experiment, tmp_path):
    """In two parts it has the losses of the whole, to the bit; with other moments it is refused."""
    optimizer = replace(experiment.optimizer, moments="bfloat16")
    narrow = replace(experiment, optimizer=optimizer, checkpoint=CheckpointConfig(every=1))
    train(narrow, tmp_path / "whole")
    train(narrow, TrainOptions(tmp_path / "parts", stop_at=2))
    with pytest.raises(SettingError, match=r"OptimizerConfig\.moments"):
        train(replace(narrow, optimizer=experiment.optimizer), TrainOptions(tmp_path / "parts", resume=True))
    train(narrow, TrainOptions(tmp_path / "parts", resume=True))
    whole, parts = ([record["loss"] for record in read_run(tmp_path / name).metrics] for name in ("whole", "parts"))
    assert whole == parts
