"""JAX's cache of compiled programs on disk: the next run, or a restart, finds them ready."""

from contextlib import suppress
from pathlib import Path

import jax

_MAX_BYTES = 4 * 2**30
_LEAST_S = 0.2
"""Seconds that a program takes to compile to be worth keeping; JAX's limit of 1 s leaves out much of a small run."""


def keep_programs(directory: Path | None = None) -> None:
    """Keeps compiled programs in a directory, unless JAX was told where before.

    Programs that lie there are run, so it is a directory that only its owner can open.

    Args:
        directory: directory of programs, made if it is missing; ``~/.cache/swift/programs`` unless given.
    """
    if jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]
        return
    directory = directory or Path.home() / ".cache" / "swift" / "programs"
    with suppress(OSError):  # without a home directory JAX runs without the cache
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o700)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_compilation_cache_max_size", _MAX_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _LEAST_S)
