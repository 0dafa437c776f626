"""The runs of a comparison: products of varied settings, their names, and what is refused."""

from pathlib import Path

import pytest

from swift.config.sweep import compared_runs
from swift.errors import SettingError

BASE = "Experiment.num_steps = 30\n"
RATE = "OptimizerConfig.peak_learning_rate"


@pytest.fixture
def base(tmp_path) -> Path:
    path = tmp_path / "base.gin"
    path.write_text(BASE)
    return path


def test_the_runs_are_the_product_of_all_values(base):
    runs = compared_runs([base], ["Experiment.num_steps=20"], [f"{RATE}=1e-3,0.01"], "0-1,7")
    told = [(run.name, run.experiment.optimizer.peak_learning_rate, run.experiment.seed) for run in runs]
    assert told == [
        ("base,peak_learning_rate=0.001,seed=0", 1e-3, 0),
        ("base,peak_learning_rate=0.001,seed=1", 1e-3, 1),
        ("base,peak_learning_rate=0.001,seed=7", 1e-3, 7),
        ("base,peak_learning_rate=0.01,seed=0", 0.01, 0),
        ("base,peak_learning_rate=0.01,seed=1", 0.01, 1),
        ("base,peak_learning_rate=0.01,seed=7", 0.01, 7),
    ]
    assert {run.experiment.num_steps for run in runs} == {20}
    assert {run.config for run in runs} == {base}


def test_several_files_and_no_varied_setting(base, tmp_path):
    other = tmp_path / "other.gin"
    other.write_text(BASE)
    assert [run.name for run in compared_runs([base, other], [])] == ["base", "other"]
    names = [run.name for run in compared_runs([base, other], [], [], "3")]
    assert names == ["base,seed=3", "other,seed=3"]


def test_values_with_commas_texts_and_classes(base):
    policies = [
        run.experiment.placement.name for run in compared_runs([base], [], ["Experiment.placement=@Symi(),@Static()"])
    ]
    assert policies == ["symi", "static"]
    runs = compared_runs(
        [base], [], ["Experiment.ranks=emulated,virtual", "Experiment.failures=[],['step 5: fail 0:0 rank 1', ]"]
    )
    assert [(run.experiment.ranks, len(run.experiment.failures)) for run in runs] == [
        ("emulated", 0), ("emulated", 1), ("virtual", 0), ("virtual", 1)
    ]  # fmt: skip
    assert len({run.name for run in runs}) == 4
    assert all("/" not in run.name and len(run.name) < 200 for run in runs)


def test_long_names_are_cut_and_told_apart(tmp_path):
    path = tmp_path / f"{'a' * 219}.gin"
    path.write_text(BASE)
    names = [run.name for run in compared_runs([path], [], [], "0-2")]
    assert len(set(names)) == 3
    assert all(len(name.encode()) <= 200 and name.startswith("a" * 190) for name in names)


def test_long_values_are_told_apart(base):
    values = [f"'{'x' * 50}{number}.bin'" for number in range(2)]
    source = "DataConfig.source=@TextFiles()"
    runs = compared_runs([base], [source], [f"TextFiles.pattern={','.join(values)}"])
    assert len({run.name for run in runs}) == 2
    assert all(len(run.name) < 80 for run in runs)


@pytest.mark.parametrize(
    ("vary", "seeds", "words"),
    [
        ([f"{RATE}=1e-3,-1"], None, "OptimizerConfig.peak_learning_rate = -1"),
        ([f"{RATE}=1e-3,0.001"], None, "has a value twice"),
        ([f"{RATE}=1e-3,"], None, "must be NAME=VALUE,VALUE"),
        ([RATE], None, "must be NAME=VALUE,VALUE"),
        ([f"{RATE}=1", f"{RATE}=2"], None, "another --vary varies"),
        (["Nowhere.x=1,2"], None, "there is no Nowhere"),
        (["Experiment.seed=1,2"], "0-4", "which --vary varies"),
        (["Experiment.num_steps=5,6"], None, "sets a setting that is varied"),
        (["num_steps=5,6", "Experiment.eval_every=1"], "0", "Experiment.num_steps"),
        ([], "4-0", "must be seeds, such as"),
        ([], "a", "must be seeds, such as"),
        ([], "", "must be seeds, such as"),
        ([], "1,0-2", "has a seed twice"),
        ([], "0-4294967296", "from 0 to"),
        ([], "0-99999", "at most 10,000"),
        ([f"{RATE}=" + ",".join(map(str, range(1, 200)))], "0-99", "at most 10,000 runs"),
        ([f"{RATE}=(1,2"], None, "bracket"),
    ],
)
def test_wrong_values_are_told(base, vary, seeds, words):
    with pytest.raises(SettingError) as told:
        compared_runs([base], ["Experiment.num_steps=9"], vary, seeds)
    assert words in str(told.value)
    assert "--set = " not in str(told.value) or "varied" in str(told.value)
