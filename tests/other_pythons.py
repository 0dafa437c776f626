"""Runs the quick tests on every Python newer than this one: ``python tests/other_pythons.py``, or ``make test-all``.

Looks on the PATH and beside the installation of this Python. Each gets a virtual environment of its own, ``.venv-3.x``.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

NEWEST_MINOR = 13  # as in pyproject.toml


def find_pythons() -> dict[int, str]:
    """The minor versions found, and a command for each."""
    found = {}
    for minor in range(sys.version_info.minor + 1, NEWEST_MINOR + 1):
        name = f"python3.{minor}"
        beside = sorted(Path(sys.base_prefix).parent.glob(f"3.{minor}.*/bin/python"))
        for command in filter(None, [shutil.which(name), *map(str, beside)]):
            version = subprocess.run([command, "--version"], capture_output=True, text=True, check=False).stdout
            if re.match(rf"Python 3\.{minor}\.", version):
                found[minor] = command
                break
    return found


def main() -> int:
    pythons = find_pythons()
    if not pythons:
        print(f"no Python newer than {sys.version_info.major}.{sys.version_info.minor} was found")
    for minor, command in pythons.items():
        print(f"== Python 3.{minor}: {command}", flush=True)
        result = subprocess.run(["make", "test", f"PYTHON={command}", f"VENV=.venv-3.{minor}"], check=False)
        if result.returncode:
            return result.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
