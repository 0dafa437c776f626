"""The loop: resuming bit for bit, no recompilation, the record, and a loss that is no longer finite."""

import itertools
import os
import signal
from dataclasses import dataclass, replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swift.checkpoint.config import CheckpointConfig
from swift.checkpoint.manifest import checkpoint_steps
from swift.config.experiment import Experiment
from swift.errors import RunError, SettingError
from swift.experts.config import ExpertConfig
from swift.experts.optimizer import OptimizerConfig
from swift.experts.placement.flexmoe import FlexMoE
from swift.experts.placement.packed import MinMax
from swift.experts.placement.policy import Static, uniform_placement
from swift.experts.placement.symi import Symi
from swift.models.config import ModelConfig
from swift.pipeline.step.single_worker import put_batch, single_worker_step
from swift.runlog.reading import read_run
from swift.topology import Topology
from swift.train import checkpointer
from swift.train.build import make_loader, make_step_spec
from tests.train.runs import measured, run

TINY = ModelConfig(num_layers=1, model_dim=16, num_heads=2, ffn_dim=16, sequence_length=16, moe_pattern=(True,))


@pytest.fixture(scope="module")
def experiment(corpus):
    """The number of steps is part of the program: tests that leave it alone share what is compiled."""
    return Experiment(
        model=TINY,
        experts=ExpertConfig(num_classes=4, slots_per_rank=2),
        topology=Topology(num_expert_ranks=4),
        data=corpus,
        optimizer=OptimizerConfig(warmup_steps=2, peak_learning_rate=1e-2),
        num_steps=40,
        sequences_per_microbatch=8,
        eval_every=20,
        num_eval_batches=2,
        checkpoint=CheckpointConfig(every=20),
        target_loss=4.0,
    )


@pytest.fixture(scope="module")
def wild(experiment):
    """Its first update spoils the parameters."""
    optimizer = replace(experiment.optimizer, peak_learning_rate=1e30, clip_norm=None, warmup_steps=0)
    return replace(experiment, optimizer=optimizer)


@pytest.mark.parametrize(("policy", "stop"), [(Symi(), 20), pytest.param(FlexMoE(3), 17, marks=pytest.mark.slow)])
def test_forty_steps_are_twenty_a_restart_and_twenty(experiment, tmp_path, policy, stop):
    layout = "coupled" if isinstance(policy, FlexMoE) else "decoupled"
    setup = replace(experiment, placement=policy, optimizer=replace(experiment.optimizer, layout=layout))
    whole = run(setup, tmp_path / "whole")
    first = run(setup, tmp_path / "parts", stop_at=stop)
    assert first.metrics[-1]["step"] == stop
    assert first.summary is None
    parts = run(setup, tmp_path / "parts", resume=True)

    records = [measured(whole), measured(parts)]
    assert len(records[0]) == 40
    assert records[0] == records[1]
    assert [event["event"] for event in parts.events].count("resume") == 1
    assert {**whole.summary, "name": "", "median_step_ms": 0} == {**parts.summary, "name": "", "median_step_ms": 0}
    assert whole.summary["validation_loss"] < records[0][0]["loss"] - 1
    assert whole.summary["steps_to_target"] is not None
    assert any(a["replicas"] != b["replicas"] for a, b in itertools.pairwise(records[0]))


def test_fifty_placements_are_one_program(experiment):
    spec = make_step_spec(experiment)
    state, step, loader = spec.init(jax.random.key(0)), single_worker_step(spec), make_loader(experiment, "train")
    placements = []
    for _ in range(50):
        state, _ = step(state, put_batch(next(loader), spec.live))
        placements.append(np.asarray(state.placement).tolist())
    assert sum(a != b for a, b in itertools.pairwise(placements)) > 10
    assert step._cache_size() == 1


