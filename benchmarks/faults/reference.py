"""Reference losses of each shape of run without faults, computed by one process as needed, and kept."""

import hashlib
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from . import evidence
from .place import Place
from .shapes import NUM_STEPS, Shape

_CHUNK = 400
"""Iterations computed at once."""
_COMPUTES_NOTHING = (
    "checkpoint",
    "cli",
    "doctor",
    "draw",
    "elastic",
    "evaluate",
    "generate",
    "hub",
    "pod_compile",
    "report",
    "runlog",
    "simulate",
)
"""Packages that do not affect losses."""


class Reference:
    """A run of `swift train` with the current code, kept in the campaign's directory.

    Args:
        place: resources of the campaign.
        shape: shape of the run.
    """

    def __init__(self, place: Place, shape: Shape):
        self._place, self._shape = place, shape
        directory = place.directory / "references"
        directory.mkdir(exist_ok=True)
        self._config = shape.write(directory / f"{shape.name}.gin", place.corpus)
        digest = hashlib.sha256(self._config.read_bytes()).hexdigest()[:8]
        self._run_dir = directory / f"{shape.name}-{digest}-{code_digest(place.root, computes=True)}"

    def upto(self, step: int) -> dict[int, float]:
        """Computes losses of iterations, at least up to a given one."""
        found = evidence.losses(self._run_dir)
        last = min(NUM_STEPS, -(-max(step, 1) // _CHUNK) * _CHUNK)
        if len(found) < last:
            self._train(len(found), last)
            found = evidence.losses(self._run_dir)
            if sorted(found) != list(range(1, last + 1)):
                raise SystemExit(f"the run without faults has not come to iteration {last}")
        return found

    def _train(self, done: int, last: int) -> None:
        if not done:
            shutil.rmtree(self._run_dir, ignore_errors=True)
        words = [sys.executable, "-m", "swift", "train", str(self._config), "--run-dir", str(self._run_dir)]
        words += [
            "--prepare",
            "none",
            *(["--stop-at", str(last)] if last < NUM_STEPS else []),
            *["--resume"] * bool(done),
        ]
        words += ["--set", "CheckpointConfig.every=0", "--set", "CheckpointConfig.snapshot_every=0"]
        tmp = self._run_dir.parent
        environment = self._place.environment("reference", tmp, {})
        done_with = subprocess.run(
            words, capture_output=True, text=True, cwd=self._place.root, env=environment, check=False
        )
        if done_with.returncode:
            raise SystemExit(f"the run without faults ends with {done_with.returncode}:\n{done_with.stderr[-2000:]}")


@cache
def code_digest(root: Path, *, computes: bool = False) -> str:
    """Digests all code under test, or only the code that affects losses."""
    digest, top = hashlib.sha256(), root / "swift"
    for path in sorted(top.rglob("*.py")):
        if not (computes and path.relative_to(top).parts[0] in _COMPUTES_NOTHING):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
