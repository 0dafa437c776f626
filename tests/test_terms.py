"""The documents name what is there: classes and files of the code, and terms that the glossary explains."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "experiments").rglob("*.md"))
)
TERM = re.compile(r"^\| ([^|]+) \| ([^|]+) \| ([^|]*\[[^|]+\]\([^|]+\)) \|$", re.MULTILINE)
"""A row of the glossary: the words, a sentence, where they are defined."""
EMPHASIS = {"all", "first", "last", "shorter", "tokens"}
"""Words in italics that are stressed; any other is taken for a term that a document introduces."""
ELSEWHERE = {
    "swift/runlog": ("rows?", "an entry of the file of counts"),
    "swift/models/cuts.py": ("rows?", "a layer of a stack"),
    "swift/mesh/live.py": ("places?", "a mesh row"),
    "swift/elastic/reporting": ("parts?", "a phase of a recovery"),
    "swift/pipeline/reconfigure/compiled_steps.py": ("rows?", "a batch on devices"),
    "swift/experts/capacity": ("places?", "a position"),
    "swift/train/saved_state.py": ("places?", "a fallback directory"),
    "swift/checkpoint/arrays.py": ("numbers", "values of an array"),
}
"""Words that the glossary gives another meaning, or that count, by the code that has a word of its own instead."""


def glossary() -> str:
    return (ROOT / "docs" / "terms.md").read_text()


def defined_terms() -> set[str]:
    rows = TERM.findall(glossary())
    return {word.strip() for words, _, _ in rows for word in words.split(",")}


def names_of(text: str) -> set[str]:
    """The top-level classes, functions and variables of a module."""
    names = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


@pytest.fixture(scope="module")
def classes() -> set[str]:
    """All names of the package that are written like classes."""
    found = set().union(*(names_of(path.read_text()) for path in (ROOT / "swift").rglob("*.py")))
    return {name for name in found if re.fullmatch(r"[A-Z]\w*[a-z]\w*", name)}


def test_a_term_is_defined_in_the_file_that_the_glossary_names():
    rows = TERM.findall(glossary())
    assert len(rows) > 40
    for words, sentence, place in rows:
        assert sentence.strip().endswith("."), words
        path = (ROOT / "docs" / re.search(r"\]\(([^)]+)\)", place)[1]).resolve()
        assert path.exists(), place
        for name in re.findall(r"`(\w+)`", place):
            assert name in names_of(path.read_text()), f"{words}: {name} is not in {path.name}"


def test_a_term_stands_once():
    words = [word.strip() for words, _, _ in TERM.findall(glossary()) for word in words.split(",")]
    assert sorted(words) == sorted(set(words))


@pytest.mark.parametrize("code", ELSEWHERE)
def test_a_word_has_its_one_meaning(code):
    word, instead = ELSEWHERE[code]
    top = ROOT / code
    for path in [top] if top.is_file() else top.rglob("*.py"):
        found = re.search(rf"^.*\b{word}\b.*$", path.read_text(), re.MULTILINE)
        assert not found, f"{path.name}: {found[0]}: say {instead}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_class_that_a_document_names_is_there(document, classes):
    """Also where it is the owner of a setting; ``@Class()`` in code blocks is tried as commands are."""
    text = re.sub(r"```.*?```|^    .*$", "", (ROOT / document).read_text(), flags=re.DOTALL | re.MULTILINE)
    named = set(re.findall(r"`@?([A-Z]\w*[a-z]\w*)(?:\.\w+)?(?:\(\))?`", text))
    assert named - classes == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_path_or_module_that_a_document_names_is_there(document):
    text = (ROOT / document).read_text()
    for path in re.findall(r"(?<![\w/.-])((?:swift|tests|benchmarks|experiments|docs)/[\w/.-]*\w)", text):
        assert (ROOT / path).exists() or list(ROOT.glob(f"{path}*")), path
    for module in re.findall(r"`(swift\.[\w.]+)", text):
        *parents, last = module.split(".")
        whole, package = ROOT.joinpath(*parents, last), ROOT.joinpath(*parents)
        there = whole.is_dir() or whole.with_suffix(".py").exists()
        holders = [place for place in (package / "__init__.py", package.with_suffix(".py")) if place.exists()]
        assert there or any(last in place.read_text() for place in holders), module


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_term_that_a_document_introduces_is_in_the_glossary(document):
    introduced = re.findall(r"(?<!\*)\*([a-z][a-z-]+)\*(?!\*)", (ROOT / document).read_text())
    assert {word.removesuffix("s") for word in introduced if word not in EMPHASIS} <= defined_terms()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_link_to_the_glossary_leads_to_a_term(document):
    """A term that a document explains by a link, as in ``[slots](terms.md)``, is in the glossary."""
    known = {word.casefold() for word in defined_terms()}
    for text in re.findall(r"\[([^]]+)\]\((?:\.\./)*(?:docs/)?terms\.md\)", (ROOT / document).read_text()):
        word = text.strip("*`").casefold()
        assert {word, word.removesuffix("s")} & known or word in ("terms", "glossary", "terms.md"), word


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_link_to_a_section_leads_to_one(document):
    here = ROOT / document
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", here.read_text()):
        text = ((here.parent / target) if target else here).read_text()
        headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in slugs, f"{target}#{anchor}"


def test_the_seven_files_to_read_are_there():
    rows = re.findall(r"^\| (\d) \| \[([^]]+)\]", (ROOT / "docs" / "code.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 8))
    for _, path in rows:
        text = (ROOT / path).read_text()
        assert ast.get_docstring(ast.parse(text)), path


def test_the_drawings_name_files_that_are_there():
    drawings = re.findall(r"```\n(.*?)```", (ROOT / "docs" / "code.md").read_text(), re.DOTALL)
    assert len(drawings) == 4
    for path in re.findall(r"[a-z_]+(?:/[a-z_]+)+(?:\.py|/)|[a-z_]+\.py", "\n".join(drawings)):
        assert list((ROOT / "swift").rglob(path.rsplit("/", 1)[-1])) if "/" not in path else find(path), path


def find(path: str) -> bool:
    """Whether the end of a path is somewhere in the package."""
    return (ROOT / "swift" / path).exists() or (ROOT / "swift" / "pipeline" / path).exists()
