"""Every document has its place in the site, and the reference covers what packages export."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LEFT_OUT = {"swift", "swift.cli", "swift.config", "swift.hub", "swift.input", "swift.pod_compile", "swift.watch"}
"""Packages without a reference: what they have is reached by commands."""


def places() -> set[str]:
    """The pages of the site's navigation."""
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    return set(re.findall(r"([\w/.-]+\.md)\s*$", navigation, re.MULTILINE))


def test_every_document_is_in_the_navigation():
    documents = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    documents |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "experiments").rglob("*.md")}
    assert places() == documents


def test_the_reference_names_packages_that_export_something():
    pages = [path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md")]
    named = {name for page in pages for name in re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE)}
    for name in named:
        path = ROOT.joinpath(*name.split("."))
        module = path.with_suffix(".py")  # Python may have left its cache of a package of that name
        text = (module if module.is_file() else path / "__init__.py").read_text()
        assert ast.get_docstring(ast.parse(text)), name
    packages = {f"swift.{path.parent.name}" for path in (ROOT / "swift").glob("*/__init__.py")}
    assert packages - LEFT_OUT <= named
    assert {f"`{name}`" for name in named} <= set(
        re.findall(r"`[\w.]+`", (ROOT / "docs/reference/index.md").read_text())
    )


def test_sections_of_a_docstring_begin_at_its_margin():
    """Deeper, the site takes ``Returns:`` for another argument."""
    wrong = []
    for path in sorted((ROOT / "swift").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                sections = re.findall(
                    r"^ +(?:Args|Attributes|Returns|Yields|Raises):$", ast.get_docstring(node) or "", re.M
                )
                wrong += [f"{path.relative_to(ROOT)}: {node.name}: {section.strip()}" for section in sections]
    assert wrong == []
