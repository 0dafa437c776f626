"""Additions to pyproject.toml: experiments go into the package, and its README has no links into the repository."""

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class BuildWithExperiments(build_py):
    """Copies the gin files of ``experiments`` into the package, where a command finds them from any directory."""

    def run(self) -> None:
        """Builds the package."""
        super().run()
        if self.editable_mode:
            return
        for path in sorted((ROOT / "experiments").rglob("*.gin")):
            copy = Path(self.build_lib) / "swift" / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def description() -> str:
    """Returns README.md without pictures, and with the text of links that lead into the repository."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)\n*", "", text)
    return re.sub(r"\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", text)


if __name__ == "__main__":
    setup(
        cmdclass={"build_py": BuildWithExperiments},
        long_description=description(),
        long_description_content_type="text/markdown",
    )
