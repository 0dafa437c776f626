"""``swift settings`` lists every setting that can be set; ``swift config`` prints those of an experiment."""

import inspect
import json
import re
import subprocess
import sys

import pytest

from swift.config.gin_reader import CONFIGURABLES


def test_every_setting_has_a_type_and_a_meaning(tell):
    told = tell("settings", "--format", "json")
    listed = {one["name"]: one for one in json.loads(told.out)}
    expected = {f"{name}.{one}" for name, kind in CONFIGURABLES.items() for one in inspect.signature(kind).parameters}
    assert set(listed) == expected
    assert [name for name, one in listed.items() if not (one["type"] and one["doc"])] == []


def test_a_setting_is_shown_with_its_default(tell):
    told = tell("settings", "Experiment.num_steps")
    assert (told.code, told.err) == (0, "")
    assert told.out.splitlines()[2:] == [
        "  Experiment.num_steps",
        "      a whole number; default 300",
        "      number of iterations.",
    ]
    assert tell("settings", "num_steps").out == told.out


def test_settings_are_listed_without_docstrings_too(tell):
    """As under ``python -OO``, or of a class of the user's own that has none."""
    words = [sys.executable, "-OO", "-m", "swift", "settings"]
    listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^  (\w+\.\w+)$", listed, re.MULTILINE) == re.findall(
        r"^  (\w+\.\w+)$", tell("settings").out, re.MULTILINE
    )


@pytest.mark.parametrize(("num_steps", "warmup"), [(1, 0), (5, 2), (20, 10), (21, 20), (10_000, 20)])
def test_a_run_of_any_length_has_a_warm_up_that_fits(tell, here, num_steps, warmup):
    (here / "short.gin").write_text(f"Experiment.num_steps = {num_steps}\n")
    assert f"\nOptimizerConfig.warmup_steps = {warmup}\n" in tell("config", "short.gin").out


def test_a_class_is_shown_with_all_its_settings(tell):
    for name in ("FlexMoE", "@FlexMoE()"):
        out = tell("settings", name).out
        assert out.startswith("@FlexMoE(): ")
        assert "FlexMoE.interval" in out
        assert "Experiment" not in out
    assert tell("settings", "Symi").out.startswith("@Symi(): ")


WRONG = {
    "Experiment.num_step": "NAME = 'Experiment.num_step': there is no such setting; did you mean Experiment.num_steps?",
    "xyzzy": "NAME = 'xyzzy': there is no such setting; `swift settings` lists all",
    "ModelConfg": "NAME = 'ModelConfg': there is no such setting; did you mean ModelConfig?",
}


@pytest.mark.parametrize("name", WRONG)
def test_an_unknown_setting_is_told(refusal, name):
    assert refusal("settings", name) == WRONG[name]


def test_the_settings_of_an_experiment_are_printed_and_can_be_run_again(tell, here):
    told = tell("config", "tiny.gin", "--set", "Experiment.seed=7")
    assert (told.code, told.err, told.new) == (0, "", [])
    assert "Experiment.seed = 7\n" in told.out
    (here / "whole.gin").write_text(told.out)
    assert tell("config", "whole.gin").out == told.out
