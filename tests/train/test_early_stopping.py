"""A run that stops when its validation loss no longer improves, and keeps its best checkpoints."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift.checkpoint.config import CheckpointConfig
from swift.checkpoint.manifest import best_steps, checkpoint_steps, step_named
from swift.checkpoint.reader import plan_restore
from swift.cli.standing import standing_of
from swift.config.checks import check
from swift.errors import SettingError
from swift.runlog.reading import read_run
from swift.train.records import Validations
from swift.train.start import TrainOptions
from swift.train.trainer import train
from tests.train.partial_runs import saving_one_expert
from tests.train.runs import measured, run


@given(
    st.lists(st.sampled_from([1.0, 1.5, 2.0, 2.5, 3.0, math.nan, math.inf]), min_size=1, max_size=12),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_patience_counts_evaluations_without_improvement(losses, patience, least):
    """By hand: the last improvement is the last loss below the previous improvement by more than the least."""
    improved, best = [], math.inf
    for number, loss in enumerate(losses, 1):
        if loss < best - least:
            best = loss
            improved.append(number)
    validations = Validations(min_improvement=least)
    for number, loss in enumerate(losses, 1):
        validations = validations.with_loss(10 * number, loss)
        last = max([at for at in improved if at <= number], default=0)
        assert validations.is_over(patience) == (number - last >= patience)
        assert not validations.is_over(None)
        assert validations.best_step == 10 * last
        stored = json.loads(json.dumps(validations.to_json(), allow_nan=False))
        restored = Validations.restored({"validation": stored}, least)
        same = replace(validations, loss=validations.loss if math.isfinite(validations.loss) else math.inf)
        assert restored == same
        assert Validations.restored({"validation": stored}, least + 0.25).num_since == 0
    assert Validations.restored({}, 0.5) == Validations(min_improvement=0.5)


@pytest.fixture(scope="module")
def experiment(corpus):
    """Evaluations and checkpoints after each iteration; no improvement after the first is large enough."""
    base = saving_one_expert(corpus)
    checkpoint = CheckpointConfig(every=1, num_kept=1, num_best=2, experts_per_layer=1)
    return replace(base, num_steps=9, eval_every=1, num_eval_batches=1, checkpoint=checkpoint)


@pytest.fixture(scope="module")
def plain(experiment, tmp_path_factory):
    """The same run, which neither stops nor keeps its best checkpoints."""
    whole = replace(experiment, checkpoint=CheckpointConfig(every=0))
    return run(whole, tmp_path_factory.mktemp("plain") / "run")


def test_a_run_stops_early_says_why_and_goes_on_only_if_a_setting_changes(
    experiment, plain, tmp_path, capfd, monkeypatch
):
    path, stopping = tmp_path / "run", replace(experiment, patience=2, min_improvement=50.0)
    record = run(stopping, path)
    reason = "the validation loss has not improved by more than 50 in 2 evaluations; the best was "
    assert f"stopped early after iteration 3: {reason}" in capfd.readouterr().err
    assert measured(record) == measured(plain)[:3]
    (stop,) = (event for event in record.events if event["event"] == "early_stop")
    assert (stop["step"], stop["best_step"], stop["num_since"]) == (3, 1, 2)
    assert record.events[-1]["event"] == "finish"
    assert record.summary["stopped_early"] == {"step": 3, "best_step": 1, "best_loss": stop["best_loss"]}
    assert stop["best_loss"] == plain.metrics[0]["validation_loss"]
    manifest = plan_restore(path / "checkpoints").manifest
    assert (manifest.step, manifest.is_full) == (3, True)

    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with pytest.raises(SettingError, match=r"stops early at iteration 3: .*change Experiment.patience"):
        run(stopping, path, resume=True)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before

    monkeypatch.setattr("swift.cli.standing.check_resumable", lambda *_: None)  # the stored settings are no gin file
    for change in ({"num_steps": 20}, {"patience": 1}, {}):  # a sweep that is extended does not begin it again
        assert standing_of(replace(stopping, **change), path, resume=True) == "ended"
    for change in ({"patience": 4}, {"patience": None}, {"min_improvement": 0.0}, {"num_eval_batches": 2}):
        assert standing_of(replace(stopping, **change), path, resume=True) == "unfinished"

    (path / "summary.json").unlink()  # its process ended before it wrote the summary
    assert run(stopping, path, resume=True).summary["stopped_early"]["step"] == 3
    record = run(replace(stopping, patience=4), path, resume=True)
    assert (record.metrics.last_step, record.summary["stopped_early"]["step"]) == (5, 5)
    record = run(replace(stopping, patience=None, min_improvement=0.0), path, resume=True)
    assert "stopped_early" not in record.summary
    assert measured(record) == measured(plain)


def test_the_best_checkpoints_are_kept_and_nothing_else_changes(experiment, plain, tmp_path):
    record = run(experiment, tmp_path / "run")
    assert measured(record) == measured(plain)
    losses = {step["step"]: step["validation_loss"] for step in plain.metrics}
    best = sorted(losses, key=lambda step: (losses[step], step))[:2]
    directory = tmp_path / "run" / "checkpoints"
    assert checkpoint_steps(directory) == sorted({*best, 9})
    assert step_named(directory, "best") == best[0]
    for step in best:
        plan = plan_restore(directory, experiment.identity(), step)
        assert plan.manifest.validation_loss == losses[step]
        assert plan.passed_over == ()


@pytest.mark.parametrize("change", [{"num_eval_batches": 2}, {"sequences_per_microbatch": 8}])
def test_losses_over_other_text_are_not_compared(experiment, tmp_path, change):
    """No evaluation after the first improves, until there are others: then the best begins anew."""
    path = tmp_path / "run"
    stopping = replace(experiment, patience=3, min_improvement=50.0)
    train(stopping, TrainOptions(path, "the same", prepare="none", stop_at=2))
    assert sorted(best_steps(path / "checkpoints")) == [1, 2]
    assert experiment.sequences_per_microbatch != 8
    record = run(replace(stopping, **change), path, resume=True)
    assert record.summary["stopped_early"] == {
        "step": 6, "best_step": 3, "best_loss": record.metrics[2]["validation_loss"]
    }  # fmt: skip
    assert set(best_steps(path / "checkpoints")) <= {3, 4, 5, 6}


def test_stopped_by_a_user_at_the_patience_is_no_end(experiment, plain, tmp_path):
    """``--stop-at`` ends an invocation; the next one has the same patience left."""
    stopping = replace(experiment, patience=4, min_improvement=50.0)
    train(stopping, TrainOptions(tmp_path / "run", "the same", prepare="none", stop_at=3))
    assert read_run(tmp_path / "run").summary is None
    record = run(stopping, tmp_path / "run", resume=True)
    assert record.metrics.last_step == 5
    assert measured(record) == measured(plain)[:5]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"patience": 0}, "Experiment.patience = 0: must be a whole number of at least 1"),
        ({"patience": 2, "eval_every": 0, "checkpoint": CheckpointConfig()}, "Experiment.patience = 2: needs a number"),
        ({"min_improvement": 0.1}, "Experiment.min_improvement = 0.1: would change nothing"),
        ({"patience": 1, "min_improvement": -1.0}, "must be a number of at least 0"),
        ({"eval_every": 2}, r"CheckpointConfig.num_best = 2: needs CheckpointConfig.every = 1 to be a multiple"),
        ({"eval_every": 0}, r"CheckpointConfig.num_best = 2: needs"),
    ],
)
def test_settings_that_cannot_work_are_told(experiment, changes, words):
    with pytest.raises(SettingError, match=words):
        check(replace(experiment, **changes))
