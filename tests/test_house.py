"""The layout of the package: imports one way, packages without code, one class for a name."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).parents[1]
ORDER = (
    (
        "errors",
        "files",
        "jaxprs",
        "largest",
        "lazy_names",
        "machine",
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
    ("watch",),
    ("cli",),
    ("__main__",),
)
"""Packages from the lowest to the highest: each imports from lower ones only."""
ANNEXES = {"generate", "evaluate", "doctor", "draw", "hub", "input", "pod_compile", "simulate", "report", "watch"}
"""Packages that training does not need."""
LOADED = {
    "swift.cli.main": (10, 1_500, set()),
    "swift.cli.train": (184, 23_800, set()),
    "swift.cli.compare": (152, 18_200, set()),
    "swift.cli.run_series": (186, 23_900, set()),
    "swift.cli.run_processes": (165, 20_700, set()),
    "swift.cli.compared_run": (191, 25_000, set()),
    "swift.cli.launch": (207, 27_200, set()),
    "swift.cli.child_entry": (75, 7_700, set()),
    "swift.elastic.worker.worker": (159, 20_100, set()),
    "swift.train.trainer": (170, 22_400, set()),
    "swift.data.loader": (21, 3_400, set()),
    "swift.config.gin_reader": (42, 4_400, set()),
    "swift.cli.settings": (44, 4_500, set()),
    "swift.cli.plan": (40, 5_300, {"draw"}),
    "swift.cli.place": (21, 1_500, set()),
    "swift.cli.simulate": (43, 5_500, {"simulate"}),
    "swift.cli.checkpoints": (19, 1_700, set()),
    "swift.cli.generate": (96, 10_500, {"generate"}),
    "swift.generate.engine": (44, 4_700, {"generate"}),
    "swift.cli.evaluate": (108, 12_100, {"evaluate", "generate"}),
    "swift.cli.data": (61, 6_700, {"input"}),
    "swift.cli.report": (49, 6_500, {"draw", "evaluate", "report"}),
    "swift.cli.watch": (24, 2_700, {"report", "watch"}),
    "swift.cli.hub": (126, 14_200, {"hub"}),
    "swift.cli.doctor": (13, 1_000, {"doctor"}),
}
"""Most files and lines of code that importing a module loads, and the annexes among them; these limits are only
lowered. Comments and docstrings are no code: they explain as much as a reader needs."""
FIGURES = {
    "imports and exports, share of lines": 0.064,
    "exported names": 215,
    "classes of more than 15 methods": 10,
    "generic names in 1,000 lines": 1,
}
"""Most that the package may have of each; these limits are only lowered."""
GENERIC = re.compile(
    r"(is_)?of_.*|found|one|kept|held|mine|own|given|made|told|taken|there|others|wanted|said|turn", re.ASCII
)


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
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "swift":
                for alias in node.names:
                    yield module, node.module, alias.name


def is_within(module: str, package: str) -> bool:
    """Whether a module is a package or lies in it, at any depth."""
    return f"{module}.".startswith(f"{package}.")


@cache
def imported(module: str) -> frozenset[str]:
    """The modules that a module imports while it is imported itself: not in functions, and not for type checkers."""
    found, todo = set(), [ast.parse(modules()[module].read_text())]
    while todo:
        for node in ast.iter_child_nodes(todo.pop()):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                todo += node.orelse
            elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                todo.append(node)
    return frozenset(found & modules().keys())


def loaded(entry: str) -> set[str]:
    """The modules that run where one is imported, with the packages that they are in."""
    seen, todo = set(), {entry}
    while todo:
        module = todo.pop()
        parts = module.split(".")
        seen.add(module)
        todo |= (imported(module) | {".".join(parts[:end]) for end in range(1, len(parts))}) - seen
    return seen


def figures() -> dict[str, float]:
    """The figures of the whole package, by the names in ``FIGURES``."""
    lines = sum(path.read_text().count("\n") for path in modules().values())
    nodes = [node for path in modules().values() for node in ast.walk(ast.parse(path.read_text()))]
    exports = [node for node in nodes if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"]
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [node.id for node in nodes if isinstance(node, ast.Name)]
    names += [node.arg for node in nodes if isinstance(node, ast.arg)]
    methods = [
        sum(isinstance(part, ast.FunctionDef) for part in node.body) for node in nodes if isinstance(node, ast.ClassDef)
    ]
    return {
        "imports and exports, share of lines": sum(n.end_lineno - n.lineno + 1 for n in (*imports, *exports)) / lines,
        "exported names": sum(len(ast.literal_eval(node.value)) for node in exports),
        "classes of more than 15 methods": sum(number > 15 for number in methods),
        "generic names in 1,000 lines": 1000 * sum(GENERIC.fullmatch(name) is not None for name in names) / lines,
    }


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


@cache
def num_code_lines(text: str) -> int:
    """Lines of a module that are no comments, no docstrings and not empty."""
    explaining = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            explaining |= set(range(node.lineno, node.end_lineno + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(line.strip()) and not line.strip().startswith("#") and n not in explaining for n, line in lines)


@pytest.mark.parametrize("entry", LOADED)
def test_a_command_loads_no_more_than_it_did(entry):
    most_files, most_lines, annexes = LOADED[entry]
    found = loaded(entry)
    num_lines = sum(num_code_lines(modules()[module].read_text()) for module in found)
    assert {module for module in found if module.split(".")[1:2] and module.split(".")[1] in ANNEXES - annexes} == set()
    assert len(found) <= most_files, sorted(found)
    assert num_lines <= most_lines


def test_figures_of_the_package_get_no_worse():
    assert {name: value for name, value in figures().items() if value > FIGURES[name]} == {}
