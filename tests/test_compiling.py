"""Compiling as a run does among tests that compile quickly: nothing of theirs is taken, and nothing stays."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax._src import compiler

from swift.mesh.devices import PATIENCE_FLAGS
from tests.case_tiers import LONG_TESTS, QUICK_TESTS
from tests.compiling import compile_quickly, compiled_as_in_a_run, knows_flag


@pytest.fixture
def levels(monkeypatch):
    """The optimization level of each program that is compiled, and whether it has XLA's fusion emitters anyway.

    Compiles quickly, whatever the other tests do.
    """
    for name in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS"):
        monkeypatch.setenv(name, "")
    before, made = jax.config.read("jax_disable_most_optimizations"), []
    get = compiler.get_compile_options

    def noted(*given, **more):
        options = get(*given, **more)
        level = options.executable_build_options.debug_options.xla_backend_optimization_level
        made.append((level, dict(options.env_option_overrides).get("xla_cpu_use_fusion_emitters")))
        return options

    monkeypatch.setattr(compiler, "get_compile_options", noted)
    compile_quickly()
    yield made
    jax.config.update("jax_disable_most_optimizations", before)
    jax.clear_caches()


def test_what_was_compiled_the_other_way_is_compiled_anew(levels):
    double, x = jax.jit(lambda x: x * 2), jnp.ones(3)
    levels.clear()
    double(x)
    with compiled_as_in_a_run():
        double(x)
    double(x)
    emitters = True if knows_flag("--xla_cpu_use_fusion_emitters=false") else None
    assert levels == [(0, None), (3, emitters), (0, None)]


def test_a_flag_that_xla_lacks_is_known_to_be_missing():
    assert knows_flag("--xla_dump_to=")
    assert not knows_flag("--xla_no_such_flag=1")


def test_flags_of_emulated_devices_are_known_to_this_xla():
    assert knows_flag(" ".join(PATIENCE_FLAGS))


@pytest.mark.usefixtures("levels")
def test_processes_started_meanwhile_compile_as_a_run_does():
    os.environ["XLA_FLAGS"] += " --another"
    before = dict(os.environ)
    with compiled_as_in_a_run():
        assert os.environ["XLA_FLAGS"].strip() == "--another"
        assert "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ
    assert dict(os.environ) == before


def test_make_asks_for_the_tests_that_compile_quickly():
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    assert [
        line.rpartition(" -m ")[2] for line in makefile.splitlines() if "pytest" in line and line.count(" -m ") > 1
    ] == [
        f"'{QUICK_TESTS}'",
        f"'{LONG_TESTS}'",
    ]
