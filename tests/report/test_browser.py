"""The page in a real browser: on a phone it fits, in dark mode it is dark, and every picture shows something."""

import html
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from matplotlib.image import imread

from swift.report.page import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")

PHONE = 390
QUIET = (
    "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking disable-component-update"
)
QUIET += " disable-sync disable-dev-shm-usage hide-scrollbars force-device-scale-factor=1"
MEASURE = """
const page = document.getElementById("page").contentDocument, root = page.documentElement;
const height = root.scrollHeight;
const box = element => { const r = element.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
const figures = [...page.querySelectorAll("figure")].map(figure => {
  const svg = figure.querySelector("svg"), frame = figure.querySelector(".frame");
  const selection = page.getSelection();
  selection.selectAllChildren(svg);
  return {name: svg.getAttribute("aria-label"), box: box(frame), alone: figure.className == "alone",
    inside: frame.clientWidth, whole: frame.scrollWidth, selected: selection.toString(),
    letters: Math.min(...[...svg.querySelectorAll("text")].map(text => text.getBoundingClientRect().height))};
});
page.querySelectorAll("details").forEach(one => { one.open = true; });
const tables = [...page.querySelectorAll(".wide")].map(box => [box.clientWidth, box.scrollWidth]);
const found = {tables: tables, width: root.clientWidth, whole: root.scrollWidth, height: height, figures: figures,
  titles: [...page.querySelectorAll("h3")].map(title => title.textContent)};
document.body.innerHTML = "<pre>" + JSON.stringify(found).replaceAll("&", "&amp;").replaceAll("<", "&lt;") + "</pre>";
"""


def browse(tmp_path_factory, *options):
    """Runs chromium in a profile of its own, and returns its output."""
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
    """Measurements by a browser, in pixels."""
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


def test_no_table_is_cut_on_a_phone(layout):
    """Neither those of the sections nor, once they are unfolded, the events."""
    assert len(layout["tables"]) == 1 + 1 + 1 + 1 + 1 + 1 + 1
    assert all(inside == whole > 200 for inside, whole in layout["tables"])


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
    assert len(layout["figures"]) == 6 + 1 + 3 + 1 + 2 + 1
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


ACT = """
const frame = document.getElementById("page"), page = frame.contentDocument, told = {};
const figure = page.querySelector("figure[data-chart=loss]"), svg = () => figure.querySelector("svg");
const lines = () => [...figure.querySelectorAll(".line")].map(line => [line.dataset.run, line.getAttribute("d")]);
const texts = () => [...svg().querySelectorAll("text")].map(text => text.textContent);
const tip = () => figure.querySelector(".tip"), rows = () => [...tip().children].map(row => row.textContent);
const point = (kind, part) => { const box = svg().getBoundingClientRect(), x = box.left + box.width * part;
  svg().dispatchEvent(new frame.contentWindow.PointerEvent(kind, {clientX: x, bubbles: true})); };
const press = key => svg().dispatchEvent(new frame.contentWindow.KeyboardEvent("keydown", {key: key, bubbles: true}));
const set = (name, value) => { const one = page.querySelector(`#controls [name=${name}]`);
  if (one.type == "checkbox") one.checked = value; else one.value = value;
  one.dispatchEvent(new frame.contentWindow.Event(one.type == "range" ? "input" : "change")); };
told.shown = !page.getElementById("controls").hidden;
told.drawn = page.querySelectorAll("svg.live").length;
told.lines = lines();
const parts = [...page.querySelectorAll("svg.live path")];
const marks = () => page.querySelectorAll("svg.live .cursor").length;
point("pointermove", 0.5); told.hover = rows(); told.hidden = tip().hidden; told.marks = [marks()];
point("pointermove", 0.6); told.marks.push(marks());
point("pointerleave", 0.5); told.left = tip().hidden; told.marks.push(marks());
told.same = parts.length > 20 && parts.every(part => part.isConnected);
set("smoothing", 0); told.other = parts.every(part => !part.isConnected);
told.rough = lines(); told.raw = figure.querySelector(".raw").getAttribute("d");
set("run", false); told.switched = lines(); set("run", true); told.again = lines();
set("axis", "tokens"); told.tokens = texts(); set("axis", "time"); told.time = texts(); set("axis", "step");
point("pointerdown", 0.4); point("pointermove", 0.6); point("pointerup", 0.6); told.zoomed = texts();
told.button = !page.querySelector("[name=whole]").disabled;
svg().dispatchEvent(new frame.contentWindow.MouseEvent("dblclick")); told.whole = texts();
for (const key of ["Home", "ArrowRight", "ArrowRight"]) press(key);
told.keys = rows(); told.aloud = page.getElementById("told").textContent;
press("+"); told.near = texts(); press("Escape"); told.escaped = texts();
const layer = page.querySelector("figure[data-maps=run1-symi-layer1]"), boxes = layer.querySelectorAll("svg image");
const over = image => { const box = image.getBoundingClientRect(), [x, y] = [box.left + box.width * 10.5 / 40,
  box.top + box.height * 6.5 / 8]; layer.querySelector(".frame").dispatchEvent(new frame.contentWindow.PointerEvent(
  "pointermove", {clientX: x, clientY: y, bubbles: true}));
  return [...layer.querySelector(".tip").children].map(row => row.textContent); };
told.maps = [over(boxes[0]), over(boxes[1])];
told.title = page.title;
document.body.innerHTML = "<pre>" + JSON.stringify(told).replaceAll("&", "&amp;").replaceAll("<", "&lt;") + "</pre>";
"""


