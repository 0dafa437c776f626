"""The page in a real browser: on a phone it fits, in dark mode it is dark, and every picture shows something."""

import html
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from matplotlib.image import imread

from swift.tools.report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")

PHONE = 390
QUIET = (
    "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking disable-component-update"
)
QUIET += " disable-sync disable-dev-shm-usage hide-scrollbars force-device-scale-factor=1"
MEASURE = """
const page = document.getElementById("page").contentDocument, root = page.documentElement;
const box = element => { const r = element.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
const figures = [...page.querySelectorAll("figure")].map(figure => {
  const svg = figure.querySelector("svg"), frame = figure.querySelector(".frame");
  const selection = page.getSelection();
  selection.selectAllChildren(svg);
  return {name: svg.getAttribute("aria-label"), box: box(frame), alone: figure.className == "alone",
    inside: frame.clientWidth, whole: frame.scrollWidth, selected: selection.toString(),
    letters: Math.min(...[...svg.querySelectorAll("text")].map(text => text.getBoundingClientRect().height))};
});
const found = {width: root.clientWidth, whole: root.scrollWidth, height: root.scrollHeight, figures: figures,
  titles: [...page.querySelectorAll("h3")].map(title => title.textContent)};
document.body.innerHTML = "<pre>" + JSON.stringify(found).replaceAll("&", "&amp;").replaceAll("<", "&lt;") + "</pre>";
"""


def browse(tmp_path_factory, *options):
    """What chromium says, in a profile of its own."""
    profile = tmp_path_factory.mktemp("profile")
    command = [CHROMIUM, *(f"--{flag}" for flag in QUIET.split()), f"--user-data-dir={profile}", *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def on_a_phone(page, height, script=""):
    """A document that has the page in a frame as wide as a phone: chromium's own window is wider at the least."""
    frame = (
        f'<iframe id="page" width="{PHONE}" height="{height}" style="border:0" srcdoc="{html.escape(page)}"></iframe>'
    )
    head = '<!DOCTYPE html><meta charset="utf-8"><meta name="color-scheme" content="light dark"><body style="margin:0">'
    return head + frame + (f"<script>window.onload = () => {{ {script} }}</script>" if script else "")


@pytest.fixture(scope="module")
def page(checkpointed, tmp_path_factory):
    """The text of a page with all that there can be."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_report([checkpointed], path)
    return path.read_text()


@pytest.fixture(scope="module")
def layout(page, tmp_path_factory):
    """What a browser has measured, in pixels."""
    path = tmp_path_factory.mktemp("layout") / "page.html"
    path.write_text(on_a_phone(page, 800, MEASURE))
    dom = browse(tmp_path_factory, "--dump-dom", "--window-size=800,900", path.as_uri())
    return json.loads(html.unescape(re.search(r"<pre>(.*)</pre>", dom, re.DOTALL)[1]))


@pytest.fixture(scope="module", params=["light", "dark"])
def seen(request, page, layout, tmp_path_factory):
    """(light or dark, uint8[height, width, 3]: the whole page on a phone)."""
    directory = tmp_path_factory.mktemp(request.param)
    (directory / "page.html").write_text(on_a_phone(page, layout["height"]))
    window = [f"--window-size=800,{layout['height'] + 100}", f"--screenshot={directory / 'seen.png'}"]
    scheme = f"--blink-settings=preferredColorScheme={int(request.param == 'light')}"
    browse(tmp_path_factory, scheme, *window, (directory / "page.html").as_uri())
    picture = (255 * imread(directory / "seen.png")).astype(np.uint8)
    return request.param, picture[: layout["height"], :PHONE, :3]


def test_a_phone_need_not_scroll_sideways(layout):
    assert layout["width"] == PHONE
    assert layout["whole"] == PHONE
    wide = [figure["inside"] < figure["whole"] for figure in layout["figures"] if figure["alone"]]
    assert len(wide) == 3  # a timeline and two schedules scroll in their own boxes
    assert all(wide)
    for figure in layout["figures"]:
        left, _, right, _ = figure["box"]
        assert 0 <= left < right <= PHONE
        assert figure["alone"] or figure["inside"] == figure["whole"]


def test_letters_can_be_read_and_selected(layout):
    sections = ["Where the time went", "Popularity and replicas", "Failures and recoveries", "Configurations that ran"]
    assert layout["titles"] == [*sections, "Checkpoint coverage"]
    for figure in layout["figures"]:
        smallest = 6.5 if "what each worker runs" in figure["name"] else 9
        assert figure["letters"] >= smallest, figure["name"]
    assert "loss (nats per token)" in layout["figures"][0]["selected"]


def test_every_picture_shows_something_on_the_right_ground(seen, layout):
    scheme, picture = seen
    ground = picture[2, 2].astype(int)
    assert (ground.max() < 40) if scheme == "dark" else (ground.min() > 240)
    assert len(layout["figures"]) == 3 + 1 + 3 + 1 + 2 + 1
    for figure in layout["figures"]:
        left, top, right, bottom = (round(edge) for edge in figure["box"])
        colors = picture[top + 4 : bottom - 4, left + 4 : right - 4].reshape(-1, 3).astype(int)
        card, brightness = colors[0], colors.mean(axis=-1)
        assert (card.max() < 50) if scheme == "dark" else (card.min() > 240), figure["name"]
        drawn = np.abs(colors - card).max(axis=-1) > 24
        assert 0.02 < drawn.mean() < 0.95, figure["name"]
        # Letters: as dark as ink, or as light.
        ink = brightness > 185 if scheme == "dark" else brightness < 90
        assert ink.mean() > 0.001, figure["name"]
        hues = {tuple(color) for color in (colors[drawn] // 16).tolist()}
        assert len(hues) > 12, figure["name"]
