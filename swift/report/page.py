"""Self-contained HTML page about one or more runs, which loads no external resources.

Its script redraws the charts of all runs according to the reader's choices, from data in the page. Without the script,
the charts are static pictures: inline SVG in the page's colors, with text that can be selected and read aloud. The
content security policy permits only this script, identified by its digest, so nothing in a run's files can run as a
script. All text is escaped in this module and nowhere else.

Shape suffixes: T steps, N runs, B bins of steps.
"""

import html
import io
import json
import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from swift.draw.charts import Band, Chart, Curve, LayerMaps, bins_of, points_of_a_line
from swift.draw.style import GRID, GROUND, INK, MOMENT_COLORS, ON_DARK, style, variable
from swift.errors import printable
from swift.files import replace_file
from swift.report.compare import (
    COLUMNS,
    NOTE,
    RunStyle,
    SeedGroup,
    cells,
    comparison_rows,
    run_styles,
    seed_groups,
    seeds_table,
)
from swift.report.figures import sections_of, sections_of_all
from swift.report.history import history_of
from swift.report.parts import Picture, Section, Table
from swift.runlog.files import ranges_text
from swift.runlog.reading import Run, ratio, scalars

_COLOR = re.compile("|".join(ON_DARK))
_NUMBER = re.compile(r"(-?\d+\.\d\d)\d+")
_ID = re.compile(r'(\bid="|\bclip-path="url\(#|fill: url\(#|\bhref="#)')

_NO_BREAK = "\N{NO-BREAK SPACE}"
_NUM_OPEN = 7
"""Number of a section's pictures that are visible initially; the others are collapsed."""

_NUM_BINS = 1000
"""Maximum number of points in a line if there are few runs; in longer runs, a point is the mean of several steps."""
_DIGITS = 6
_DASHES = {"-": "", "--": "7 4", ":": "2 3", "-.": "8 3 2 3"}

_Axes = Mapping[str, np.ndarray]
"""Positions of a run's steps on each axis that its record supports: ``step``, ``tokens``, ``time`` in seconds."""

_MAX_EVENTS = 1000
_MAX_PARTS = 20
"""Maximum number of runs that get their own part; a part takes seconds to draw and adds megabytes to the page."""
_HELP = (
    "Point at a chart for its values (smoothed in brackets), drag to zoom, double-click for the whole. "
    "Keys in a chart: \N{LEFTWARDS ARROW} \N{RIGHTWARDS ARROW} + - 0, in the maps of a layer also \N{UPWARDS ARROW} "
    "\N{DOWNWARDS ARROW}."
)

_MANY = (
    f'<p class="note">With more than {_MAX_PARTS} runs a page has what they have in common. The experts, failures, '
    "schedules, checkpoints, events and settings of one run are in its own: <code>swift report RUN_DIR</code></p>"
)

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; \
script-src {scripts}{connect}">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
<script type="application/json" id="data">{data}</script>
<script>{script}</script>{more}
</body>
</html>
"""


def write_report(runs: Sequence[Run], path: str | Path) -> None:
    """Writes the page that ``report_page`` makes.

    Args:
        runs: runs to show, at least one.
        path: path of the file; its directory must exist.

    Raises:
        SettingError: a run's record is damaged.
    """
    replace_file(Path(path), report_page(runs).encode())


def report_page(runs: Sequence[Run], server_script: str = "") -> str:
    """Makes the page: a table and charts of all runs together, then a part on each run unless there are many.

    Args:
        runs: runs to show, at least one; each has the same color in every picture.
        server_script: script of a server that serves the page; it may send requests to that server. Empty for a page
            that needs no server.

    Raises:
        SettingError: a run's record is damaged.
    """
    styles, groups = run_styles(runs), seed_groups(runs)
    has_parts = len(runs) <= _MAX_PARTS
    title = "Swift: " + (html.escape(", ".join(style.label for style in styles)) if has_parts else f"{len(runs)} runs")
    together, spending, *answers = sections_of_all(runs)
    charts = {picture.name: picture.chart for picture in together.pictures if picture.chart is not None}
    maps: dict[str, LayerMaps] = {}
    parts = [
        f"<header><h1>{title}</h1>{_contents(styles if has_parts else [], has_answers=bool(answers))}</header>",
        "<main>",
        f'<div id="runs"><h2 class="unseen">All runs together</h2>{_comparison(runs, styles)}</div>',
        _seeds(runs, styles, groups),
        _controls(styles, has_seeds=bool(groups)),
        _section_html(together, "charts"),
        _section_html(spending, "time"),
        *(_section_html(section, "answers") for section in answers),
        _MANY * (not has_parts),
    ]
    for index, run in enumerate(runs if has_parts else []):  # one at a time, since figures use a lot of memory
        sections = sections_of(run, index)
        pictures = [picture for section in sections for picture in section.pictures]
        maps |= {picture.name: picture.maps for picture in pictures if picture.maps is not None}
        parts += _run(run, index, styles[index], sections)
    parts.append("</main>")
    script = "".join(_asset(name) for name in ("chart.js", "page.js", "maps.js"))
    return _PAGE.format(
        title=title,
        style=_style(),
        body="\n".join(parts),
        data=_page_data(runs, styles, charts, maps),
        script=script,
        scripts=" ".join(map(script_source, filter(None, (script, server_script)))),
        connect="; connect-src 'self'" if server_script else "",
        more=f"\n<script>{server_script}</script>" if server_script else "",
    )


def script_source(script: str) -> str:
    """Returns the expression with which a content security policy permits a script of a page."""
    return f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _style() -> str:
    names = {"ink": INK, "card": GROUND, "grid": GRID, "failure": MOMENT_COLORS["failure"]}
    variables = " ".join(f"--{name}: var({variable(color)});" for name, color in names.items())
    stacked = Template(_asset("stacked.css"))
    lists = "".join(stacked.substitute(kind=kind.name, rem=kind.least_rem) for kind in _TABLE_KINDS)
    return f"\n{style()}:root {{ {variables} }}\n{_asset('page.css')}{lists}"


def _contents(styles: Sequence[RunStyle], *, has_answers: bool) -> str:
    """Formats links to the page's parts."""
    links = [_link("runs", "all runs"), _link("charts", "charts"), _link("time", "where the time went")]
    links += [_link("answers", "answers to tasks")] * has_answers
    links += [_swatch(style.color) + _link(f"run{index}", style.label) for index, style in enumerate(styles, start=1)]
    return f'<nav aria-label="Parts of the page">{"".join(f"<span>{link}</span>" for link in links)}</nav>'


