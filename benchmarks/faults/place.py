"""What all runs of a campaign share."""

import os
from dataclasses import dataclass
from pathlib import Path

from .processes import MARK

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Place:
    """What all runs of a campaign share.

    Attributes:
        directory: of the campaign.
        corpus: the text that is trained on.
        cache: of compiled programs.
        is_private: whether this process has a part of the system for itself, see `isolated`.
        has_disks, has_networks: whether runs can have those of their own.
        shim: a library, see `shim.py`; None: it cannot be built.
        root: where the package `swift` is that is tried.
        patience_s: how long a run may take until it is well again, besides its own deadlines.
    """

    directory: Path
    corpus: Path
    cache: Path
    patience_s: float
    is_private: bool = False
    has_disks: bool = False
    has_networks: bool = False
    shim: Path | None = None
    root: Path = ROOT

    def environment(self, mark: str, tmp: Path, more: dict[str, str]) -> dict[str, str]:
        """Of all processes of a run."""
        own = {
            MARK: mark,
            "TMPDIR": str(tmp),
            "PYTHONPATH": str(self.root),
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "JAX_COMPILATION_CACHE_DIR": str(self.cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        return os.environ | own | more
