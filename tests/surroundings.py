"""What tests do not depend on: the variables of whoever runs them. A plugin, since pytest loads it before JAX."""

import os
from collections.abc import MutableMapping
from pathlib import Path

_CACHES = Path(__file__).parents[1] / ".jax_cache" / "of_the_user"
"""The user's own caches stay as they are, and a home that is missing or cannot be written to makes no difference."""
_OF_TERMINALS = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")


def pytest_load_initial_conftests() -> None:
    """Runs before the conftest files import JAX, which reads its variables as it is imported."""
    if "PYTEST_XDIST_WORKER" not in os.environ:  # whose variables are those that pytest has set itself
        make_plain(os.environ)


def make_plain(environment: MutableMapping[str, str]) -> None:
    """Replaces variables by which terminals, JAX, XLA and caches differ, for tests and what they start."""
    of_jax = [name for name in environment if name.startswith("JAX_")]
    for name in (*of_jax, "XLA_FLAGS", "PYTHONWARNINGS", *_OF_TERMINALS):
        environment.pop(name, None)
    environment["TERM"] = "xterm"
    environment["XDG_CACHE_HOME"] = str(_CACHES)
