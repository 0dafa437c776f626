"""Reports of real compilations that are kept: whole, and equal to the design's formula."""

import json
from pathlib import Path

import pytest

PODS = Path(__file__).parents[2] / "experiments" / "pods"
RESULTS = sorted((PODS / "results").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_what_a_compiled_step_exchanges_is_the_closed_form(path):
    facts = json.loads(path.read_text())
    assert facts["command"].split()[:5] == ["python", "-m", "swift", "compile", "--topology"]
    assert facts["command"].split()[5] == facts["topology"]["name"]
    assert (PODS.parents[1] / facts["command"].split()[6]).exists()
    for report in facts["configurations"]:
        assert report["result"] == "fits", report
        assert report["memory"]["needed_bytes"] <= report["memory"]["capacity_bytes"]
        for part in (report["exchange"], *report["exchange"]["groups"].values(), report["tokens"]):
            assert part["compiled_bytes"] == pytest.approx(part["formula_bytes"], rel=0.01)
            assert part["formula_bytes"] > 0


def test_every_result_is_tabulated():
    table = (PODS / "README.md").read_text()
    for path in RESULTS:
        for report in json.loads(path.read_text())["configurations"]:
            figures = f"{report['exchange']['compiled_bytes'] / 1e6:,.3f}", f"{report['predicted']['step_ms']:.1f}"
            assert all(f" {figure} |" in table for figure in figures), (path.name, report["failed"])
