import dataclasses
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from swift.draw.charts import draw_layer, points_of_a_line
from swift.draw.style import ON_DARK
from swift.report.figures import save_figures, sections_of, sections_of_all
from swift.report.page import write_report
from swift.runlog.reading import Run
from tests.runlog.records import metrics_of

ODD_NAME = "_\N{HIRAGANA LETTER A} </h1><script>alert('$\\frac$ &')</script>"


class Page(HTMLParser):
    """The tags, pictures and text of a page."""

    VOID = ("meta", "img", "input")
    OURS = ("script", "script")  # the data and the program of the charts

    def __init__(self, path):
        super().__init__()
        self.tags, self.pictures, self.addresses, self.programs, self.text, self._open = [], [], [], [], "", []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag == "svg":
            self.pictures.append(dict(attrs))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] in ("script", "style"):
            self.programs += [data] if self._open[-1] == "script" else []
        else:
            self.text += data


def written(runs, tmp_path):
    write_report(runs, tmp_path / "report.html")
    return Page(tmp_path / "report.html")


def captions(page, start=""):
    """Captions of the page's pictures that begin so."""
    return [picture["aria-label"] for picture in page.pictures if picture["aria-label"].startswith(start)]


def test_the_page_is_whole_and_fetches_nothing(make_run, tmp_path):
    runs = [make_run("runs/symi"), make_run("runs/static", policy="static")]
    page = written(runs, tmp_path)
    # Loss, survival, imbalance, learning rate, norm and speed of all; of each run its drops and two layers.
    assert len(page.pictures) == 6 + 2 * (1 + 2)
    assert len(captions(page, "MoE layer ")) == 4
    for picture in page.pictures:
        assert picture["role"] == "img"
    for address in page.addresses:
        assert re.match(r"#|data:image/png;base64,", address)
    text = (tmp_path / "report.html").read_text()
    assert not re.search(r"https?:|url\((?!#)|@import", text)
    assert not {"link", "iframe", "img"} & set(page.tags)
    assert tuple(tag for tag in page.tags if tag == "script") == page.OURS
    for expected in ("symi", "static", "steps to target", "checkpoint", "Experiment.num_steps = 1", "8 CPU"):
        assert expected in page.text
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def test_parts_of_pictures_have_names_of_their_own(make_run, tmp_path):
    """Two pictures of a page may have the same shapes; what one refers to is its own."""
    written([make_run("runs/a"), make_run("runs/a")], tmp_path)
    text = (tmp_path / "report.html").read_text()
    names = re.findall(r'\bid="([^"]+)"', text)
    assert len(set(names)) == len(names) > 100
    assert {*re.findall(r'(?:url\(|href=")#([^")]+)', text)} <= {*names}


def test_pictures_take_the_colours_of_the_page(make_run, tmp_path):
    written([make_run()], tmp_path)
    page = (tmp_path / "report.html").read_text()
    body = page[page.index("<body>") :]
    assert "var(--c333333)" in body
    assert not {*re.findall(r"#[0-9a-f]{6}\b", body.split('<h2 id="run1"')[0])} & {*ON_DARK}
    assert {*re.findall(r"var\((--c[0-9a-f]{6})", body)} <= {*re.findall(r"(--c[0-9a-f]{6}):", page)}
    assert body.count("<text") > 50  # letters, not shapes of letters


@pytest.mark.filterwarnings("error")
def test_odd_names_are_text_everywhere(make_run, tmp_path):
    runs = [make_run(summary={"name": ODD_NAME}), make_run(summary={"name": "a" * 300, "device": "<b>"})]
    runs[0].events[0]["event"] = "<i>"
    runs[0] = dataclasses.replace(runs[0], config_text="<u>")
    page = written(runs, tmp_path)
    assert not {"i", "u", "b"} & set(page.tags)
    assert tuple(tag for tag in page.tags if tag == "script") == page.OURS
    assert json.loads(page.programs[0])["runs"][0]["label"] == ODD_NAME
    assert "alert" not in page.programs[1]
    for expected in (ODD_NAME, "<b>", "<i>", "<u>"):
        assert expected in page.text
    for path in save_figures(runs, tmp_path / "figures"):
        assert re.fullmatch(r"[A-Za-z0-9._-]+\.png", path.name)


