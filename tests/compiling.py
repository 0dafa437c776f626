"""Two ways to compile under pytest: quickly, and as a run does."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax
import pytest
from jax._src import compiler

_NO_EMITTERS = "--xla_cpu_use_fusion_emitters=false"


def compile_quickly() -> None:
    """Has this process, and those that it starts, compile quickly rather than well."""
    present = os.environ.get("XLA_FLAGS", "")
    if _NO_EMITTERS not in present and knows_flag(_NO_EMITTERS):  # processes that pytest starts inherit the flag
        os.environ["XLA_FLAGS"] = f"{present} {_NO_EMITTERS}".strip()
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    jax.config.update("jax_disable_most_optimizations", True)


@cache
def knows_flag(flag: str) -> bool:
    """Whether XLA has a flag: one that it does not know ends the process that compiles with it (XLA of JAX 0.12)."""
    probe = [sys.executable, "-c", "import jax; jax.jit(lambda: 0)()"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(probe, env=environment, capture_output=True, check=False).returncode == 0


@contextmanager
def compiled_as_in_a_run() -> Iterator[None]:
    """Compiles as a run does, in this process and those that it starts, as long as the context lasts.

    Functions that were compiled before are compiled again, here and afterwards: JAX remembers them by what they were
    given, not by how they were compiled.
    """
    if not jax.config.read("jax_disable_most_optimizations"):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        flags = os.environ.get("XLA_FLAGS", "")
        if _NO_EMITTERS in flags:  # XLA has read its flags when this process began
            patch.setattr(compiler, "get_compile_options", _with_emitters(compiler.get_compile_options))
            patch.setenv("XLA_FLAGS", flags.replace(_NO_EMITTERS, "").strip())
        jax.clear_caches()
        patch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS")
        jax.config.update("jax_disable_most_optimizations", False)
        try:
            yield
        finally:
            jax.config.update("jax_disable_most_optimizations", True)
            jax.clear_caches()


def _with_emitters(get_options: Any) -> Any:
    """The function of JAX that makes the options of a compilation, with XLA's fusion emitters turned on."""

    def options_of_a_run(*given: Any, env_options_overrides: dict[str, Any] | None = None, **more: Any) -> Any:
        emitters = {"xla_cpu_use_fusion_emitters": True}
        return get_options(*given, env_options_overrides=emitters | (env_options_overrides or {}), **more)

    return options_of_a_run
