"""Self-contained HTML page about one or more runs, which loads nothing from elsewhere.

Its script redraws the charts of all runs as the reader chooses; without it they are static pictures. The page allows
only this script, by its digest, so that nothing in a run's files can be executed as one.
"""

import html
from base64 import b64encode
from collections.abc import Iterator, Sequence
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from swift.errors import printable
from swift.files import replace_file
from swift.runlog.metrics import ranges_text
from swift.runlog.reading import Run
from swift.tools.palette import GRID, GROUND, INK, MOMENT_COLORS, style, variable
from swift.tools.report.chart_data import page_data
from swift.tools.report.compare import COLUMNS, cells, comparison_rows
from swift.tools.report.figures import sections_of, sections_of_all
from swift.tools.report.html_parts import TABLE_KINDS, link, section_html, swatch, table_html
from swift.tools.report.sections.layers import LayerMaps
from swift.tools.report.sections.parts import Section, Table
from swift.tools.report.seeds import NOTE, SeedGroup, seed_groups, seeds_table
from swift.tools.report.together import RunStyle, run_styles

MAX_EVENTS = 1000
MAX_PARTS = 20
"""Largest number of runs of which a page has a part each, whose pictures take seconds to draw and megabytes."""
HELP = (
    "Point at a chart for its values (smoothed in brackets), drag to zoom, double-click for the whole. "
    "Keys in a chart: \N{LEFTWARDS ARROW} \N{RIGHTWARDS ARROW} + - 0, in the maps of a layer also \N{UPWARDS ARROW} "
    "\N{DOWNWARDS ARROW}."
)

MANY = (
    f'<p class="note">With more than {MAX_PARTS} runs a page has what they have in common. The experts, failures, '
    "schedules, checkpoints, events and settings of one run are in its own: <code>swift report RUN_DIR</code></p>"
)

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; \
script-src 'sha256-{digest}'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def write_report(runs: Sequence[Run], path: str | Path) -> None:
    """Writes the page: a table of all runs, the charts of all runs, and then, unless they are many, each run by itself.

    Args:
        runs: runs to show, at least one; each has the same colour in every picture.
        path: path of the file; its directory must exist.

    Raises:
        SettingError: the record of a run is damaged.
    """
    styles, groups = run_styles(runs), seed_groups(runs)
    has_parts = len(runs) <= MAX_PARTS
    title = "Swift: " + (html.escape(", ".join(one.label for one in styles)) if has_parts else f"{len(runs)} runs")
    together, spending, *answers = sections_of_all(runs)
    charts = {picture.name: picture.chart for picture in together.pictures if picture.chart is not None}
    maps: dict[str, LayerMaps] = {}
    parts = [
        f"<header><h1>{title}</h1>{_contents(styles if has_parts else [], has_answers=bool(answers))}</header>",
        "<main>",
        f'<div id="runs"><h2 class="unseen">All runs together</h2>{_comparison(runs, styles)}</div>',
        _seeds(runs, styles, groups),
        _controls(styles, has_seeds=bool(groups)),
        section_html(together, "charts"),
        section_html(spending, "time"),
        *(section_html(one, "answers") for one in answers),
        MANY * (not has_parts),
    ]
    for index, run in enumerate(runs if has_parts else []):  # one after the other: figures are large
        sections = sections_of(run, index)
        pictures = [picture for section in sections for picture in section.pictures]
        maps |= {picture.name: picture.maps for picture in pictures if picture.maps is not None}
        parts += _run(run, index, styles[index], sections)
    parts.append("</main>")
    script = "".join(_asset(name) for name in ("chart.js", "page.js", "maps.js"))
    page = PAGE.format(
        title=title,
        style=_style(),
        body="\n".join(parts),
        data=page_data(runs, styles, charts, maps),
        script=script,
        digest=b64encode(sha256(script.encode()).digest()).decode(),
    )
    replace_file(Path(path), page.encode())


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _style() -> str:
    names = {"ink": INK, "card": GROUND, "grid": GRID, "failure": MOMENT_COLORS["failure"]}
    own = " ".join(f"--{name}: var({variable(color)});" for name, color in names.items())
    stacked = Template(_asset("stacked.css"))
    lists = "".join(stacked.substitute(kind=kind.name, rem=kind.least_rem) for kind in TABLE_KINDS)
    return f"\n{style()}:root {{ {own} }}\n{_asset('page.css')}{lists}"


def _contents(styles: Sequence[RunStyle], *, has_answers: bool) -> str:
    """Formats links to the parts of the page."""
    links = [link("runs", "all runs"), link("charts", "charts"), link("time", "where the time went")]
    links += [link("answers", "answers to tasks")] * has_answers
    links += [swatch(one.color) + link(f"run{index}", one.label) for index, one in enumerate(styles, start=1)]
    return f'<nav aria-label="Parts of the page">{"".join(f"<span>{one}</span>" for one in links)}</nav>'


