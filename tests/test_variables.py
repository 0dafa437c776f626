"""What the user's environment variables may change: no loss, no refusal, no file outside of where they say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from swift.mesh.devices import enable_compilation_cache
from swift.models.config import ModelConfig
from swift.models.gpt import GPT
from swift.models.parameters import draw_parameters, root_key
from swift.variables import FIXED, cache_directory, compiler_variables, drop_fixed

HOSTILE = {
    "JAX_DEBUG_KEY_REUSE": "1",
    "JAX_DEFAULT_PRNG_IMPL": "rbg",
    "JAX_DISABLE_JIT": "1",
    "JAX_ENABLE_CUSTOM_PRNG": "1",
    "JAX_ENABLE_X64": "1",
    "JAX_LEGACY_PRNG_KEY": "error",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_RANDOM_SEED_OFFSET": "5",
    "JAX_THREEFRY_PARTITIONABLE": "0",
}
"""A value of each variable with which JAX computes something else, or nothing."""
MICRO = """
Experiment.data = @DataConfig()
DataConfig.source = @TextFiles()
TextFiles.pattern = '{directory}/*.txt'
DataConfig.validation_share = 0.5
Experiment.model = @ModelConfig()
ModelConfig.num_layers = 2
ModelConfig.model_dim = 16
ModelConfig.num_heads = 1
ModelConfig.ffn_dim = 16
ModelConfig.sequence_length = 8
Experiment.experts = @ExpertConfig()
ExpertConfig.num_classes = 2
ExpertConfig.slots_per_rank = 2
Experiment.topology = @Topology()
Topology.num_expert_ranks = 1
Experiment.optimizer = @OptimizerConfig()
OptimizerConfig.warmup_steps = 1
Experiment.num_steps = 2
Experiment.sequences_per_microbatch = 1
Experiment.eval_every = 0
"""


def trained(directory: Path, more: dict[str, str]) -> tuple[list[dict], dict, str]:
    """Metrics and first event of a run by command line with these variables, and its lines on stderr."""
    directory.mkdir()
    (directory / "micro.gin").write_text(MICRO.format(directory=directory))
    for number in range(4):
        (directory / f"{number}.txt").write_text("a text of some words " * 9)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    words = [sys.executable, "-m", "swift", "train", str(directory / "micro.gin"), "--run-dir", str(directory / "run")]
    told = subprocess.run(words, env=clean | more, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    metrics, events = (
        [json.loads(line) for line in (directory / "run" / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "events.jsonl")
    )
    return metrics, events[0], told.stderr


def test_settings_alone_decide_losses(tmp_path):
    assert set(HOSTILE) == set(FIXED)
    plain, _, _ = trained(tmp_path / "plain", {})
    changed, start, lines = trained(tmp_path / "changed", HOSTILE | {"JAX_DEFAULT_MATMUL_PRECISION": "highest"})
    assert [row["loss"] for row in changed] == [row["loss"] for row in plain]
    assert start["variables"]["JAX_DEFAULT_MATMUL_PRECISION"] == "highest"
    assert not start["variables"].keys() & HOSTILE.keys()
    assert all(name in lines for name in HOSTILE)


def test_parameters_of_a_seed_do_not_depend_on_how_jax_draws():
    gpt = GPT(ModelConfig(num_layers=2, model_dim=16, num_heads=1, ffn_dim=16, sequence_length=8), 20, 2)
    plain = draw_parameters(gpt.groups, root_key(3))
    with jax.threefry_partitionable(False), jax.default_prng_impl("rbg"):
        changed = draw_parameters(gpt.groups, root_key(3))
    jax.tree.map(np.testing.assert_array_equal, changed, plain)


def test_only_set_variables_are_dropped():
    environment = {"JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu", "JAX_RANDOM_SEED_OFFSET": ""}
    assert drop_fixed(environment) == ["JAX_ENABLE_X64"]
    assert environment == {"JAX_PLATFORMS": "cpu"}


def test_variables_of_the_compiler_are_recorded_and_no_others():
    known = {"XLA_FLAGS": "--xla_a=1", "JAX_PLATFORMS": "cpu", "PATH": "/bin", "LIBTPU_INIT_ARGS": "x", "AJAX_": "y"}
    assert set(compiler_variables(known)) == {"XLA_FLAGS", "JAX_PLATFORMS", "LIBTPU_INIT_ARGS"}


@pytest.mark.parametrize(
    ("variables", "directory"),
    [
        ({"XDG_CACHE_HOME": "/caches"}, "/caches/swift"),
        ({"XDG_CACHE_HOME": "caches"}, "/home/somebody/.cache/swift"),
        ({"XDG_CACHE_HOME": ""}, "/home/somebody/.cache/swift"),
        ({}, "/home/somebody/.cache/swift"),
    ],
)
def test_caches_are_where_the_user_has_them(variables, directory, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_directory(variables) == Path(directory)


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    def no_entry(_):
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", no_entry)
    assert cache_directory({}) is None
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        enable_compilation_cache()
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
