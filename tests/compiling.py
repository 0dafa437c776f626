"""Two ways to compile under pytest: quickly, and as a run does."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import pytest
from jax._src import compiler

_NO_EMITTERS = "--xla_cpu_use_fusion_emitters=false"


def compile_quickly() -> None:
    """Has this process, and those that it starts, compile quickly rather than well."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_NO_EMITTERS}".strip()
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    jax.config.update("jax_disable_most_optimizations", True)


@contextmanager
def compiled_as_in_a_run() -> Iterator[None]:
    """Compiles as a run does, in this process and those that it starts, as long as the context lasts.

    Functions that were compiled before are compiled anew, here and afterwards: JAX remembers them by what they were
    given, not by how they were compiled.
    """
    if not jax.config.read("jax_disable_most_optimizations"):
        yield
        return
    get_options = compiler.get_compile_options

    def options_of_a_run(*given: Any, env_options_overrides: dict[str, Any] | None = None, **more: Any) -> Any:
        emitters = {"xla_cpu_use_fusion_emitters": True}  # XLA has read its flags when this process began
        return get_options(*given, env_options_overrides=emitters | (env_options_overrides or {}), **more)

    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", options_of_a_run)
        patch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"].replace(_NO_EMITTERS, "").strip())
        patch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS")
        jax.config.update("jax_disable_most_optimizations", False)
        try:
            yield
        finally:
            jax.config.update("jax_disable_most_optimizations", True)
            jax.clear_caches()
