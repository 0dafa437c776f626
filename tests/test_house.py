"""The layout of the package: imports one way, packages without code, one class for a name."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import hypothesis

ROOT = Path(__file__).parents[1]
ORDER = (
    (
        "machine_cores",
        "errors",
        "files",
        "jaxprs",
        "largest",
        "lazy_names",
        "machine_memory",
        "output",
        "signals",
        "variables",
    ),
    ("tasks", "terminal_table", "deadlines", "topology", "typed"),
    ("mesh", "schedules"),
    ("data", "experts"),
    ("models",),
    ("pipeline",),
    ("checkpoint",),
    ("runlog",),
    ("config",),
    ("train",),
    ("elastic",),
    ("generate",),
    ("evaluate",),
    ("doctor", "draw", "hub", "input", "pod_compile", "simulate"),
    ("report",),
    ("cli",),
    ("__main__",),
)
"""Packages from the lowest to the highest: each imports from lower ones only."""


@cache
def modules() -> dict[str, Path]:
    """The files of the package by dotted name."""
    paths = sorted((ROOT / "swift").rglob("*.py"))
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths)
    return {name.removesuffix(".__init__"): path for name, path in zip(names, paths, strict=True)}


def package_of(module: str) -> str:
    """The package that a module is in; its own name where it is one."""
    return module if modules()[module].name == "__init__.py" else module.rpartition(".")[0]


def imports() -> Iterator[tuple[str, str, str]]:
    """(module, what it imports from, name), wherever in the file."""
    for module, path in modules().items():
        if path.name == "__init__.py":  # a face imports nothing before it is asked for a name
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "swift":
                for alias in node.names:
                    yield module, node.module, alias.name


def is_within(module: str, package: str) -> bool:
    """Whether a module is a package or lies in it, at any depth."""
    return f"{module}.".startswith(f"{package}.")


def test_no_test_of_random_examples_fails_on_a_slow_machine():
    """Hypothesis sets no deadline unless a test sets one itself."""
    assert hypothesis.settings().deadline is None


def test_imports_go_from_higher_packages_to_lower_ones():
    level = {name: number for number, names in enumerate(ORDER) for name in names}
    known = {
        path.stem for path in (ROOT / "swift").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert known - {"__init__"} == set(level)
    upward = set()
    for module, source, _ in imports():
        here, there = (f"{name}.".split(".")[1] for name in (module, source))
        if here and there and here != there and level[there] >= level[here]:
            upward.add(f"{module} -> {source}")
    assert upward == set()


def test_the_reference_lists_packages_from_the_highest_to_the_lowest():
    level = {name: number for number, names in enumerate(ORDER) for name in names}
    index = (ROOT / "docs" / "reference" / "index.md").read_text()
    rows = re.findall(r"^\| \[\w+\]\(\w+\.md\) \| (.*) \|$", index, re.MULTILINE)
    levels = [level[package] for row in rows for package in re.findall(r"`swift\.(\w+)", row)]
    assert len(levels) > 10
    assert levels == sorted(levels, reverse=True)


def test_a_docstring_begins_with_a_verb_or_a_noun_phrase():
    """It never begins with a question or a genitive, as in "What the run does" and "Of the run"."""
    begins = re.compile(
        r"(What|How|Where|Who|Whom|Whose|Why|Which|Whoever|Whatever|Nobody|Everybody|Of|As|To|Is|On|For|Those|These|By|At|In)\b"
    )
    found = []
    for folder in ("swift", "benchmarks", "examples", "experiments"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                    text = str(node.value.value).strip()
                    found += [f"{path.relative_to(ROOT)}:{node.lineno}: {text[:40]}"] * bool(begins.match(text))
    assert found == []


def test_packages_import_each_other_one_way():
    edges = defaultdict(set)
    for module, source, _ in imports():
        here, there = package_of(module), package_of(source)
        # A package passes on what packages in it have, and these import from the packages that they lie in.
        if not is_within(here, there) and not is_within(there, here):
            edges[here].add(there)

    def reaches(start: str) -> set[str]:
        seen, todo = set(), [start]
        while todo:
            new = edges[todo.pop()] - seen
            seen |= new
            todo += new
        return seen

    assert [package for package in list(edges) if package in reaches(package)] == []


def test_modules_import_each_other_one_way():
    edges = defaultdict(set)
    for module, source, name in imports():
        found = f"{source}.{name}" if f"{source}.{name}" in modules() and source != "swift" else source
        if package_of(found) != found:
            edges[module].add(found)
    done, path = set(), []

    def visit(module: str) -> None:
        assert module not in path, path[path.index(module) :]
        if module in done:
            return
        path.append(module)
        for other in sorted(edges[module]):
            visit(other)
        path.pop()
        done.add(module)

    for module in sorted(modules()):
        visit(module)


def test_a_package_is_a_docstring_or_a_lazy_face():
    """What a type checker imports, what is imported when it is used, and what is exported are the same names."""
    for module, path in modules().items():
        if path.name != "__init__.py" or module == "swift":
            continue
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), f"{module} does not say what lives there"
        if len(tree.body) == 1:
            continue
        bound, table = set(), {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("swift."):
                bound |= {(node.module, alias.asname or alias.name) for alias in node.names}
            if isinstance(node, ast.Assign):
                table[ast.unparse(node.targets[0])] = node.value
        bound.remove(("swift.lazy_names", "lazy_names"))
        lazy = {(source, name) for source, names in ast.literal_eval(table["_MODULES"]).items() for name in names}
        assert lazy <= bound, module
        assert {name for _, name in bound} == set(ast.literal_eval(table["__all__"])), module
        # A module's name would hide that of what it defines, once it is imported.
        assert {name for _, name in lazy if f"{module}.{name}" in modules()} == set(), module


def test_a_public_class_name_stands_once():
    places = defaultdict(list)
    for module, path in modules().items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