@pytest.fixture(scope="module")
def acted(failing_runs, tmp_path_factory):
    """The page of two runs after each of a reader's actions; into it, a script has got from a run."""
    directory = tmp_path_factory.mktemp("acted")
    write_report(failing_runs, directory / "report.html")
    page = (directory / "report.html").read_text()
    page = page.replace("</main>", "<script>document.title = 'taken over'</script></main>")
    (directory / "page.html").write_text(on_a_phone(page, 800, ACT))
    dom = browse(tmp_path_factory, "--dump-dom", "--window-size=800,900", (directory / "page.html").as_uri())
    return json.loads(html.unescape(re.search(r"<pre>(.*)</pre>", dom, re.DOTALL)[1]))


def numbers(texts):
    """The numbers at the axes."""
    return [float(text.replace(",", "")) for text in texts if re.fullmatch(r"-?[\d,.]+", text)]


def test_the_charts_can_be_hovered(acted, failing_runs):
    assert acted["shown"]
    assert acted["drawn"] == 6
    assert not acted["hidden"]
    assert acted["left"]
    step = int(re.fullmatch(r"step (\d+)", acted["hover"][0])[1])
    assert 15 < step < 25
    for row, run in zip(acted["hover"][1:], failing_runs, strict=True):
        name, value = re.match(r"(\S+): ([\d.]+)", row).groups()
        assert name == run.name
        assert float(value) == pytest.approx(run.metrics[step - 1]["loss"], rel=1e-3)


def test_hovering_draws_the_mark_and_nothing_else(acted):
    assert acted["marks"] == [6, 6, 0]
    assert acted["same"]
    assert acted["other"]


def test_runs_are_switched_on_and_off(acted):
    assert [run for run, _ in acted["lines"]] == ["0", "1"]
    assert [run for run, _ in acted["switched"]] == ["1"]
    assert acted["again"] == acted["rough"]


def test_curves_are_smoothed_as_much_as_the_reader_wants(acted):
    assert acted["rough"][0][1] == acted["raw"]
    assert acted["rough"][0][1] != acted["lines"][0][1]


def test_the_axis_is_steps_tokens_or_time(acted):
    assert "tokens (K)" in acted["tokens"]
    assert max(numbers(acted["tokens"])) == 150  # of 40 times 4,096 tokens
    assert "time of running (s)" in acted["time"]
    assert max(numbers(acted["time"])) == 200  # of 280 s


def test_a_part_is_seen_closely(acted):
    assert acted["button"]
    assert max(numbers(acted["zoomed"])) < 30
    assert acted["whole"] == acted["escaped"]
    assert max(numbers(acted["whole"])) == 40


def test_keys_do_what_the_pointer_does(acted, failing_runs):
    assert acted["keys"][0] == "step 3"
    assert acted["aloud"] == "; ".join(acted["keys"])
    assert f"{failing_runs[0].metrics[2]['loss']:.3f}" in acted["keys"][1]
    assert max(numbers(acted["near"])) < 40


def test_the_maps_of_a_layer_tell_shares(acted, failing_runs):
    record = failing_runs[0].metrics[10]
    shares = []
    for kind in ("popularity", "replicas"):
        counts_E = np.array(record[kind][1], float)
        shares.append(f"{100 * counts_E[6] / counts_E.sum():.1f} %")
    expected = ["expert 6, step 11", f"tokens: {shares[0]}", f"replicas: {shares[1]}"]
    assert acted["maps"] == [expected, expected]


def test_no_other_script_runs(acted):
    assert acted["title"].startswith("Swift: ")
