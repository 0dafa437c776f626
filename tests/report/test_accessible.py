"""The page for readers who need contrast, or who use a keyboard: measured in a browser, in light and in dark."""

import dataclasses
import io
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from swift.report.page import write_report
from tests.report.browser import CHROMIUM, Browser
from tests.report.contrast import contrast, text_colors

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")

WIDTH, HEIGHT = 1400, 1200
PAIRS = r"""(() => {
  const rgb = text => text.match(/[\d.]+/g).map(Number).concat(1).slice(0, 4);
  const over = (top, under) => [0, 1, 2].map(i => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
  const hex = color => "#" + color.slice(0, 3).map(part => Math.round(part).toString(16).padStart(2, "0")).join("");
  const paint = element => {
    const style = getComputedStyle(element);
    if (!(element instanceof SVGElement) || element instanceof SVGSVGElement) return rgb(style.backgroundColor);
    if (!style.fill.startsWith("rgb")) return [0, 0, 0, 0];
    const color = rgb(style.fill);
    return [...color.slice(0, 3), color[3] * style.fillOpacity * style.opacity];
  };
  const pairs = new Map(), walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; node = walk.nextNode();) {
    const element = node.parentElement, range = document.createRange();
    if (element.closest("script, style, title, option, .unseen, :disabled") || !node.textContent.trim()) continue;
    range.selectNodeContents(node);
    const box = range.getBoundingClientRect();
    if (!box.width) continue;
    const below = document.elementsFromPoint(box.left + box.width / 2, box.top + box.height / 2);
    const grounds = below.filter(one => one.tagName !== "text").map(paint);
    const ground = grounds.reverse().reduce((under, top) => over(top, under), [255, 255, 255, 1]);
    const style = getComputedStyle(element), color = rgb(element instanceof SVGElement ? style.fill : style.color);
    pairs.set(hex(over(color, ground)) + hex(ground), [node.textContent.trim(), hex(over(color, ground)), hex(ground),
      grounds.some(one => one[3] === 1)]);
  }
  return [...pairs.values()];
})()"""
FOCUSED = """(() => {
  const element = document.activeElement, box = element.getBoundingClientRect();
  const all = [...document.querySelectorAll("*")];
  return {index: all.indexOf(element), tag: element.tagName, box: [box.left, box.top, box.width, box.height],
    name: element.getAttribute("aria-label") || element.closest("label")?.textContent || element.textContent,
    chart: element.closest("figure")?.dataset.chart || element.closest("figure")?.dataset.maps};
})()"""

SEEN = """(() => {
  const element = document.activeElement, box = element.getBoundingClientRect();
  const top = document.elementFromPoint(box.left + box.width / 2, Math.max(0, box.top) + 4);
  return box.top >= 0 && box.top < innerHeight && (element.contains(top) || element === top);
})()"""
"""Whether the upper edge of what has the focus is in the window, and not below the controls that stay there."""


@pytest.fixture(scope="module")
def page(checkpointed, tmp_path_factory):
    """A page with all that there can be."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_report([checkpointed], path)
    return path


@pytest.fixture(scope="module")
def browser():
    with Browser() as one:
        yield one


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_from_what_is_behind_it(page, browser, scheme):
    """At least 4.5 to 1, as the web's guidelines ask of text of any size (AA), the letters in pictures among them."""
    browser.open(page, WIDTH, HEIGHT, scheme)
    browser.tell('document.querySelectorAll("details").forEach(one => { one.open = true; })')
    browser.resize(WIDTH, browser.tell("document.documentElement.scrollHeight"))
    pairs = browser.tell(PAIRS)
    assert len(pairs) > 6
    for text, color, ground, is_painted in pairs:
        assert is_painted, text
        assert contrast(color, ground) >= 4.5, (text, color, ground)


