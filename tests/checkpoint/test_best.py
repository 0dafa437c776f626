"""The checkpoints with the lowest validation losses are kept, and can be restored, beside the newest."""

import errno
import math
from pathlib import Path

import numpy as np
import pytest

from swift.checkpoint.arrays import Verifier
from swift.checkpoint.inspection import find_damage, overview
from swift.checkpoint.manifest import best_steps, checkpoint_path, checkpoint_steps, committed_steps, step_named
from swift.checkpoint.reader import load_plan, plan_restore
from swift.errors import SettingError
from tests.checkpoint.conftest import IDENTITY

LOSSES = {1: 9.0, 2: 4.0, 3: 5.0, 4: 3.0, 5: 3.0, 6: 7.0, 7: math.nan, 8: 8.0, 9: 6.0, 10: 6.5}


@pytest.mark.parametrize("experts", [1, 2, "all"])
@pytest.mark.parametrize("num_best", [1, 3])
def test_the_best_and_the_newest_are_restorable(small_run, expert_of, experts, num_best):
    """By hand: the lowest losses so far, the older of two equal ones, and the two newest."""
    run = small_run(experts_per_layer=experts, every=1, num_kept=2, num_best=num_best)
    run.losses = LOSSES
    for last in LOSSES:
        run.run(last)
        known = sorted((loss, step) for step, loss in LOSSES.items() if step <= last and math.isfinite(loss))
        expected = {step for _, step in known[:num_best]} | {*range(max(1, last - 1), last + 1)}
        assert checkpoint_steps(run.directory) == committed_steps(run.directory) == sorted(expected)
        assert list(find_damage(run.directory, None, Verifier(run.directory))) == []
    for step in checkpoint_steps(run.directory):
        plan = plan_restore(run.directory, IDENTITY, step)
        assert plan.passed_over == ()
        state = load_plan(run.directory, plan, run.split)
        np.testing.assert_array_equal(state["step"], run.saved[step]["step"])
        np.testing.assert_array_equal(state["master"]["head"], run.saved[step]["master"]["head"])
        for unit, copy in plan.sources.items():
            assert copy.step <= step
            np.testing.assert_equal(expert_of(state, *unit), expert_of(run.saved[copy.step], *unit))
    assert step_named(run.directory, "best") == 4
    assert best_steps(run.directory)[:num_best] == [4, 5, 2][:num_best]
    assert [row.get("validation_loss") for row in overview(run.directory)][:1] == [
        LOSSES[min(checkpoint_steps(run.directory))]
    ]


def test_a_run_goes_on_from_its_best_checkpoint_after_damage(small_run):
    """Both newest ones are damaged: what is left is the best, and what is saved next does not remove it."""
    run = small_run(experts_per_layer=1, every=1, num_kept=2, num_best=1)
    run.losses = {2: 1.0, 9: 3.0, 10: 2.0}
    run.run(8)
    for step in (7, 8):
        (checkpoint_path(run.directory, step) / "manifest.json").write_text("?")
    plan = run.lose_all()
    assert plan.step == 2
    run.run(10)
    assert run.step == 10
    assert checkpoint_steps(run.directory) == [2, 9, 10]
    assert plan_restore(run.directory, IDENTITY, 2).passed_over == ()


def test_a_best_one_that_cannot_be_read_for_a_while_stays(small_run, monkeypatch):
    """The run goes on, and removes what is too old once it can read all manifests again."""
    run = small_run(experts_per_layer="all", every=1, num_kept=1, num_best=1)
    run.losses = {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
    run.run(2)
    assert checkpoint_steps(run.directory) == [1, 2]
    best, read = checkpoint_path(run.directory, 1) / "manifest.json", Path.read_bytes

    def read_but_the_best(path):
        if path == best:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", read_but_the_best)
        assert best_steps(run.directory) == [2]
        run.run(3)
    assert checkpoint_steps(run.directory) == [1, 2, 3]
    run.run(4)
    assert checkpoint_steps(run.directory) == [1, 4]
    assert step_named(run.directory, "best") == 1


def test_a_lost_manifest_is_not_mistaken_for_a_removed_one(small_run):
    run = small_run(experts_per_layer=1, every=1, num_kept=2, num_best=1)
    run.losses = {2: 1.0}
    run.run(6)
    assert committed_steps(run.directory) == [2, 5, 6]
    (checkpoint_path(run.directory, 5) / "manifest.json").unlink()
    assert committed_steps(run.directory) == [2, 5, 6]
    assert checkpoint_steps(run.directory) == [2, 6]


def test_without_losses_there_is_no_best(small_run):
    run = small_run(every=1).run(2)
    with pytest.raises(SettingError, match=r"--step = 'best': no checkpoint in .* has a validation loss"):
        step_named(run.directory, "best")