@pytest.mark.slow  # the quick one is of gradients: virtual ranks' are the plain model's, see test_mathematics.py
@pytest.mark.parametrize("policy", [Static(), MinMax()])
def test_virtual_ranks_do_what_sharded_ones_do(experiment, policy):
    losses = []
    with jax.enable_x64(True):
        for kind in ("emulated", "virtual"):
            setup = replace(experiment, ranks=kind, compute_dtype="float64", placement=policy)
            spec = make_step_spec(setup)
            state, step, loader = spec.init(jax.random.key(0)), single_worker_step(spec), make_loader(setup, "train")
            for _ in range(5):
                state, metrics = step(state, put_batch(next(loader), spec.live))
            metrics = jax.device_get(metrics)
            losses.append((metrics["loss"], metrics["grad_norm"], spec.gather_master_weights(state)))
        chex.assert_trees_all_close(*losses, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_bfloat16_learns_too(experiment, tmp_path):
    record = run(replace(experiment, compute_dtype="bfloat16", checkpoint=CheckpointConfig(every=0)), tmp_path / "run")
    assert record.summary["final_loss"] < 4
    slots = make_step_spec(replace(experiment, compute_dtype="bfloat16"))
    state = slots.init(jax.random.key(0))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.slots)} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.master)} == {"float32"}


class Signalled:
    """No failure; a signal comes while an iteration is run."""

    def __init__(self, step, number):
        self._step, self._number = step, number

    def failed(self, first_step, _):
        if first_step == self._step:
            os.kill(os.getpid(), self._number)
        return frozenset()

    def lost_ranks(self, *_):
        return frozenset()


@pytest.mark.parametrize(
    ("number", "every"), [pytest.param(signal.SIGINT, 5, marks=pytest.mark.slow), (signal.SIGTERM, 0)]
)
def test_a_signal_keeps_the_last_iteration_which_the_run_goes_on_from(experiment, tmp_path, number, every):
    setup = replace(experiment, checkpoint=CheckpointConfig(every=every), eval_every=0)
    with pytest.raises(KeyboardInterrupt):
        run(setup, tmp_path / "run", Signalled(8, number))
    assert checkpoint_steps(tmp_path / "run" / "checkpoints")[-1] == 8
    record = read_run(tmp_path / "run")
    assert (record.events[-1]["event"], record.events[-1]["step"]) == ("interrupt", 8)
    assert [event["experts"] for event in record.events if event["event"] == "checkpoint"][-1] == "all"
    resumed = run(setup, tmp_path / "run", resume=True, stop_at=12)
    assert measured(resumed) == measured(run(setup, tmp_path / "whole", stop_at=12))


def test_numbers_that_are_not_finite_take_no_older_checkpoints_place(experiment, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointer, "is_finite", lambda _: False)
    with pytest.raises(RunError, match="the checkpoint of iteration 2 was not saved: its values are not finite"):
        run(replace(experiment, eval_every=0), tmp_path / "run", stop_at=2)
    assert checkpoint_steps(tmp_path / "run" / "checkpoints") == []


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(experiment, wild, tmp_path):
    run(experiment, tmp_path / "run", stop_at=20)
    with pytest.raises(
        RunError, match=r"at iteration 2\d: stopped; the checkpoint of iteration 20 is kept; .*--resume"
    ):
        run(wild, tmp_path / "run", resume=True)
    assert checkpoint_steps(tmp_path / "run" / "checkpoints") == [20]
    assert read_run(tmp_path / "run").events[-1]["event"] == "non_finite"
    assert run(experiment, tmp_path / "run", resume=True).summary["final_loss"] < 4


@dataclass(frozen=True)
class Forgetful:
    """Gives class 0 no slot any more from some iteration on; until then it is as sound as others."""

    sound_for: int
    name = "forgetful"

    def init(self, *shape):
        return uniform_placement(*shape), jnp.zeros((), jnp.int32)

    def __call__(self, _, placement_LNS, state):
        return jnp.where(state < self.sound_for, placement_LNS, jnp.maximum(placement_LNS, 1)), state + 1


