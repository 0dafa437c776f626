"""Runs the quick tests where this environment does not: on newer Pythons, or with the oldest versions of dependencies.

``python tests/other_pythons.py`` takes every newer Python that it finds on the PATH and beside this one, each with a
virtual environment ``.venv-3.x``; ``--newest`` only the newest; ``--oldest`` this Python with the lower bounds of
pyproject.toml, in ``.venv-oldest``.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
NEWEST_MINOR = 13  # as in pyproject.toml


def find_pythons() -> dict[int, str]:
    """The minor versions found, and a command for each."""
    pythons = {}
    for minor in range(sys.version_info.minor + 1, NEWEST_MINOR + 1):
        name = f"python3.{minor}"
        beside = sorted(Path(sys.base_prefix).parent.glob(f"3.{minor}.*/bin/python"))
        for command in filter(None, [shutil.which(name), *map(str, beside)]):
            version = subprocess.run([command, "--version"], capture_output=True, text=True, check=False).stdout
            if re.match(rf"Python 3\.{minor}\.", version):
                pythons[minor] = command
                break
    return pythons


def lower_bounds(project: dict) -> Iterator[str]:
    """Pins every dependency that has a lower bound to it, as lines of a constraints file of pip."""
    optional = project["optional-dependencies"]
    for text in (*project["dependencies"], *optional["dev"]):
        requirement = Requirement(text)
        bounds = [bound.version for bound in requirement.specifier if bound.operator == ">="]
        if bounds and (requirement.marker is None or requirement.marker.evaluate()):
            yield f"{requirement.name}=={bounds[0]}"


def make_test(python: str, environment: str, **variables: str) -> int:
    """Runs ``make test`` with a Python and a virtual environment; returns its exit code."""
    print(f"== {environment}: {python}", flush=True)
    command = ["make", "test", f"PYTHON={python}", f"VENV={environment}"]
    return subprocess.run(command, cwd=ROOT, env=os.environ | variables, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--newest", action="store_true", help="only the newest Python")
    parser.add_argument("--oldest", action="store_true", help="this Python, with the oldest versions of dependencies")
    options = parser.parse_args()
    if options.oldest:
        constraints = ROOT / ".venv-oldest.txt"
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        constraints.write_text("\n".join(lower_bounds(project)) + "\n")
        return make_test(sys.executable, ".venv-oldest", PIP_CONSTRAINT=str(constraints))
    pythons = find_pythons()
    if not pythons:
        print(f"no Python newer than {sys.version_info.major}.{sys.version_info.minor} was found")
    for minor in sorted(pythons, reverse=True)[: 1 if options.newest else None]:
        code = make_test(pythons[minor], f".venv-3.{minor}")
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
