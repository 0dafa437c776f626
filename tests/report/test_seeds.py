"""Runs that differ in their seed alone: which they are; mean and range in charts, in the table and in a browser."""

import dataclasses
import json
import math
import re
from statistics import mean, stdev

import numpy as np
import pytest

from swift.report import compare
from swift.report.compare import COLUMNS, run_styles, seed_groups, seeds_table, seeds_terminal_table
from swift.report.figures import sections_of_all
from swift.report.page import write_report
from tests.report.browser import CHROMIUM, Browser

STEPS = 80
DOTS = "\N{HORIZONTAL ELLIPSIS}"
SETTINGS = "Experiment.seed = {}\nExperiment.num_steps = 80\nExperiment.placement = @{}()\n"


@pytest.fixture
def seeded(make_run):
    """Makes a run with a seed and settings as a run directory has them."""

    def make(seed, name=None, policy="symi", num_steps=STEPS, **change):
        run = make_run(
            f"runs/{name or f'{policy}-{seed}'}", num_steps=num_steps, policy=policy, seed=seed, num_layers=1
        )
        return dataclasses.replace(run, config_text=SETTINGS.format(seed, policy), **change)

    return make


@pytest.fixture
def six(seeded):
    """Three seeds of two policies, the policies taking turns, and a run by itself."""
    return [seeded(seed, policy=policy) for seed in (3, 1, 2) for policy in ("symi", "static")] + [
        seeded(0, policy="packed")
    ]


def test_the_rows_of_a_table_are_computed_once(six, monkeypatch):
    rows, computed = compare.seed_rows, []
    monkeypatch.setattr(compare, "seed_rows", lambda *words: computed.append(words) or rows(*words))
    seeds_terminal_table(six, seed_groups(six))
    assert len(computed) == 1


def members(runs):
    return [group.members for group in seed_groups(runs)]


def test_runs_with_other_seeds_are_a_group(six):
    assert members(six) == [(0, 2, 4), (1, 3, 5)]
    assert [(group.name, group.seeds) for group in seed_groups(six)] == [
        (f"symi-3 {DOTS} symi-2", ("3", "1", "2")),
        (f"static-3 {DOTS} static-2", ("3", "1", "2")),
    ]


def test_what_differs_in_more_is_no_group(seeded, make_run):
    other = seeded(2)
    other = dataclasses.replace(other, config_text=other.config_text + "Topology.num_stages = 2\n")
    assert members([seeded(1), other]) == []
    assert members([seeded(1), seeded(2, num_steps=STEPS - 1)]) == []
    assert members([seeded(1), seeded(1, name="again")]) == []
    assert members([seeded(1), seeded(1, name="again"), seeded(2)]) == [(0, 2)]
    assert members([make_run("runs/a"), make_run("runs/b")]) == []  # no seed is known of them
    assert members([seeded(1, num_steps=0), seeded(2, num_steps=0)]) == []


@pytest.mark.parametrize("kind", ["init_from", "settings_changed"])
def test_what_has_another_past_is_no_group(seeded, kind):
    """Another start, or other settings for a while, which the settings of today do not show."""

    def since(time, value):
        return [{"time": time, "event": kind, "step": 40, "run": value}, {"event": "checkpoint", "step": 50}]

    assert members([seeded(1, events=since("12:00", "a")), seeded(2, events=since("13:00", "a"))]) == [(0, 1)]
    assert members([seeded(1, events=since("12:00", "a")), seeded(2, events=since("12:00", "b"))]) == []
    assert members([seeded(1, events=since("12:00", "a")), seeded(2)]) == []


def test_groups_of_one_name_are_told_apart(seeded):
    runs = [
        seeded(seed, name=f"{policy}/{seed}/demo", policy=policy) for policy in ("symi", "static") for seed in (1, 2)
    ]
    first, second = (group.name for group in seed_groups(runs))
    assert first == "demo (runs/symi/1/demo)"
    assert second == "demo (runs/static/1/demo)"