def test_tab_leads_through_the_page_and_shows_where_it_is(page, browser):
    browser.open(page, WIDTH, HEIGHT)
    color = text_colors()[0]["focus"]
    stops = []
    while True:
        browser.press("Tab")
        stop = browser.tell(FOCUSED)
        if stop["tag"] == "BODY":
            break
        stops.append(stop)
        assert browser.tell(SEEN), stop
        assert stop["name"].strip(), stop
        assert is_outlined(browser, stop["box"], color), stop
    order = [stop["index"] for stop in stops]
    assert order == sorted(set(order))
    charts = browser.tell('[...document.querySelectorAll("figure")].map(one => one.dataset.chart ?? one.dataset.maps)')
    assert {chart for chart in charts if chart} <= {stop.get("chart") for stop in stops}
    assert len(stops) > 25


def is_outlined(browser, box, color):
    """Whether there are long straight lines in a colour around a box, or at its inner edge, on all four sides."""
    left, top, width, height = box
    picture = imread(io.BytesIO(browser.picture((left - 6, top - 6, width + 12, height + 12))))
    wanted = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    is_line = (np.abs(picture[..., :3] - wanted) < 0.02).all(axis=-1)
    rows, columns = is_line.mean(axis=1) > 0.6, is_line.mean(axis=0) > 0.5
    return all(edge.sum() >= 2 for edge in (rows[:10], rows[-10:], columns[:10], columns[-10:]))


def test_a_picture_without_keys_has_a_table_beside_it(page, browser):
    browser.open(page, WIDTH, HEIGHT)
    assert browser.tell("""[...document.querySelectorAll("figure:not([data-chart]):not([data-maps])")].every(figure =>
        figure.closest("section").querySelector("table"))""")


def test_the_maps_of_a_layer_are_read_with_keys(page, browser, checkpointed):
    browser.open(page, WIDTH, HEIGHT)
    browser.tell('document.querySelector("figure[data-maps=run1-symi-layer1] .frame").focus()')
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft"):
        browser.press(key)
    record = checkpointed.metrics[1]
    tokens, replicas = (
        f"{100 * record[kind][1][1] / sum(record[kind][1]):.1f} %" for kind in ("popularity", "replicas")
    )
    told = browser.tell('document.getElementById("told").textContent')
    assert told == f"expert 1, step 2; tokens: {tokens}; replicas: {replicas}"
    browser.press("Home")
    for _ in range(3):
        browser.press("ArrowUp")
    assert browser.tell('document.getElementById("told").textContent').startswith("expert 0, step 1;")


def test_a_run_is_switched_off_with_the_keyboard_alone(page, browser):
    browser.open(page, WIDTH, HEIGHT)
    while browser.tell("document.activeElement.name") != "run":
        browser.press("Tab")
    browser.press("Space")
    assert browser.tell('document.querySelectorAll("figure[data-chart=loss] .line").length') == 0


CAUSES = ("startup", "useful", "saving", "detection", "reconfiguration", "rerun", "waiting", "other")


@pytest.mark.parametrize("width", [390, 700, 800, 1000, 1100, 1300, 1600])
def test_no_table_is_cut_at_any_width(make_run, tmp_path, browser, width):
    """That of the times has the most columns: all causes of a run of several processes."""
    goodput = {f"{cause}_s": 4_567.0 for cause in CAUSES} | {"total_s": 9 * 4_567.0}
    times = [{"time": f"2025-01-01T0{hour}:00:00+00:00", "step": 0} for hour in (0, 9)]
    events = [times[0] | {"event": "start"}, times[1] | {"event": "finish", "goodput": goodput}]
    run = dataclasses.replace(make_run("runs/a-run-with-a-long-name", num_steps=3), events=events)
    write_report([run, dataclasses.replace(run, path=Path("runs/b"))], tmp_path / "page.html")
    browser.open(tmp_path / "page.html", width=width)
    cut = "[...document.querySelectorAll('.wide')].filter(box => box.scrollWidth > box.clientWidth).length"
    assert browser.tell("document.querySelectorAll('#time td').length") == 2 * (2 + len(CAUSES))
    assert browser.tell(cut) == 0
    assert browser.tell("document.documentElement.scrollWidth") <= width
