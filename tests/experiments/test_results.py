"""Tables and plots of the papers are those of the results that are kept."""

import json
import re
from pathlib import Path

import paper_plots
import paper_tables
import pytest
from matplotlib.figure import Figure

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
READMES = sorted(path.parent.name for path in EXPERIMENTS.glob("*/README.md"))
RESULTS = paper_tables.read_results(EXPERIMENTS / "results")
HOW = "run `python benchmarks/reproduce.py --draw`"


@pytest.mark.parametrize("paper", READMES)
def test_tables_are_made_of_the_results(paper):
    text = (EXPERIMENTS / paper / "README.md").read_text()
    assert paper_tables.rewrite_tables(text, RESULTS) == text, HOW


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_says_how_and_where_it_was_made(name):
    document = RESULTS[name]
    assert re.fullmatch(r"python benchmarks/\w+\.py( [\w.-]+)*", document["command"])
    assert {"processor", "cores", "python", "jax"} <= set(document["machine"])
    assert document["minutes"] >= 0
    assert any(f"`{name}`" in (EXPERIMENTS / paper / "README.md").read_text() for paper in READMES)


def test_every_table_has_a_place():
    texts = [(EXPERIMENTS / paper / "README.md").read_text() for paper in READMES]
    assert all(any(f"<!-- table: {name} -->" in text for text in texts) for name in paper_tables.TABLES)


def test_every_plot_is_drawn_and_every_result_is_known():
    drawn = {path.stem for path in (EXPERIMENTS / "plots").glob("*.svg")}
    assert drawn == {name for name, (result, _) in paper_plots.PLOTS.items() if result in RESULTS}, HOW
    used = {result for result, _ in (*paper_tables.TABLES.values(), *paper_plots.PLOTS.values())}
    assert used <= set(RESULTS)


def test_plots_are_the_same_for_the_same_results(tmp_path):
    first = [path.read_bytes() for path in paper_plots.draw_all(RESULTS, tmp_path)]
    again = [path.read_bytes() for path in paper_plots.draw_all(RESULTS, tmp_path)]
    assert first == again


def test_bars_begin_at_zero():
    with_bars = 0
    for result, draw in paper_plots.PLOTS.values():
        axes = Figure().subplots()
        draw(axes, RESULTS[result])
        if axes.patches:
            with_bars += 1
            assert axes.get_ylim()[0] == 0
            assert axes.get_ylim()[1] >= max(bar.get_height() for bar in axes.patches)
    assert with_bars == 3


def test_several_seeds_have_an_error_bar_from_the_smallest_to_the_largest():
    axes = Figure().subplots()
    runs = [{"plt": 0.1, "validation_loss": loss} for loss in (2.0, 2.5, 3.0)]
    paper_plots.plt_against_loss(axes, {"runs": {"full": runs, "K = 1": runs[:1]}})
    several, one = axes.containers
    assert several.has_yerr
    assert not one.has_yerr
    (bar,) = several.lines[2][0].get_segments()
    assert bar[:, 1].tolist() == [2.0, 3.0]


def test_a_changed_figure_changes_its_table():
    text = (EXPERIMENTS / "recycle" / "README.md").read_text()
    changed = json.loads(json.dumps(RESULTS))
    changed["recycle_ablation"]["ablation"]["3 x 4, M = 6"]["no failure"]["1F1B"] = 26
    assert paper_tables.rewrite_tables(text, changed) != text


def test_a_missing_result_is_told():
    text = "<!-- table: moc_sizes -->\nold\n<!-- end -->"
    assert "has not been run" in paper_tables.rewrite_tables(text, {})
