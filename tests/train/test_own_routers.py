"""A router and an observer of a user's own in runs: recorded, resumed, reported, and refused in one line."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from swift.config.stored import config_text
from swift.errors import SettingError
from swift.experts.config import ExpertConfig
from swift.experts.routers import ExpertChoice, NoisyTopK, TopK
from swift.report.compare import pictures_together
from swift.runlog.observers import Observer
from swift.runlog.reading import read_run
from swift.train.start import TrainOptions
from swift.train.trainer import train
from tests.pipeline.cases import Threshold
from tests.train.runs import measured, run, two_stages

pytestmark = pytest.mark.usefixtures("double_precision")


def with_router(corpus, router, **settings):
    experiment = two_stages(corpus, 2, 2, num_steps=6, num_microbatches=2, **settings)
    experiment = replace(experiment, eval_every=3, num_eval_batches=1)
    return replace(experiment, experts=replace(experiment.experts, router=router, top_k=2))


@pytest.mark.parametrize("router", [Threshold(), NoisyTopK(), ExpertChoice()], ids=repr)
def test_a_run_with_a_failure_has_the_losses_of_one_without(corpus, tmp_path, router):
    """Noise, state and numbers too: what a lost worker's peers compute is what it would have computed."""
    experiment = with_router(corpus, router)
    whole = measured(run(experiment, tmp_path / "whole"))
    failing = replace(experiment, failures=("step 2: fail 0:1", "step 5: rejoin 0:1"))
    survived = measured(run(failing, tmp_path / "survived"))
    for before, after in zip(whole, survived, strict=True):
        np.testing.assert_allclose(after["loss"], before["loss"], rtol=1e-10)
        assert (after["tokens_routed"], after["tokens_dropped"]) == (before["tokens_routed"], before["tokens_dropped"])
        for name in (name for name in before if name.startswith("router.")):
            np.testing.assert_allclose(after[name], before[name], rtol=1e-10)


def test_a_resumed_run_goes_on_with_the_noise_and_the_state(corpus, tmp_path):
    experiment = with_router(corpus, Threshold())
    whole = run(experiment, tmp_path / "whole")
    run(experiment, tmp_path / "parts", stop_at=3)
    resumed = run(experiment, tmp_path / "parts", resume=True)
    for before, after in zip(measured(whole), measured(resumed), strict=True):
        assert {name: after[name] for name in before if name not in ("failed_restores",)} == before


def test_numbers_are_means_over_layers_and_those_of_each_layer(corpus, tmp_path):
    record = run(with_router(corpus, Threshold()), tmp_path / "run")
    first = next(iter(record.metrics))
    layers = [first["router.choices.0"], first["router.choices.1"]]
    assert first["router.choices"] == pytest.approx(np.mean(layers))
    assert sum(layers) == first["tokens_routed"]
    np.testing.assert_allclose(sum(first[f"router.probs-{expert}.1"] for expert in range(4)), 1)
    assert record.metrics.router_numbers == ["router.choices", *(f"router.probs-{expert}" for expert in range(4))]
    assert {"router-choices", "router-probs-3"} <= {picture.name for picture in pictures_together([record])}


@dataclass
class Counting(Observer):
    """Writes the steps that it is told of into a file."""

    path: str

    def on_step(self, record):
        with Path(self.path).open("a") as file:
            file.write(f"{record['step']} {record['router.choices']}\n")


def test_an_observer_of_the_configuration_is_told_and_may_come_and_go(corpus, tmp_path):
    plain = with_router(corpus, Threshold())
    observed = replace(plain, observers=(Counting(str(tmp_path / "told.txt")),))
    for experiment, stop, resumes in ((observed, 3, False), (plain, 4, True), (observed, None, True)):
        options = TrainOptions(tmp_path / "run", config_text(experiment), resume=resumes, stop_at=stop, prepare="none")
        train(experiment, options)
    told = [line.split() for line in (tmp_path / "told.txt").read_text().splitlines()]
    assert [int(step) for step, _ in told] == [1, 2, 3, 5, 6]
    steps = {step["step"]: step["router.choices"] for step in read_run(tmp_path / "run").metrics}
    assert all(float(value) == steps[int(step)] for step, value in told)


@pytest.mark.parametrize("wrong", [(1,), (Counting,), (object(),)])
def test_what_is_no_observer_is_refused(corpus, wrong):
    with pytest.raises(SettingError, match=r"Experiment\.observers = .*must be dataclasses that inherit from"):
        replace(with_router(corpus, Threshold()), observers=wrong)


def test_another_router_is_no_run_to_go_on_with(corpus, tmp_path):
    experiment = with_router(corpus, TopK(bias_update_rate=0.01))
    options = TrainOptions(tmp_path / "run", config_text(experiment), stop_at=3, prepare="none")
    train(experiment, options)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["experiment"]["settings"]["experts"]["settings"]["router"]["settings"]["bias_update_rate"] == 0.01
    other = with_router(corpus, TopK())
    with pytest.raises(SettingError, match=r"bias_update_rate"):
        train(other, TrainOptions(tmp_path / "run", config_text(other), resume=True, prepare="none"))


def test_the_settings_of_experts_name_a_router():
    with pytest.raises(SettingError, match=r"ExpertConfig\.router = <class .*: must be a router, such as @TopK\(\)"):
        ExpertConfig(router=TopK)
