"""The losses of each kind of run without faults, computed once by one process and kept."""

import hashlib
import json
import subprocess
import sys
from functools import cache

from . import evidence
from .running import ROOT, Place
from .shapes import NUM_STEPS, Shape


def reference(place: Place, shape: Shape) -> dict[int, float]:
    """Every iteration's loss; kept in the campaign's directory for the code and the configuration as they are."""
    directory = place.directory / "references"
    directory.mkdir(exist_ok=True)
    config = shape.write(directory / f"{shape.name}.gin", place.corpus)
    kept = directory / f"{shape.name}-{hashlib.sha256(config.read_bytes()).hexdigest()[:8]}-{code_digest()}.json"
    if not kept.exists():
        run_dir = directory / f"{kept.stem}.run"
        subprocess.run(["rm", "-rf", str(run_dir)], check=True)
        words = [sys.executable, "-m", "swift", "train", str(config), "--run-dir", str(run_dir), "--prepare", "none"]
        words += ["--set", "CheckpointConfig.every=0", "--set", "CheckpointConfig.snapshot_every=0"]
        done = subprocess.run(
            words, capture_output=True, text=True, cwd=ROOT, env=place.environment("reference", directory, {})
        )
        found = evidence.losses(run_dir)
        if done.returncode or sorted(found) != list(range(1, NUM_STEPS + 1)):
            raise SystemExit(f"the run without faults does not end well:\n{done.stderr[-2000:]}")
        kept.write_text(json.dumps(found))
    return {int(step): loss for step, loss in json.loads(kept.read_text()).items()}


@cache
def code_digest() -> str:
    """Of all code that is tried."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "swift").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
