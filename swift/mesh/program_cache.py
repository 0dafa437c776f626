"""JAX's cache of compiled programs on disk, which spares the next run, or a restart, from compiling them."""

from contextlib import suppress
from pathlib import Path

import jax

_MAX_BYTES = 4 * 2**30
_LEAST_S = 0.2
"""Least seconds of compilation for which a program is kept; JAX's default of 1 s leaves out much of a small run."""


def keep_programs() -> None:
    """Keeps compiled programs in ``~/.cache/swift/programs``, unless a cache directory is already configured in JAX.

    Programs found there are executed, so only its owner can open the directory.
    """
    if jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]
        return
    directory = Path.home() / ".cache" / "swift" / "programs"
    with suppress(OSError):  # without a home directory JAX runs without the cache
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o700)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_compilation_cache_max_size", _MAX_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _LEAST_S)
