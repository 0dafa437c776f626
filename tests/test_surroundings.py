"""Tests pass whatever the user's terminal, language, home and variables are; a part of them runs in hostile ones."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.case_tiers import QUICK_TESTS
from tests.surroundings import make_plain

ROOT = Path(__file__).parents[1]
FOLDERS = ("swift", "tests", "experiments", "examples", "docs", "benchmarks")
PART = (
    "tests/cli/test_listed_settings.py",
    "tests/cli/test_options.py",
    "tests/cli/test_plan.py",
    "tests/data/test_sources.py",
    "tests/elastic/reporting/test_display.py",
    "tests/models/test_initial_values.py",
    "tests/runlog/test_run_directory.py",
    "tests/test_variables.py",
    "tests/train/test_progress.py",
    "tests/train/test_terminal.py",
)
HOSTILE = {
    "TERM": "dumb",
    "COLUMNS": "20",
    "NO_COLOR": "1",
    "LC_ALL": "C",
    "HOME": "/proc/none",  # where nothing can be made, even by root
    "XDG_CACHE_HOME": "caches",
    "PYTHONWARNINGS": "error",
    "JAX_DEFAULT_PRNG_IMPL": "rbg",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_PLATFORMS": "cuda",
    "JAX_RANDOM_SEED_OFFSET": "3",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=3",
}


def test_variables_of_terminals_and_compilers_are_replaced():
    environment = HOSTILE | {"PATH": "/bin"}
    make_plain(environment)
    assert environment == {
        "PATH": "/bin",
        "TERM": "xterm",
        "LC_ALL": "C",
        "HOME": "/proc/none",
        "XDG_CACHE_HOME": str(ROOT / ".jax_cache" / "of_the_user"),
    }


def without_a_name() -> list[str]:
    """Words before a command that run it as a user without an entry in the password database, where that works."""
    words = ["unshare", "--user", "--map-user=54321", "--map-group=54321"]
    if shutil.which(words[0]) and subprocess.run([*words, "true"], capture_output=True, check=False).returncode == 0:
        return words
    return []


@pytest.mark.long
def test_a_part_of_the_tests_passes_in_hostile_surroundings(tmp_path):
    checkout = tmp_path / "ein Pfad mit ümlaut"
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, checkout / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, checkout)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= HOSTILE | {"PYTHONPATH": str(checkout)}
    command = [*without_a_name(), sys.executable, "-m", "pytest", "-n", "0", "-m", QUICK_TESTS, *PART]
    told = subprocess.run(
        command, cwd=checkout, env=environment, umask=0o077, capture_output=True, encoding="utf-8", check=False
    )
    assert told.returncode == 0, told.stdout[-5000:] + told.stderr[-2000:]
    assert " passed" in told.stdout
