"""Results measured again are compared with those that are kept, number by number."""

import json
import math

import kept_numbers
import pytest
import reproduce
import study_recycle

KEPT = {
    "command": "python a.py",
    "minutes": 1,
    "steps": 3,
    "of": [{"loss": 2.0, "cpu_s": 0.5}],
    "claims": {"holds": True},
}
SPREADS = {"*loss": 1.1, "*cpu_s": 3.0}
EXACT = {
    "recycle_ablation": study_recycle.ablation,
    "recycle_scale": study_recycle.scale,
}
"""Kept results without a measured number that take seconds."""


def changed(**values):
    """KEPT with other values of some leaves."""
    document = json.loads(json.dumps(KEPT))
    for name, value in values.items():
        where = document["of"][0] if name in document["of"][0] else document["claims"] if name == "holds" else document
        where[name] = value
    return document


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder with one kept result, and one program that says again what ``now`` has."""
    kept, now = tmp_path / "kept", {"document": KEPT}
    reproduce.write(kept, "mine", KEPT)
    monkeypatch.setattr(reproduce, "ALL", (reproduce.Result("mine", ("a.py",), spreads=SPREADS),))
    monkeypatch.setattr(reproduce, "RESULTS", kept)
    monkeypatch.setattr(reproduce, "REPRODUCED", tmp_path / "runs" / "reproduced")
    monkeypatch.setattr(reproduce, "document_of", lambda *_: now["document"])
    monkeypatch.setattr(reproduce, "draw", lambda: None)

    def run(document, *words):
        now["document"] = document
        monkeypatch.setattr("sys.argv", ["reproduce.py", *words])
        return reproduce.main(), json.loads((kept / "mine.json").read_text())

    return run


@pytest.mark.parametrize(
    ("now", "code", "verdict"),
    [
        ({}, 0, "equal"),
        ({"minutes": 7, "command": "python b.py"}, 0, "equal"),
        ({"loss": 2.1}, 0, "x 1.05, within 1.1"),
        ({"cpu_s": 0.2}, 0, "x 0.4, within 3"),
        ({"cpu_s": 0.1}, 0, "x 0.2, BEYOND 3"),
        ({"loss": 2.3}, 0, "x 1.15, BEYOND 1.1"),
        ({"loss": 0.0}, 0, "no ratio, BEYOND 1.1"),
        ({"loss": math.nan}, 0, "x nan, BEYOND 1.1"),
        ({"steps": 4}, 1, "DIFFERS"),
        ({"holds": False}, 1, "DIFFERS"),
        ({"new": 1}, 1, "DIFFERS"),
    ],
)
def test_only_a_number_that_has_to_be_equal_fails_and_nothing_kept_is_replaced(results, capsys, now, code, verdict):
    assert results(changed(**now)) == (code, KEPT)
    out = capsys.readouterr().out
    assert verdict in out
    if verdict != "equal":
        assert len([line for line in out.splitlines() if line.startswith("mine ") and not line.endswith("equal")]) == 1


def test_a_number_that_is_missing_differs(results):
    document = changed()
    del document["steps"]
    assert results(document)[0] == 1


def test_new_results_replace_the_kept_ones_on_demand_alone(results):
    new = changed(steps=4)
    assert results(new, "--keep") == (1, new)
    assert results(new) == (0, new)


def test_each_number_is_a_line_with_both_values(results, capsys):
    results(changed(loss=2.1))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:5] for line in lines[:3]] == [
        ["result", "number", "kept", "now", "same?"],
        ["mine", "steps", "3", "3", "equal"],
        ["mine", "of.0.loss", "2", "2.1", "x"],
    ]
    assert lines[-1] == "mine: 2 of 2 exact numbers are equal, 2 of 2 measured ones within their spread"


def test_a_result_that_was_never_kept_is_told(results, capsys, monkeypatch):
    monkeypatch.setattr(reproduce, "ALL", (reproduce.Result("other", ("a.py",)),))
    assert results(KEPT, "other")[0] == 0
    assert capsys.readouterr().out == "other: none kept\n"


@pytest.mark.parametrize("name", EXACT)
def test_exact_results_are_the_kept_ones(name):
    kept = json.loads((reproduce.RESULTS / f"{name}.json").read_text())
    (figures,) = EXACT[name]().items()
    numbers = kept_numbers.compare({figures[0]: kept[figures[0]]}, dict([figures]), {})
    assert len(numbers) > 40
    assert [number for number in numbers if not number.is_same] == []


@pytest.mark.parametrize("result", reproduce.ALL, ids=lambda result: result.name)
def test_settings_and_figures_of_papers_are_never_measured(result):
    path = reproduce.RESULTS / f"{result.name}.json"
    if not path.exists():
        return
    document = json.loads(path.read_text())
    for number in kept_numbers.compare(document, document, result.spreads):
        words = number.path.split(".")
        if words[-1] in ("limit", "seed", "tokens_per_rank", "paper", "num_steps", "benchmark"):
            assert number.spread == kept_numbers.EXACT, number.path
