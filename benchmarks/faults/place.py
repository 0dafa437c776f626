"""The directories and abilities that all runs of a campaign share."""

import os
from dataclasses import dataclass
from pathlib import Path

from .processes import MARK

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Place:
    """Directories and abilities of the machine that all runs of a campaign share.

    Attributes:
        directory: directory of the campaign.
        corpus: text to train on.
        cache: cache of compiled programs.
        is_private: True if this process is isolated, see `isolated`.
        has_disks, has_networks: True if runs can have separate ones.
        limits_tasks: True if a run's threads and processes can be limited.
        shim: library, see `shim.py`; None if it cannot be built.
        root: directory of the package `swift` under test.
        patience_s: time for a run to be well again, beyond its own deadlines.
    """

    directory: Path
    corpus: Path
    cache: Path
    patience_s: float
    is_private: bool = False
    has_disks: bool = False
    has_networks: bool = False
    limits_tasks: bool = False
    shim: Path | None = None
    root: Path = ROOT

    def environment(self, mark: str, tmp: Path, more: dict[str, str]) -> dict[str, str]:
        """Environment of all processes of a run."""
        own = {
            MARK: mark,
            "TMPDIR": str(tmp),
            "PYTHONPATH": str(self.root),
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "JAX_COMPILATION_CACHE_DIR": str(self.cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        return os.environ | own | more