@pytest.mark.long
def test_a_chart_is_there_where_its_numbers_are_recorded(make_run, changed):
    names = ["learning_rate", "grad_norm", "tokens_per_s", "input_ms", "mfu"]
    shown = {
        "learning_rate": "Learning rate",
        "grad_norm": "Norm of",
        "tokens_per_s": "Tokens trained",
        "input_ms": "Time to read",
        "mfu": "Model FLOPs",
    }
    run = changed(make_run(num_steps=3), lambda record: record | {"mfu": 0.3, "input_ms": 2.0})
    for left_out in names:
        less = changed(run, lambda record, name=left_out: {n: v for n, v in record.items() if n != name})
        drawn = [picture.caption for section in sections_of_all([less]) for picture in section.pictures]
        assert [any(one.startswith(shown[name]) for one in drawn) for name in names] == [n != left_out for n in names]


@pytest.mark.parametrize("num_steps", [1, 2, 3, 11])
def test_short_runs_are_drawn(make_run, tmp_path, num_steps):
    assert len(written([make_run(num_steps=num_steps)], tmp_path).pictures) == 6 + 1 + 2


def test_a_run_without_steps_has_a_page_without_pictures(tmp_path):
    page = written([Run(Path("runs/new"), "new", "", metrics_of([]), [], None)], tmp_path)
    assert page.pictures == []
    assert "0 steps, not ended" in page.text


def test_a_run_without_moe_layers_has_a_loss_curve(make_run, changed, tmp_path):
    keys = ("popularity", "replicas", "dropped", "drop_fraction", "load_imbalance")
    run = changed(make_run(), lambda record: {k: v for k, v in record.items() if k not in keys})
    assert len(written([run], tmp_path).pictures) == 1 + 3


def test_a_run_without_routed_tokens_is_drawn(make_run, changed, tmp_path):
    nothing = {"tokens_routed": 0, "tokens_dropped": 0, "drop_fraction": None, "load_imbalance": None}
    nothing |= {kind: [[0] * 8] * 2 for kind in ("popularity", "dropped")}
    run = changed(make_run(num_steps=5), lambda record: record | nothing)
    assert len(written([run], tmp_path).pictures) == 4 + 1 + 2


def test_losses_that_are_not_finite_are_gaps(make_run, changed, tmp_path):
    run = changed(make_run(num_steps=30), lambda record: record | ({"loss": None} if record["step"] > 10 else {}))
    assert len(written([run], tmp_path).pictures) == 6 + 1 + 2


def test_figures_are_saved_under_unique_names(make_run, tmp_path):
    runs = [make_run("runs/a b"), make_run("runs/a-b")]
    paths = save_figures(runs, tmp_path / "new" / "figures")
    assert sorted(path.name for path in paths) == sorted(
        ["loss.png", "survival.png", "imbalance.png", "learning-rate.png", "gradient-norm.png", "throughput.png"]
        + [f"run{n}-a-b-{kind}.png" for n in (1, 2) for kind in ("drops", "layer0", "layer1")]
    )
    assert set(paths) == set((tmp_path / "new" / "figures").iterdir())
    assert imread(paths[0]).shape[2] == 4


def test_the_maps_show_replicas_that_follow_popularity_and_those_that_do_not(make_run):
    follows = {}
    for policy in ("symi", "static"):
        run = make_run(num_steps=200, policy=policy, num_slots=64)
        popularity, replicas = (
            np.array([record[key] for record in run.metrics])[:, 0] for key in ("popularity", "replicas")
        )
        figure = draw_layer(0, np.arange(1.0, 201.0), popularity, replicas)
        tokens_map, replicas_map = (axes.images[0].get_array() for axes in figure.axes[1:3])
        assert tokens_map.shape == replicas_map.shape == (8, 200)
        np.testing.assert_allclose(tokens_map.sum(axis=0), 100)
        np.testing.assert_allclose(replicas_map.sum(axis=0), 100)
        follows[policy] = float(np.abs(tokens_map - replicas_map).mean())
        lines = figure.axes[0].lines
        assert len(lines) == 8
        assert (np.ptp(lines[1].get_ydata()) > 5) == (policy == "symi")
    assert follows["symi"] < follows["static"] / 3


