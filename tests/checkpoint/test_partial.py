"""Losses of all memory: the dense part is that of the newest save, and every expert that of its newest copy."""

import math

import jax
import numpy as np
import pytest

from swift.checkpoint.inspection import source_lines
from swift.checkpoint.manifest import checkpoint_steps, read_manifest
from swift.checkpoint.reader import plan_restore
from swift.errors import SettingError

CLASSES, LAYERS = 4, 4
UNITS = [(layer, class_) for layer in range(LAYERS) for class_ in range(CLASSES)]


def newest_saves(k, num_saves):
    """Computes each expert's newest save, from 0: the first is full, then every layer takes turns by itself."""
    newest = dict.fromkeys(UNITS, 0)
    for save in range(1, num_saves):
        for layer in range(LAYERS):
            for nth in range(k):
                newest[layer, (layer * k + (save - 1) * k + nth) % CLASSES] = save
    return newest


@pytest.mark.parametrize("k", [1, 2, 3, "all"])
@pytest.mark.parametrize("num_saves", [1, 2, "N/K"])
def test_what_is_restored_is_what_was_saved_bit_for_bit(small_run, expert_of, k, num_saves):
    number = CLASSES if k == "all" else k
    count = 1 + math.ceil(CLASSES / number) if num_saves == "N/K" else num_saves
    run = small_run(experts_per_layer=k, every=2).run(2 * count + 1)
    plan = run.lose_all()
    assert plan.step == run.step == 2 * count
    saved = run.saved[run.step]
    dense = [(tree["step"], tree["master"]["head"], tree["moments"]["head"]) for tree in (run.state, saved)]
    jax.tree.map(np.testing.assert_array_equal, *dense)
    newest = newest_saves(number, count)
    for unit in UNITS:
        source = 2 * (newest[unit] + 1)
        assert plan.sources[unit].step == source
        np.testing.assert_equal(expert_of(run.state, *unit), expert_of(run.saved[source], *unit))
    if num_saves == "N/K":
        assert min(newest.values()) >= 1  # the full one is not needed any more
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(run.state)}
    assert dtypes == {leaf.dtype for leaf in jax.tree.leaves(saved)}


def test_the_first_save_is_full_and_one_that_is_asked_to_be(small_run):
    run = small_run(experts_per_layer=1).run(4)
    assert [read_manifest(run.directory / f"step-0000000{step}", "").is_full for step in (2, 4)] == [True, False]
    assert run.run(5).save(full=True).is_full


def test_load_aware_saves_what_has_most_updates_unsaved(small_run):
    run = small_run(experts_per_layer=1, selection="load_aware").run(2)
    before = run.ledger.tally.contained_LE
    run.run(3)
    unsaved = run.ledger.tally.contained_LE - before
    assert len({*unsaved[0].tolist()}) > 1
    run.run(4)
    unsaved = run.ledger.tally.contained_LE - before
    manifest = read_manifest(run.directory / "step-00000004", "")
    assert manifest.chosen == unsaved.argmax(axis=1)[:, None].tolist()


def test_a_run_goes_on_after_losses_and_keeps_what_it_may_need(small_run, expert_of):
    """Every loss falls back to copies that only ever come from the life before; and old files do not pile up."""
    run = small_run(experts_per_layer=1, every=1, num_kept=2)
    for last in (3, 5, 9, 20):
        run.run(last)
        plan = run.lose_all()
        assert plan.step == last
        for unit, copy in plan.sources.items():
            np.testing.assert_equal(expert_of(run.state, *unit), expert_of(run.saved[copy.step], *unit))
    assert checkpoint_steps(run.directory) == [19, 20]
    dense = [path.parent.parent.parent.name for path in run.directory.glob("*/arrays/state/master.head")]
    assert sorted(dense) == ["step-00000019", "step-00000020"]
    copies = list(run.directory.glob("*/arrays/state/expert.*"))
    assert len(copies) <= 3 * 2 * len(UNITS)  # of two types; two copies of each expert, and one more to be restored


def test_retention_keeps_the_newest_copy_and_the_one_before_for_every_checkpoint_that_is_kept(small_run):
    run = small_run(experts_per_layer=1, every=1, num_kept=2).run(12)
    for step in (11, 12):
        manifest = read_manifest(run.directory / f"step-000000{step}", "")
        assert all(len(copies) == 2 for copies in manifest.ledger.copies.values())
        for owner, files in manifest.files_needed().items():
            assert all((run.directory / f"step-{owner:08d}" / name).is_file() for name in files)
        assert plan_restore(run.directory, step=step).passed_over == ()


def test_what_cannot_be_told_to_be_superfluous_is_not_removed(small_run):
    run = small_run(experts_per_layer=1, every=1, num_kept=2).run(5)
    before = {path for path in run.directory.rglob("*") if path.is_file()}
    (run.directory / "step-00000005/manifest.json").write_text("?\n{}")
    run.run(6)
    assert before <= {path for path in run.directory.rglob("*") if path.is_file()}


def test_one_line_for_each_source(small_run):
    run = small_run(experts_per_layer=2).run(4)
    lines = source_lines(run.lose_all())
    assert lines == [
        "dense: storage, step 4",
        "experts 0, 1 of layer 0, experts 2, 3 of layer 1, experts 0, 1 of layer 2, experts 2, 3 of layer 3: "
        "storage, step 4",
        "experts 2, 3 of layer 0, experts 0, 1 of layer 1, experts 2, 3 of layer 2, experts 0, 1 of layer 3: "
        "storage, step 2",
    ]


def test_another_model_is_refused(small_run):
    run = small_run().run(2)
    with pytest.raises(SettingError, match="is of another model: its ModelConfig is 'small', here 'large'"):
        plan_restore(run.directory, {"ModelConfig": "large"})
    other = small_run(size=6)
    with pytest.raises(SettingError, match=r"is of another model: it has float32\[1, 2, 5\] for experts of float32"):
        other.lose_all()


def test_no_directory_has_no_checkpoints(tmp_path):
    assert checkpoint_steps(tmp_path / "nowhere") == []
    with pytest.raises(SettingError, match="holds no checkpoint"):
        plan_restore(tmp_path / "nowhere")


def test_a_state_whose_experts_have_no_classes_is_saved_whole(small_run):
    run = small_run(experts_per_layer="all")
    run.split = type(run.split)(run.split.abstract, run.split.specs, has_classes=False)
    run.ledger = type(run.ledger).first(run.split.num_layers, run.split.num_classes, CLASSES)
    run.run(2)
    expected = run.state
    run.run(3)
    plan = run.lose_all()
    jax.tree.map(np.testing.assert_array_equal, run.state, expected)
    assert (plan.sources, plan.tally.plt) == ({}, 0.0)