@pytest.mark.parametrize(("sound_for", "stops_at"), [(7, 8), (8, 10)], ids=["before it is saved", "when it was used"])
def test_a_placement_without_a_class_stops_the_run_and_is_not_saved(experiment, tmp_path, sound_for, stops_at):
    forgetful = replace(experiment, placement=Forgetful(sound_for), checkpoint=CheckpointConfig(every=8))
    reason = rf"placement = Forgetful.*: expert 0 of 0 to 3 has no slot in layer 0 at iteration {stops_at}: stopped; "
    with pytest.raises(RunError, match=reason):
        run(forgetful, tmp_path / "run")
    stopped = read_run(tmp_path / "run")
    assert stopped.events[-1]["event"] == "invalid_placement"
    assert stopped.metrics[-1]["step"] == min(stops_at, 9)
    assert checkpoint_steps(tmp_path / "run" / "checkpoints") == ([8] if stops_at == 10 else [])


def test_a_policy_that_cannot_be_used_is_refused_before_anything_is_written(experiment, tmp_path):
    with pytest.raises(SettingError, match=r"Experiment\.placement = Forgetful.*__call__ returns for .* has no slot"):
        run(replace(experiment, placement=Forgetful(2)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_parameters_that_give_no_finite_loss_are_not_saved(wild, tmp_path):
    """The loss of an iteration is finite before the update that spoils it; its checkpoint would be the last one."""
    with pytest.raises(RunError, match=r"loss_after = nan at iteration 1: stopped; there is no checkpoint yet"):
        run(replace(wild, checkpoint=CheckpointConfig(every=1, num_kept=1)), tmp_path / "run")
    assert checkpoint_steps(tmp_path / "run" / "checkpoints") == []


def test_record_of_a_step(experiment, tmp_path):
    for record in run(replace(experiment, checkpoint=CheckpointConfig(every=0)), tmp_path / "run").metrics:
        assert record["tokens"] == 8 * 16
        assert record["tokens_routed"] == np.sum(record["popularity"]) == record["tokens"]
        assert record["tokens_dropped"] == np.sum(record["dropped"])
        assert np.sum(record["replicas"]) == 8
        assert record["live_workers"] == 1
        assert record["load_imbalance"] >= 1
    assert "validation_loss" in record
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_finished_run_has_nothing_to_resume(experiment, tmp_path):
    run(experiment, tmp_path / "run")
    with pytest.raises(SettingError, match="has nothing left to do: it is at iteration 40"):
        run(experiment, tmp_path / "run", resume=True)


def test_a_run_whose_record_is_damaged_goes_on_and_says_in_the_end_that_it_cannot_be_summed_up(experiment, tmp_path):
    run(experiment, tmp_path, stop_at=20)
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"event": "p\xecan"}\n')
    with pytest.raises(
        RunError, match=r"done and saved, but .* cannot be summed up: .*events\.jsonl = 'line .*damaged"
    ):
        run(experiment, tmp_path, resume=True)
    assert checkpoint_steps(tmp_path / "checkpoints") == [20, 40]


def test_profiler_trace_on_demand(experiment, tmp_path):
    unsaved = replace(experiment, checkpoint=CheckpointConfig(every=0), eval_every=0)
    run(unsaved, tmp_path / "run", stop_at=4, profile=(2, 3))
    (trace,) = (tmp_path / "run" / "profile").rglob("*.xplane.pb")
    assert trace.read_bytes().count(b"dot") > 10  # the traced iterations ran within the trace


def test_a_model_without_experts_trains_and_resumes(experiment, tmp_path):
    dense = replace(experiment, model=replace(TINY, moe_pattern=(False,)), num_steps=8)
    run(dense, tmp_path / "run", stop_at=4)
    resumed = run(dense, tmp_path / "run", resume=True)
    assert resumed.summary["final_loss"] < 6
    assert resumed.metrics[-1]["tokens_routed"] == 0
