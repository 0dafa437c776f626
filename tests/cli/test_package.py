"""The package: its entry points, what a wheel holds, and a ``swift`` that is another package's."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import swift

ROOT = Path(__file__).parents[2]


def ended(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs a program of Python that finds ``swift`` in its working directory only."""
    arguments = [sys.executable, *command]
    return subprocess.run(
        arguments, cwd=cwd, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )


@pytest.fixture
def strange(tmp_path) -> Path:
    """A directory in which another package has overwritten ``swift/__init__.py``."""
    shutil.copy(ROOT / "swift_moe.py", tmp_path)
    (tmp_path / "swift").mkdir()
    shutil.copy(ROOT / "swift" / "__main__.py", tmp_path / "swift")
    (tmp_path / "swift" / "__init__.py").write_text("__version__ = '4.0'\n")
    return tmp_path


@pytest.mark.parametrize("command", [("-c", "import swift_moe; swift_moe.main()"), ("-m", "swift", "--version")])
def test_another_package_called_swift_is_refused_in_one_line(strange, command):
    told = ended(*command, cwd=strange)
    assert told.returncode == 1
    (line,) = told.stderr.splitlines()
    assert f"{strange}/swift/__init__.py belongs to another package" in line
    assert "install swift-moe into an environment of its own" in line


def test_another_package_that_cannot_be_imported_is_refused_in_one_line(strange):
    (strange / "swift" / "__init__.py").write_text("import modelscope\n")
    told = ended("-c", "import swift_moe; swift_moe.main()", cwd=strange)
    assert told.returncode == 1
    (line,) = told.stderr.splitlines()
    assert line.startswith("swift-moe: `import swift` fails: No module named 'modelscope'; install ")


@pytest.mark.parametrize("command", [("-c", "import swift_moe; swift_moe.main()"), ("-m", "swift")])
def test_the_version_is_told(command):
    told = ended(*command, "--version", cwd=ROOT)
    assert re.fullmatch(rf"swift-moe {swift.__version__} \(jax \d+(\.\d+){{2,3}}, Python 3\.\d+\.\d+\)\n", told.stdout)
    assert (told.returncode, told.stderr) == (0, "")


@pytest.mark.parametrize("option", ["--version", "--help"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_version_or_a_help_that_cannot_be_written_is_told_in_one_line(option, unbuffered):
    with open("/dev/full", "w") as full:
        command, variables = [sys.executable, "-m", "swift", option], os.environ | {"PYTHONUNBUFFERED": unbuffered}
        told = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=variables, check=False
        )
    assert (told.returncode, told.stderr) == (3, "swift: stdout cannot be written: No space left on device\n")


def test_the_description_of_the_package_has_no_pictures_and_no_links_into_the_repository():
    text = runpy.run_path(str(ROOT / "setup.py"))["description"]()
    assert "![" not in text
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert all(target.startswith("https://") for target in targets), targets
    assert text.startswith("# Swift")


@pytest.mark.slow
def test_a_wheel_holds_experiments_license_and_types(tmp_path):
    """The experiments are found from an empty directory."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv*", ".jax_cache", "runs", "tests", "build"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(tree)]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("swift_moe-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
        points = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    shipped = {f"swift/{path.relative_to(ROOT)}" for path in (ROOT / "experiments").rglob("*.gin")}
    assert shipped | {"swift/py.typed", "swift_moe.py", "swift/__main__.py"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "Author: The Swift developers" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    assert "swift-moe = swift_moe:main" in points

    empty = tmp_path / "empty"
    empty.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    program = f"import sys; sys.path.insert(0, {str(tmp_path / 'installed')!r}); import swift_moe; swift_moe.main()"
    told = ended("-c", program, "config", "experiments/demo.gin", cwd=empty)
    assert (told.returncode, told.stderr) == (0, "")
    assert "Experiment.model = @ModelConfig()" in told.stdout
