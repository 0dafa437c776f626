"""Every claim names a test or a benchmark that can fail, and the command that runs it; every benchmark judges."""

import ast
import re
from pathlib import Path

import measure
import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = sorted((ROOT / "benchmarks").glob("bench_*.py"))
"""What `make bench` runs."""
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (ROOT / "docs" / "claims.md").read_text().splitlines()
    if line.startswith("| ") and "](" in line
]


def named(row: list[str], folder: str) -> list[Path]:
    """The files that hold a claim, of tests or of benchmarks."""
    return [ROOT / path for path in re.findall(rf"\]\(\.\./({folder}/[\w/]+\.py)\)", row[2])]


def judges(benchmark: Path) -> bool:
    """Whether a program compares its figures with limits, and fails where one is exceeded."""
    return bool(re.search(r"\bpublish\(", benchmark.read_text()))


def is_run_by(target: str, test: Path) -> bool:
    """Whether the recipe of a target of make names a test, or its folder."""
    (recipe,) = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return any(path.relative_to(ROOT).as_posix() in recipe.split() for path in (test, test.parent))


def has_test_without(path: Path, marks: set[str]) -> bool:
    """Whether some test of a file has none of some marks; those of single cases are not looked at."""
    module = ast.parse(path.read_text())
    decorators = {f"pytest.mark.{mark}" for mark in marks}
    of_module = [ast.unparse(one) for one in module.body if ast.unparse(one).startswith("pytestmark")]
    if any(decorator in line for decorator in decorators for line in of_module):
        return False
    return any(decorators.isdisjoint(map(ast.unparse, one.decorator_list)) for one in functions_of(module))


def functions_of(module: ast.Module) -> list[ast.FunctionDef]:
    return [one for one in module.body if isinstance(one, ast.FunctionDef) and one.name.startswith("test_")]


def has_long_test(path: Path) -> bool:
    """Whether a file marks a test, or a case of one, as long."""
    text = path.read_text()
    return "pytest.mark.long" in text or bool(re.search(r"tiered\(.*, LONG\)", text))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:60])
def test_a_claim_names_what_can_fail(row):
    claim, _, _, commands, _ = row
    tests, benchmarks = named(row, "tests"), named(row, "benchmarks")
    assert tests or benchmarks, claim
    if "make test`" in commands:
        assert any(has_test_without(path, {"slow", "long"}) for path in tests), f"no quick test holds: {claim}"
    if "make test-long`" in commands:
        assert any(map(has_long_test, tests)), f"no long test holds: {claim}"
    if "make test-all`" in commands:
        assert tests, claim
    for target in ("test-gpu", "test-peers"):
        if f"make {target}`" in commands:
            assert all(is_run_by(target, path) for path in tests), claim
    assert ("make bench`" in commands) == any(path in BENCHMARKS for path in benchmarks), claim
    for path in set(benchmarks) - set(BENCHMARKS):
        assert f"`python benchmarks/{path.name}`" in commands, claim
        assert judges(path), f"{path.name} judges nothing"


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_judges_its_figures_whether_or_not_a_claim_names_it(path):
    assert judges(path), f"{path.name} judges nothing"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:60])
def test_the_test_of_seconds_is_there_and_is_a_quick_one(row):
    claim, *_, seconds = row
    node = re.match(r"`([\w/]+\.py)::(test_\w+)`", seconds)
    if node is None:
        assert seconds == "-", claim
        return
    path = ROOT / node[1]
    (test,) = [one for one in functions_of(ast.parse(path.read_text())) if one.name == node[2]]
    assert not {"pytest.mark.slow", "pytest.mark.long"} & {*map(ast.unparse, test.decorator_list)}


def test_a_benchmark_that_claims_nothing_is_refused():
    with pytest.raises(AssertionError, match="cannot fail"):
        measure.publish("nothing", {}, {})


@pytest.mark.parametrize(("figure", "code"), [(1.0, 0), (1.1, 1), (float("nan"), 1)])
def test_a_benchmark_fails_where_a_claim_is_missed(figure, code, capsys):
    assert measure.publish("one", {}, {"a figure": (figure, 1.0)}) == code
    assert '"benchmark": "one"' in capsys.readouterr().out