def _controls(styles: Sequence[RunStyle], *, has_seeds: bool) -> str:
    """Formats the charts' controls, which stay hidden until the script runs."""
    boxes = "".join(
        f'<label><input type="checkbox" name="run" value="{index}" autocomplete="off" checked>'
        f"{_swatch(style.color)}{html.escape(style.label)}</label>"
        for index, style in enumerate(styles)
    )
    if len(styles) > _MAX_PARTS:
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
        f'<p class="faint" id="help">{_HELP}</p><span id="told" class="unseen" aria-live="polite"></span></div>'
    )


def _comparison(runs: Sequence[Run], styles: Sequence[RunStyle]) -> str:
    rows = [cells(row) for row in comparison_rows(runs)]
    table = Table([heading for heading, _ in COLUMNS.values()], rows, num_text=2)
    return _table_html(table, "all runs", [_swatch(style.color) for style in styles])


def _seeds(runs: Sequence[Run], styles: Sequence[RunStyle], groups: Sequence[SeedGroup]) -> str:
    """Formats the table of seed groups, or an empty text if there are none."""
    if not groups:
        return ""
    marks = [_swatch(styles[group.members[0]].color) for group in groups]
    table = _table_html(seeds_table(runs, groups), "over seeds", marks)
    return f'<section id="seeds"><h3>Over seeds</h3>{table}<p class="note">{NOTE}</p></section>'


def _run(run: Run, index: int, style: RunStyle, sections: Sequence[Section]) -> Iterator[str]:
    """Yields the HTML of the part on one run: facts, links to its sections, the sections, events and settings."""
    name = f"run{index + 1}"
    yield f'<h2 id="{name}">{_swatch(style.color)}{html.escape(style.label)}</h2>'
    yield _facts(run)
    links = [_link(f"{name}.{number}", section.title) for number, section in enumerate(sections)]
    links += [_link(f"{name}.events", "Events")] * bool(run.events) + [_link(f"{name}.config", "Settings")]
    yield f'<nav aria-label="Sections on the run">{"".join(links)}{_link("charts", "All runs together")}</nav>'
    for number, section in enumerate(sections):
        yield _section_html(section, f"{name}.{number}")
    yield _events(run, f"{name}.events")
    text = html.escape(run.config_text)
    yield f'<details id="{name}.config"><summary>config.gin</summary><pre tabindex="0">{text}</pre></details>'


