"""The Dockerfiles, as far as they can be tried without building a container."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from swift.elastic.device_probe import OLDEST_DRIVER

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "containers").glob("*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions(path, name):
    """Words of all instructions of a name."""
    return [line.split()[1:] for line in path.read_text().splitlines() if line.startswith(f"{name} ")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_python_and_the_extra_are_those_of_the_package(path):
    ((image,),) = instructions(path, "FROM")
    assert SpecifierSet(PROJECT["requires-python"]).contains(re.search(r"python:([\d.]+)", image)[1])
    (extra,) = re.findall(r"'\.\[(\w+)\]'", path.read_text())
    assert extra in PROJECT["optional-dependencies"]


def test_there_is_one_for_each_kind_of_accelerator():
    assert [path.stem for path in FILES] == ["gpu", "tpu"]
    assert f"driver, {OLDEST_DRIVER['jax-cuda13-plugin']} or newer" in FILES[0].read_text()


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_files_that_it_copies_are_enough_for_the_package(path, tmp_path):
    for *sources, target in instructions(path, "COPY"):
        for source in sources:
            if (ROOT / source).is_dir():
                skipped = shutil.ignore_patterns("__pycache__", "runs")
                shutil.copytree(ROOT / source, tmp_path / target, ignore=skipped)
            else:
                shutil.copy(ROOT / source, tmp_path / target)
    words = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "made", ".")
    subprocess.run(words, cwd=tmp_path, check=True)
    assert len(list((tmp_path / "made").glob("swift_moe-*.whl"))) == 1
