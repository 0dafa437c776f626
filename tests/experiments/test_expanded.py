"""Every setting of every experiment, defaults too, is kept as text: a change of any shows in review."""

import difflib
import importlib.util
from pathlib import Path

import pytest

from swift.config.gin_reader import load_experiment
from swift.config.stored import config_text

_SPEC = importlib.util.spec_from_file_location("renew", Path(__file__).with_name("renew.py"))
kept = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(kept)
HOW = "if this is meant, run `python tests/experiments/renew.py` and commit what it writes"


@pytest.mark.parametrize("name", kept.experiments())
def test_an_experiment_is_what_it_was(name):
    path = kept.expanded_path(name)
    before = path.read_text() if path.exists() else ""
    now = config_text(load_experiment(kept.EXPERIMENTS / name))
    if now != before:
        lines = difflib.unified_diff(before.splitlines(), now.splitlines(), path.name, name, n=0, lineterm="")
        pytest.fail("\n".join([f"the expanded form of experiments/{name} has changed; {HOW}", *lines]), pytrace=False)


@pytest.mark.parametrize("name", kept.experiments())
def test_the_expanded_form_is_the_same_experiment(name, tmp_path):
    experiment = load_experiment(kept.EXPERIMENTS / name)
    (tmp_path / "expanded.gin").write_text(config_text(experiment))
    assert load_experiment(tmp_path / "expanded.gin") == experiment


def test_no_expanded_form_is_left_of_an_experiment_that_is_gone():
    left = set(kept.EXPANDED.rglob("*.txt")) - {kept.expanded_path(name) for name in kept.experiments()}
    assert not left, HOW
