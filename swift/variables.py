"""The user's environment variables: those of JAX that would change results, and the directory for caches."""

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
"""Variables that change the loss for the same settings and seed, or prevent step functions from compiling."""
_RECORDED = ("JAX_", "XLA_", "LIBTPU_", "NVIDIA_TF32_OVERRIDE")


def drop_fixed(environment: MutableMapping[str, str]) -> list[str]:
    """Removes the variables in ``FIXED``, and returns those that were set; must be called before JAX is imported."""
    return [name for name in FIXED if environment.pop(name, "")]


def compiler_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Selects variables to record with a run, such as ``XLA_FLAGS``, which may change the last bits of results."""
    return {name: value for name, value in sorted(environment.items()) if name.startswith(_RECORDED)}


def cache_directory(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the directory for files that can be rebuilt: ``$XDG_CACHE_HOME/swift``, else ``~/.cache/swift``.

    Returns:
        The directory, which may not exist, or None for a user without a home directory.
    """
    chosen = environment.get("XDG_CACHE_HOME", "")
    if os.path.isabs(chosen):  # the XDG Base Directory Specification says to ignore relative paths
        return Path(chosen) / "swift"
    try:
        return Path.home() / ".cache" / "swift"
    except RuntimeError:  # neither $HOME nor an entry in the password database
        return None