def _facts(run: Run) -> str:
    """Formats a run's facts as one line: pipelines, stages, layout, device, steps, JAX version and directory."""
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
    table = _table_html(Table(["time", "event", "step", "more"], rows[-_MAX_EVENTS:], num_text=4), "events")
    which = f", the last {_MAX_EVENTS:,}" * (len(rows) > _MAX_EVENTS)
    return f'<details id="{name}"><summary>events ({len(rows):,}{which})</summary>{table}</details>'


def _more(event: dict[str, Any]) -> str:
    """Formats an event's other fields; a plan is not shown as text, since it is drawn as a picture."""

    def fields() -> Iterator[str]:
        for key, value in event.items():
            if key not in ("time", "event", "step"):
                text = "drawn above" if key == "plan" else str(value)
                yield f"{key}: {text if len(text) <= 200 else text[:199] + chr(0x2026)}"

    return ", ".join(fields())


def _inline_svg(figure: Figure, name: str, caption: str) -> str:
    """Renders a figure as an ``svg`` element.

    Args:
        figure: figure in the palette's colors.
        name: prefix for ids, unique in the page; may contain letters, digits and ``-_.``.
        caption: text alternative for the picture.
    """
    file = io.StringIO()
    # "none" keeps text as text. Without a salt, ids would be random; without Date = None, the file would contain the
    # current time.
    with rc_context({"svg.hashsalt": "swift", "svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    view = re.search(r'viewBox="([^"]+)"', text)
    assert view is not None, "not an SVG of Matplotlib"
    body = text[text.index(">", text.index("<svg")) + 1 : text.rindex("</svg>")]
    body = re.sub(r"<(metadata|style)\b.*?</\1>|<!--.*?-->", "", body, flags=re.DOTALL).replace("xlink:href", "href")
    body = _COLOR.sub(lambda color: f"var({variable(color[0])})", body)
    body = re.sub(r"font-family: [^;\"]*;? ?", "", body)  # the page sets the font
    body = re.sub(r' transform="rotate\(-?0 [^"]*"', "", body)
    # Matplotlib uses the same ids in every figure, so ids and their references need a prefix to be unique in the page.
    body = _ID.sub(lambda match: match[0] + f"{name}.", body)
    # Two decimals are precise enough for coordinates in points, and make the page smaller.
    body = re.sub(r' (?:d|x|y|transform|points)="[^"]*"', lambda match: _NUMBER.sub(r"\1", match[0]), body)
    body = re.sub(r"\n\s*", "\n", body).strip()
    # The view box is in points; in CSS, 3 points are 4 pixels.
    box = f'viewBox="{view[1]}" style="--natural: {float(view[1].split()[2]) * 4 / 3:.0f}px"'
    title = f"<title>{html.escape(caption)}</title>"
    return f'<svg {box} role="img" aria-label="{html.escape(caption)}">{title}{body}</svg>'


class _TableKind(NamedTuple):
    """The CSS class for tables with a certain number of columns.

    Attributes:
        name: CSS class.
        most_columns: maximum number of columns.
        least_rem: page width in rem below which the table is shown as a list.
    """

    name: str
    most_columns: int
    least_rem: int


_TABLE_KINDS = (
    _TableKind("few", 4, 24),
    _TableKind("some", 6, 32),
    _TableKind("many", 8, 42),
    _TableKind("most", 99, 62),
)
"""All kinds of tables, in ascending order of their number of columns."""


def _section_html(section: Section, name: str) -> str:
    """Formats a section, which has ``name`` as its id."""
    parts = [f"<h3>{html.escape(section.title)}</h3>"] if section.title else []
    tables = [_table_html(table, section.title) for table in section.tables]
    shown, folded = [*section.pictures[:_NUM_OPEN]], section.pictures[_NUM_OPEN:]
    if tables and shown and not shown[0].is_wide:
        # Put the first picture next to the tables, and the other pictures below.
        first = [_picture(shown.pop(0)), *tables]
        tables = []
        if len(shown) == 1:
            first = [f'<div class="stack">{"".join(first)}</div>', _picture(shown.pop())]
        parts.append(_cards(first))
    parts.append(_pictures(shown))
    if folded:
        parts.append(f"<details><summary>{len(folded)} more pictures</summary>{_pictures(folded)}</details>")
    parts.append(_cards(tables))
    if section.note:
        parts.append(f'<p class="note">{html.escape(section.note)}</p>')
    return f'<section id="{name}">{"".join(parts)}</section>'


def _table_html(table: Table, name: str, marks: Sequence[str] = ()) -> str:
    """Formats a table as a card.

    Args:
        table: table to format.
        name: accessible name, for screen readers.
        marks: HTML to put before the text in each row's first column.
    """

    def cell(column: int, text: str, mark: str = "") -> str:
        kind = ' class="text"' if column < table.num_text else ""
        heading = html.escape(table.headings[column])
        if column >= table.num_text:  # keep a number on one line; brackets after it may wrap
            text = text.replace(" ", _NO_BREAK).replace(f"{_NO_BREAK}(", " (")
        return f'<td{kind} data-heading="{heading}"><span>{mark}{html.escape(text)}</span></td>'

    head = "".join(
        f'<th scope="col"{" class=text" * (column < table.num_text)}>{html.escape(text)}</th>'
        for column, text in enumerate(table.headings)
    )
    rows = [
        "".join(cell(column, text, "" if column else mark) for column, text in enumerate(row))
        for row, mark in zip(table.rows, marks or [""] * len(table.rows), strict=True)
    ]
    kind = next(kind.name for kind in _TABLE_KINDS if len(table.headings) <= kind.most_columns)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f'<div class="card {kind}"><div class="wide" tabindex="0" role="group" aria-label="table: {html.escape(name)}">'
        f"<table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div></div>"
    )


def _swatch(color: str) -> str:
    """Formats a small square in one of the palette's colors."""
    return f'<span class="swatch" style="background:var({variable(color)})"></span>'


def _link(name: str, text: str) -> str:
    """Formats a link to an element of the page."""
    return f'<a href="#{name}">{html.escape(text)}</a>'


def _cards(cards: Sequence[str], kind: str = "cards") -> str:
    return f'<div class="{kind}">{"".join(cards)}</div>' if cards else ""


def _pictures(pictures: Sequence[Picture]) -> str:
    # In rows of three, the fourth card would be alone.
    return _cards([*map(_picture, pictures)], "cards by-two" if len(pictures) == 4 else "cards")


def _picture(picture: Picture) -> str:
    kind = ' class="alone"' if picture.is_wide else ""
    chart = f' data-chart="{picture.name}"' if picture.chart is not None else ""
    if picture.maps is not None:
        chart = f' data-maps="{picture.name}"'
    svg = _inline_svg(picture.figure, picture.name, picture.caption)
    caption = html.escape(picture.caption)
    # A scrolling box must be focusable, so that the keyboard can scroll it.
    scrolls = f' tabindex="0" role="group" aria-label="{caption}"' * picture.is_wide
    return f'<figure{kind}{chart}><div class="frame"{scrolls}>{svg}</div><figcaption>{caption}</figcaption></figure>'


def _page_data(
    runs: Sequence[Run], styles: Sequence[RunStyle], charts: Mapping[str, Chart], maps: Mapping[str, LayerMaps]
) -> str:
    """Serializes the script's data as JSON, without characters that are special in HTML.

    Returns:
        A JSON object with these members:

        - ``runs``: for each run, its ``label``, ``color`` (a CSS variable), ``dash``, and ``x``, the positions of its
          points by axis.
        - ``charts``, by picture name: ``ylabel``, ``top``, ``fromZero``, ``exact``, ``levels``; ``lines``, each with
          its ``run``, and ``mean``, ``low`` and ``high`` of each point (the latter two only if a point represents
          several steps); ``rings``, each with its ``run``, positions ``x`` by axis and ``values``; ``marks``, each with
          its ``run`` and positions ``x`` by axis; ``bands`` and ``ringBands``, groups of seeds, each with its
          ``name``, ``color`` and ``dash``, positions ``x`` by axis, and ``members``, each with its ``run`` and its
          points as ``mean``.
        - ``maps``, by picture name: the first and the last of ``steps``; the number of drawn ``bins``, and the number
          of consecutive bins that are ``merged``; ``tokens`` and ``replicas`` by bin and expert, in tenths of a
          percent.
    """
    axes, num_bins = [_axes(run) for run in runs], points_of_a_line(len(runs), _NUM_BINS)
    document = {
        "runs": [
            {
                "label": style.label,
                "color": variable(style.color),
                "dash": _DASHES[style.line],
                "x": {name: _numbers(_binned(at_T, num_bins)[0]) for name, at_T in axes_of_run.items()},
            }
            for style, axes_of_run in zip(styles, axes, strict=True)
        ],
        "charts": {name: _chart(chart, axes, num_bins) for name, chart in charts.items()},
        "maps": {name: _maps(layer_maps) for name, layer_maps in maps.items()},
    }
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _axes(run: Run) -> _Axes:
    steps_T, tokens_T = run.metrics.steps_T.astype(float), scalars(run, "tokens")
    axes = {"step": steps_T}
    if tokens_T.size and np.isfinite(tokens_T).all():
        # Steps without a record are assumed to have trained as many tokens as the next recorded one.
        axes["tokens"] = np.cumsum(tokens_T * np.diff(steps_T, prepend=0.0))
    seconds_T = history_of(run).step_s_T
    if seconds_T.size and np.isfinite(seconds_T).all():
        axes["time"] = seconds_T
    return axes


def _chart(chart: Chart, axes: Sequence[_Axes], num_bins: int) -> dict[str, Any]:
    def points(values_T: np.ndarray) -> np.ndarray:
        return _binned(values_T, num_bins)[0]

    return {
        "ylabel": chart.ylabel,
        "top": chart.top,
        "fromZero": chart.from_zero,
        "exact": chart.is_exact,
        "levels": [*chart.levels],
        "lines": [_line(curve, num_bins) for curve in chart.curves],
        "bands": [_band(band, axes, binned=points) for band in chart.bands],
        "rings": [_ring(curve, axes[curve.index]) for curve in chart.rings],
        "ringBands": [_band(band, axes, binned=np.asarray) for band in map(_known, chart.ring_bands)],
        "marks": [{"run": 0, "x": _at(axes[0], np.searchsorted(axes[0]["step"], chart.marks))}] if chart.marks else [],
    }


def _maps(maps: LayerMaps) -> dict[str, Any]:
    def tenths(shares_BE: np.ndarray) -> list[list[int | None]]:
        return [
            [round(10 * share) if np.isfinite(share) else None for share in shares_E] for shares_E in shares_BE.tolist()
        ]

    steps = [maps.first_step, maps.last_step]
    bins = {"bins": maps.num_bins, "merged": maps.num_merged}
    return {"steps": steps, **bins, "tokens": tenths(maps.tokens_BE), "replicas": tenths(maps.replicas_BE)}


def _line(curve: Curve, num_bins: int) -> dict[str, Any]:
    mean_B, low_B, high_B = _binned(curve.values_T, num_bins)
    line: dict[str, Any] = {"run": curve.index, "mean": _numbers(mean_B)}
    return line | ({"low": _numbers(low_B), "high": _numbers(high_B)} if len(mean_B) < len(curve.values_T) else {})


def _band(band: Band, axes: Sequence[_Axes], binned: Callable[[np.ndarray], np.ndarray]) -> dict[str, Any]:
    """Serializes a band; a step's position on an axis is the mean of its positions in the group's runs."""
    member_axes = [axes[index] for index in band.members]
    names = [name for name in member_axes[0] if all(name in member for member in member_axes)]
    x = {}
    for name in names:
        at_NT = [member[name][np.isin(member["step"], band.steps_T)] for member in member_axes]
        x[name] = _numbers(binned(np.mean(at_NT, axis=0)))
    members = [
        {"run": index, "mean": _numbers(binned(values_T))}
        for index, values_T in zip(band.members, band.values_NT, strict=True)
    ]
    return {"name": band.name, "color": variable(band.color), "dash": _DASHES[band.style], "x": x, "members": members}


def _known(band: Band) -> Band:
    """Restricts a band to the steps at which every run has a value, since rings exist only at some steps."""
    is_known_T = np.isfinite(band.values_NT).all(axis=0)
    return replace(band, steps_T=band.steps_T[is_known_T], values_NT=band.values_NT[:, is_known_T])


def _ring(curve: Curve, axes: _Axes) -> dict[str, Any]:
    known = np.flatnonzero(np.isfinite(curve.values_T))
    return {"run": curve.index, "x": _at(axes, known), "values": _numbers(curve.values_T[known])}


def _at(axes: _Axes, indices: np.ndarray) -> dict[str, list[float | None]]:
    """Returns the positions of the steps at these indices on each axis; steps after the last one get its position."""
    return {name: _numbers(at_T[np.minimum(indices, len(at_T) - 1)]) for name, at_T in axes.items()}


def _binned(values_T: np.ndarray, num_bins: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Computes the mean, minimum and maximum of each bin's known values, float64[B]; NaN for bins without any."""
    if not values_T.size:
        return values_T, values_T, values_T
    bin_T, known_T = bins_of(len(values_T), num_bins), np.isfinite(values_T)
    starts = np.searchsorted(bin_T, np.arange(bin_T[-1] + 1))
    sums_B = np.add.reduceat(np.where(known_T, values_T, 0.0), starts)
    mean_B = ratio(sums_B, np.add.reduceat(known_T.astype(float), starts))
    return mean_B, np.fmin.reduceat(values_T, starts), np.fmax.reduceat(values_T, starts)


def _numbers(values: np.ndarray) -> list[float | None]:
    return [float(f"{value:.{_DIGITS}g}") if np.isfinite(value) else None for value in values.tolist()]
