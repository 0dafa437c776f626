"""Trying whether tests find mistakes, each in a copy of the package."""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.case_tiers import QUICK_TESTS
from tests.mutations.mutation import Mutation

ROOT = Path(__file__).parents[2]
DEADLINE_S = 900


def main(mutations: Sequence[Mutation], names: Sequence[str] = ()) -> int:
    """Applies those mutations that are of some files, all unless named, and says which survive; 1 if any does."""
    chosen = [one for one in mutations if not names or any(name in one.path for name in names)]
    survivors, sound = list[Mutation](), set[tuple[str, ...]]()
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        for name in ("swift", "tests", "experiments", "benchmarks", "docs"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, copy)
        (copy / ".jax_cache").symlink_to(ROOT / ".jax_cache")  # of programs; a mutated one is another
        for mutation in chosen:
            begun = time.monotonic()
            if mutation.tests not in sound:
                assert not fails(mutation.tests, copy), f"without a mutation, too, some of {mutation.tests} fail"
                sound.add(mutation.tests)
            is_found = found(mutation, copy)
            verdict = "found" if is_found else "SURVIVES"
            print(
                f"{verdict} in {time.monotonic() - begun:3.0f} s: {mutation.path}: {mutation.wrong.strip()}", flush=True
            )
            if not is_found:
                survivors.append(mutation)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} found")
    return 1 if survivors else 0


def found(mutation: Mutation, copy: Path) -> bool:
    """Whether one of the tests fails in a copy of the tree that has the mutation; the copy is as before afterwards."""
    path = copy / "swift" / mutation.path
    text = path.read_text()
    path.write_text(text.replace(mutation.right, mutation.wrong))
    try:
        return fails(mutation.tests, copy)
    finally:
        path.write_text(text)


def fails(tests: Sequence[str], copy: Path) -> bool:
    """Whether one of some tests fails in a copy of the tree, or hangs."""
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-m", QUICK_TESTS, *tests]
    try:
        ended = subprocess.run(pytest, cwd=copy, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        return True
    assert ended.returncode in (0, 1, 2), ended.stdout + ended.stderr  # 2: a file can no longer be imported
    return ended.returncode != 0
