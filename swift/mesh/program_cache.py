"""JAX's cache of compiled programs on disk, which spares the next run, or a restart, from compiling them."""

from contextlib import suppress

import jax

from swift.variables import cache_directory

_MAX_BYTES = 4 * 2**30
_LEAST_S = 0.2
"""Least seconds of compilation for which a program is kept; JAX's default of 1 s leaves out much of a small run."""


def keep_programs() -> None:
    """Keeps compiled programs in the user's cache, unless a cache directory is already configured in JAX.

    Programs found there are executed, so only its owner can open the directory ``~/.cache/swift/programs``. A user
    without a home directory has no cache.
    """
    cache = cache_directory()
    if jax.config.jax_compilation_cache_dir is not None or cache is None:  # type: ignore[attr-defined]
        return
    directory = cache / "programs"
    with suppress(OSError):  # where it cannot be made, JAX runs without the cache
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o700)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_compilation_cache_max_size", _MAX_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _LEAST_S)