def _controls(styles: Sequence[RunStyle], *, has_seeds: bool) -> str:
    """Formats the controls of the charts, hidden until the script runs."""
    boxes = "".join(
        f'<label><input type="checkbox" name="run" value="{index}" autocomplete="off" checked>'
        f"{swatch(one.color)}{html.escape(one.label)}</label>"
        for index, one in enumerate(styles)
    )
    if len(styles) > MAX_PARTS:
        boxes = (
            f'<div class="runs" tabindex="0" role="group" aria-label="Runs that are shown">{boxes}</div>'
            '<button type="button" name="none">no run</button><button type="button" name="all">all runs</button>'
        )
    seeds = '<label><input type="checkbox" name="apart" autocomplete="off">seeds apart</label>' * has_seeds
    axes = "".join(f'<option value="{name}">{name}</option>' for name in ("step", "tokens", "time"))
    return (
        f'<div id="controls" role="group" aria-label="What the charts show" hidden>{boxes}{seeds}'
        f'<label>over <select name="axis" autocomplete="off">{axes}</select></label>'
        '<label>smoothing <input type="range" name="smoothing" min="0" max="30" value="5" autocomplete="off"></label>'
        '<button type="button" name="whole" disabled>whole range</button>'
        f'<p class="faint" id="help">{HELP}</p><span id="told" class="unseen" aria-live="polite"></span></div>'
    )


def _comparison(runs: Sequence[Run], styles: Sequence[RunStyle]) -> str:
    rows = [cells(row) for row in comparison_rows(runs)]
    table = Table([heading for heading, _ in COLUMNS.values()], rows, num_text=2)
    return table_html(table, "all runs", [swatch(one.color) for one in styles])


def _seeds(runs: Sequence[Run], styles: Sequence[RunStyle], groups: Sequence[SeedGroup]) -> str:
    """Formats the table of runs that differ in their seed alone, if there are any."""
    if not groups:
        return ""
    marks = [swatch(styles[group.members[0]].color) for group in groups]
    table = table_html(seeds_table(runs, groups), "over seeds", marks)
    return f'<section id="seeds"><h3>Over seeds</h3>{table}<p class="note">{NOTE}</p></section>'


def _run(run: Run, index: int, style: RunStyle, sections: Sequence[Section]) -> Iterator[str]:
    """Yields the part on one run: its facts, links to its sections, the sections, events and settings."""
    name = f"run{index + 1}"
    yield f'<h2 id="{name}">{swatch(style.color)}{html.escape(style.label)}</h2>'
    yield _facts(run)
    links = [link(f"{name}.{number}", section.title) for number, section in enumerate(sections)]
    links += [link(f"{name}.events", "Events")] * bool(run.events) + [link(f"{name}.config", "Settings")]
    yield f'<nav aria-label="Sections on the run">{"".join(links)}{link("charts", "All runs together")}</nav>'
    for number, section in enumerate(sections):
        yield section_html(section, f"{name}.{number}")
    yield _events(run, f"{name}.events")
    text = html.escape(run.config_text)
    yield f'<details id="{name}.config"><summary>config.gin</summary><pre tabindex="0">{text}</pre></details>'


def _facts(run: Run) -> str:
    """Formats the run's facts in a line: pipelines, stages, layout, device, steps, JAX version, directory."""
    summary: dict[str, Any] = run.summary or {}
    names = ("pipelines", "stages", "layout", "device")
    facts = [f"{name}: {summary[name]}" for name in names if summary.get(name) is not None]
    last_step = run.metrics.last_step
    facts.append(f"{last_step:,} steps" if run.summary else f"{last_step:,} steps, not ended")
    if missing := run.metrics.missing:
        facts.append(f"no record of {ranges_text(missing)}")
    if summary.get("jax_version"):
        facts.append(f"JAX {summary['jax_version']}")
    return f'<p class="faint">{html.escape(printable(", ".join([*facts, str(run.path)])))}</p>'


def _events(run: Run, name: str) -> str:
    if not run.events:
        return ""
    rows = [[*(str(event.get(key, "-")) for key in ("time", "event", "step")), _more(event)] for event in run.events]
    table = table_html(Table(["time", "event", "step", "more"], rows[-MAX_EVENTS:], num_text=4), "events")
    which = f", the last {MAX_EVENTS:,}" * (len(rows) > MAX_EVENTS)
    return f'<details id="{name}"><summary>events ({len(rows):,}{which})</summary>{table}</details>'


def _more(event: dict[str, Any]) -> str:
    """Formats the other fields of an event; a plan has a picture of its own."""

    def fields() -> Iterator[str]:
        for key, value in event.items():
            if key not in ("time", "event", "step"):
                text = "drawn above" if key == "plan" else str(value)
                yield f"{key}: {text if len(text) <= 200 else text[:199] + chr(0x2026)}"

    return ", ".join(fields())