def test_long_runs_are_drawn_with_few_points(make_run):
    short = make_run(num_steps=100)
    records = [*short.metrics]
    metrics = metrics_of(records[step % 100] | {"step": step + 1} for step in range(20_000))
    run = dataclasses.replace(short, metrics=metrics)
    sections = sections_of_all([run]) + sections_of(run, 0)
    figures = [picture.figure for section in sections for picture in section.pictures]
    assert len(figures) == 9
    drawn = [len(line.get_xdata()) for figure in figures for axes in figure.axes for line in axes.lines]
    assert max(drawn) == 1000


def test_the_report_stands_alone():
    """The trainer imports it: were it to import the trainer, neither could be imported first."""
    code = "import sys, swift.report.page; print([name for name in sys.modules if name in ('jax', 'swift.train')])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


@pytest.mark.slow
def test_the_page_of_a_long_run_of_many_layers_can_be_sent(make_run, tmp_path):
    short = make_run(num_steps=100, num_layers=12, num_classes=16, num_slots=64)
    records = [*short.metrics]
    metrics = metrics_of(records[step % 100] | {"step": step + 1} for step in range(2000))
    page = written([dataclasses.replace(short, metrics=metrics)], tmp_path)
    assert len(page.pictures) == 6 + 1 + 12
    assert (tmp_path / "report.html").stat().st_size < 2e6


def test_a_page_of_many_runs_has_what_they_have_in_common(make_run, tmp_path):
    """More than a page has parts for: each picture of one run takes a second to draw."""
    runs = [make_run(f"runs/run-{index}", num_steps=120) for index in range(60)]
    page = written(runs, tmp_path)
    assert "Swift: 60 runs" in page.text
    assert "swift report RUN_DIR" in page.text
    assert not captions(page, "MoE layer ")
    assert not any(address.startswith("#run1") for address in page.addresses)
    assert all(page.text.count(f"run-{index}") >= 2 for index in range(60))  # in the table, and beside its box
    assert "and 49 more" in page.text  # of a legend
    assert (tmp_path / "report.html").stat().st_size < 3_000_000
    assert '"none"' in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("count", [20, 21, 300, 100_000])
def test_many_lines_have_no_more_points_together_than_few(count):
    num_points = points_of_a_line(count, 1000)
    assert num_points % 2 == 0
    assert count * num_points <= 20 * 1000


def test_all_runs_have_their_time_in_the_table_and_the_first_ones_in_the_picture(make_run):
    end = {"time": "2025-01-01T00:01:00+00:00", "event": "finish", "goodput": {"total_s": 9.0, "useful_s": 8.0}}
    runs = [dataclasses.replace(make_run(f"runs/{index}", 3), events=[end]) for index in range(50)]
    section = next(one for one in sections_of_all(runs) if one.title == "Where the time went")
    assert [row[0] for row in section.tables[0].rows] == [run.name for run in runs]
    (picture,) = section.pictures
    assert "The first 40 of 50 runs" in picture.caption
    assert len(picture.figure.axes[0].get_yticks()) == 40
    assert picture.figure.get_figheight() < 20


def test_control_characters_of_a_name_are_shown_as_escapes(make_run, tmp_path):
    name = "a\x1b[31mb\nc"
    page = written([make_run(f"runs/{name}", 5), make_run(f"more/{name}", 5, summary={"placement": name})], tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert "\x1b" not in text
    assert "a\\x1b[31mb\\nc (runs/a\\x1b[31mb\\nc)" in page.text


def test_a_long_legend_leaves_the_lines_their_room(make_run):
    def height_of_axes(count):
        runs = [make_run(f"runs/run-with-a-name-that-is-long-{index:03}", 20) for index in range(count)]
        figure = sections_of_all(runs)[0].pictures[0].figure
        figure.draw_without_rendering()
        return figure.axes[0].get_position().height * figure.get_figheight()

    assert height_of_axes(30) > 0.9 * height_of_axes(3)
