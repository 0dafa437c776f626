"""Pages of the site that are made of the repository.

Documents link to files beside them: to code, tests, settings and results. On the site a file of text is a page of
code, a folder a page of its files, and the documents of ``experiments`` are documents of the site.
"""

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")
IMAGES = (".svg", ".png")
LANGUAGES = {".py": "python", ".gin": "python", ".json": "json", ".toml": "toml", ".ipynb": "json", ".c": "c"}
LONGEST = 60_000
"""Characters of a file that are shown; stored results are longer."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the documents of ``experiments``, and a page for whatever the documents link to."""
    documents = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "experiments").rglob("*.md")]
    for path in documents:
        if files.get_file_from_path(_place(path)) is None:
            files.append(File.generated(config, _place(path), abs_src_path=str(path)))
    for document in documents:
        for target in _targets(document):
            place = _place(target)
            if files.get_file_from_path(place) is not None:
                continue
            if target.suffix in IMAGES:
                files.append(File.generated(config, place, abs_src_path=str(target)))
            else:
                files.append(File.generated(config, place, content=_page(target)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Makes links lead to the places of the site; those that lead nowhere stay, and fail the build."""
    document = _origin(page.file.src_uri)
    if document is None:
        return markdown

    def moved(match: re.Match[str]) -> str:
        target = (document.parent / match[1]).resolve()
        if not target.exists() or not target.is_relative_to(ROOT):
            return match[0]
        return os.path.relpath(_place(target), os.path.dirname(page.file.src_uri)) + (match[2] or "")

    return LINK.sub(moved, markdown)


def _targets(document: Path) -> list[Path]:
    found = [(document.parent / match[1]).resolve() for match in LINK.finditer(document.read_text(encoding="utf-8"))]
    return sorted({path for path in found if path.exists() and path.is_relative_to(ROOT)})


def _place(path: Path) -> str:
    """The path of a file on the site; of a folder, that of its document, or of a page of its files."""
    inside = path.relative_to(ROOT)
    if path.is_dir():
        return _place(path / "README.md") if (path / "README.md").exists() else f"repository/{inside}/index.md"
    if inside.parts[0] == "docs":
        return inside.relative_to("docs").as_posix()
    if path.suffix in IMAGES or (inside.parts[0] == "experiments" and path.suffix == ".md"):
        return inside.as_posix()
    return f"repository/{inside}.md"


def _origin(place: str) -> Path | None:
    """The document of a place of the site; None for a page that is made of something else."""
    if place.startswith("repository/"):
        return None
    return ROOT / place if place.startswith("experiments/") else ROOT / "docs" / place


def _page(path: Path) -> str:
    """Text of a page that shows a file or a folder; searching does without it."""
    title = f"---\nsearch:\n  exclude: true\n---\n\n# {path.relative_to(ROOT)}\n\n"
    if path.is_dir():
        names = sorted(one.name + "/" * one.is_dir() for one in path.iterdir() if not one.name.startswith(("_", ".")))
        return title + "".join(f"- `{name}`\n" for name in names)
    text = path.read_text(encoding="utf-8")
    more = f"\nThe first {LONGEST:,} of {len(text):,} characters.\n" if len(text) > LONGEST else ""
    return f"{title}````{LANGUAGES.get(path.suffix, 'text')}\n{text[:LONGEST]}\n````\n{more}"