def test_a_group_has_one_colour_and_its_runs_other_lines(six):
    styles = run_styles(six)
    assert [len({styles[index].color for index in group}) for group in members(six)] == [1, 1]
    assert len({(style.color, style.line) for style in styles}) == len(six)
    assert len({style.color for style in styles}) == 3


# The oracle: mean, smallest and largest by Python's own functions, of numbers that are read from the records.


def smoothed(values):
    """Mean of the values around each one, a twentieth of them in all, fewer at the ends."""
    half = [min(len(values) // 40, at, len(values) - 1 - at) for at in range(len(values))]
    return [mean(values[at - half[at] : at + half[at] + 1]) for at in range(len(values))]


def by_hand(runs, value, of=smoothed):
    columns = list(zip(*(of([value(record) for record in run.metrics]) for run in runs), strict=True))
    return [[function(column) for column in columns] for function in (mean, min, max)]


VALUES = {
    "loss": lambda record: record["loss"],
    "survival": lambda record: 100 * (1 - record["drop_fraction"]),
    "imbalance": lambda record: record["load_imbalance"],
}


@pytest.mark.parametrize("name", VALUES)
def test_a_picture_has_the_mean_and_the_range(six, name):
    picture = next(one for one in sections_of_all(six)[0].pictures if one.name == name)
    axes = picture.figure.axes[0]
    strong = [line for line in axes.lines if line.get_linewidth() == 2.0]
    assert len(strong) == len(axes.collections) - 2 * (name == "loss") + 1 == 3
    for line, area, group in zip(strong, axes.collections, members(six), strict=False):
        expected, low, high = by_hand([six[index] for index in group], VALUES[name])
        np.testing.assert_allclose(line.get_ydata(), expected, rtol=1e-9)
        corners = area.get_paths()[0].vertices
        for step in (1, 17, 40, STEPS):
            heights = corners[corners[:, 0] == step, 1]
            assert (min(heights), max(heights)) == pytest.approx((low[step - 1], high[step - 1]), rel=1e-9)
    labels = [text.get_text() for text in picture.figure.legends[0].get_texts()]
    assert labels == [
        f"3 seeds: symi-3 {DOTS} symi-2",
        f"3 seeds: static-3 {DOTS} static-2",
        "packed-0",
    ]


def test_steps_that_a_run_lacks_are_left_out_of_the_mean(seeded, changed):
    whole = [seeded(1), seeded(2)]
    records = [record for record in whole[1].metrics if record["step"] != 40]
    holed = dataclasses.replace(whole[1], metrics=type(whole[1].metrics).of(records))
    unknown = changed(whole[0], lambda record: record | ({"grad_norm": None} if record["step"] < 20 else {}))
    (chart,) = (one.chart for one in sections_of_all([unknown, holed])[0].pictures if one.name == "gradient-norm")
    (band,) = chart.bands
    assert band.steps_T.tolist() == [step for step in range(1, STEPS + 1) if step != 40]
    assert np.isfinite(band.values_NT).all(axis=0).tolist() == [step >= 20 for step in band.steps_T]


def test_the_table_says_how_many_and_how_far_apart(six, changed):
    late = changed(six[2], lambda record: record | {"loss": record["loss"] + 9, "validation_loss": None})
    table = seeds_table([*six[:2], late, *six[3:]], seed_groups(six))
    assert [row[:3] for row in table.rows] == [[group.name, "3", "3, 1, 2"] for group in seed_groups(six)]
    final = [mean(record["loss"] for record in [*run.metrics][-10:]) for run in (six[0], late, six[4])]
    cells = dict(zip(table.headings, table.rows[0], strict=True))
    spread = f"{mean(final):.3f} \N{PLUS-MINUS SIGN} {stdev(final):.3f} ({min(final):.3f} to {max(final):.3f})"
    assert cells["final loss (mean of last 10)"] == spread
    assert re.fullmatch(r"\d+ \N{PLUS-MINUS SIGN} \d+ \(\d+ to \d+; 2 of 3\)", cells["steps to target"])
    assert cells["validation loss"].endswith("; 2 of 3)")
    nowhere = [dataclasses.replace(run, summary=run.summary | {"target_loss": None}) for run in six]
    assert seeds_table(nowhere, seed_groups(six)).rows[0][table.headings.index(COLUMNS["steps_to_target"][0])] == "-"


TELL = """(() => {
  const figure = document.querySelector("figure[data-chart=loss]"), svg = figure.querySelector("svg");
  const press = key => svg.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
  const state = () => { press("Home"); for (let i = 1; i < 40; i++) press("ArrowRight");
    return {rows: [...figure.querySelector(".tip").children].map(row => row.textContent),
      runs: [...figure.querySelectorAll(".line")].map(line => line.dataset.run),
      areas: [...figure.querySelectorAll(".range")].map(area => area.getAttribute("d")),
      bars: figure.querySelectorAll(".bar").length, rings: figure.querySelectorAll(".ring").length}; };
  const set = (name, checked) => { const box = document.querySelector(`#controls [name=${name}]`);
    box.checked = checked; box.dispatchEvent(new Event("change")); };
  const found = {all: state()};
  set("run", false); found.less = state(); set("run", true);
  set("apart", true); found.apart = state();
  return found;
})()"""


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
def test_a_browser_draws_and_tells_the_same(six, tmp_path):
    write_report(six, tmp_path / "report.html")
    with Browser() as browser:
        browser.open(tmp_path / "report.html")
        found = browser.tell(TELL)
    groups = [[six[index] for index in group] for group in members(six)]
    assert found["all"]["runs"] == ["0,2,4", "1,3,5", "6"]
    assert found["all"]["rows"][0] == "step 40"
    for row, area, runs in zip(found["all"]["rows"][1:], found["all"]["areas"], groups, strict=False):
        told = [float(number) for number in re.findall(r"(?<![\w-])\d+\.\d+", row)]
        raw, drawn = (by_hand(runs, VALUES["loss"], of) for of in (list, smoothed))
        assert told == pytest.approx([values[39] for values in (*raw, *drawn)], rel=2e-3)
        assert ", mean of 3: " in row
        corners = np.array(re.findall(r"([\d.]+) ([\d.]+)", area), float)
        heights = np.array([*drawn[2], *reversed(drawn[1])])
        slope, start = np.polyfit(heights, corners[:, 1], 1)
        assert slope < 0
        assert np.abs(slope * heights + start - corners[:, 1]).max() < 0.1  # of a pixel
    assert found["all"]["bars"] == 2 * 5
    assert found["all"]["rings"] == 3 * 5
    assert found["less"]["runs"] == ["2,4", "1,3,5", "6"]
    assert ", mean of 2: " in found["less"]["rows"][1]
    assert found["apart"]["runs"] == [str(index) for index in range(len(six))]
    assert (found["apart"]["bars"], found["apart"]["rings"]) == (0, 7 * 5)


def test_in_time_a_step_of_a_group_stands_at_the_mean_of_its_runs(six, tmp_path):
    runs = []
    for number, run in enumerate(six[:4:2]):  # the second is twice as slow
        times = (f"2025-01-01T00:{s // 60:02}:{s % 60:02}+00:00" for s in range(2, 1000, 2 * (number + 1)))
        records = [record | {"time": time} for record, time in zip(run.metrics, times, strict=False)]
        events = [{"time": "2025-01-01T00:00:00+00:00", "event": "start", "step": 0}]
        runs.append(dataclasses.replace(run, metrics=type(run.metrics).of(records), events=events))
    write_report(runs, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    (band,) = data["charts"]["loss"]["bands"]
    assert math.isclose(band["x"]["time"][-1], mean(run["x"]["time"][-1] for run in data["runs"]))
    assert band["x"]["time"][-1] > data["runs"][0]["x"]["time"][-1]
    assert band["x"]["step"] == data["runs"][0]["x"]["step"]
    assert not json.loads(json.dumps(data["charts"]["learning-rate"]))["ringBands"]
