"""The user's environment variables: which of JAX's would change a run's results, and where caches belong."""

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

FIXED = (
    "JAX_DEBUG_KEY_REUSE",
    "JAX_DEFAULT_PRNG_IMPL",
    "JAX_DISABLE_JIT",
    "JAX_ENABLE_CUSTOM_PRNG",
    "JAX_ENABLE_X64",
    "JAX_LEGACY_PRNG_KEY",
    "JAX_NUMPY_DTYPE_PROMOTION",
    "JAX_NUMPY_RANK_PROMOTION",
    "JAX_RANDOM_SEED_OFFSET",
    "JAX_THREEFRY_PARTITIONABLE",
)
"""Variables that would give another loss with the same settings and seed, or that no step function compiles with."""
_RECORDED = ("JAX_", "XLA_", "LIBTPU_", "NVIDIA_TF32_OVERRIDE")


def drop_fixed(environment: MutableMapping[str, str]) -> list[str]:
    """Removes the variables in ``FIXED``, before JAX is imported; returns the names of those that were set."""
    return [name for name in FIXED if environment.pop(name, "")]


def compiler_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Selects the variables that may change the last bits of results, such as ``XLA_FLAGS``, for a run's record."""
    return {name: value for name, value in sorted(environment.items()) if name.startswith(_RECORDED)}


def cache_directory(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Directory for files that can be made again: ``$XDG_CACHE_HOME/swift``, else ``~/.cache/swift``.

    Returns:
        The directory, which may not exist; None for a user who has no home directory.
    """
    chosen = environment.get("XDG_CACHE_HOME", "")
    if os.path.isabs(chosen):  # others are to be ignored, says the XDG Base Directory Specification
        return Path(chosen) / "swift"
    try:
        return Path.home() / ".cache" / "swift"
    except RuntimeError:  # neither $HOME nor an entry in the password database
        return None
