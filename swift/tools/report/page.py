"""Self-contained HTML page about one or more runs, which loads nothing from elsewhere."""

import html
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from swift.files import replace_file
from swift.runlog import Run, ranges_text
from swift.tools.report.compare import COLUMNS, cells, comparison_rows, run_labels
from swift.tools.report.figures import run_color, sections_of, sections_of_all
from swift.tools.report.inline import inline_svg
from swift.tools.report.sections import GROUND, INK, Picture, Section, Table, style, variable

NUM_OPEN = 5
"""Number of a section's pictures that are shown directly; the others are folded."""
MAX_EVENTS = 1000

STYLE = f"""
{style()}
:root {{ color-scheme: light dark; --ground: #ffffff; --ink: var({variable(INK)}); --faint: #666662; --line: #dcdcd6;
  --card: var({variable(GROUND)}); }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ground: #16181b; --faint: #a3a39e; --line: #3a3d42; }}
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; padding: 1rem; max-width: 84rem; background: var(--ground); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; -webkit-text-size-adjust: 100%; }}
h1 {{ font-size: 1.5rem; margin: .5rem 0; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.25rem; margin: 2.5rem 0 .25rem; padding-top: 1rem; border-top: 1px solid var(--line);
  overflow-wrap: anywhere; }}
h3 {{ font-size: 1.05rem; margin: 1.75rem 0 .5rem; }}
.swatch {{ display: inline-block; width: .8em; height: .8em; border-radius: .2em; margin-right: .4em; }}
.faint, figcaption, .note {{ color: var(--faint); font-size: .9rem; overflow-wrap: anywhere; }}
.note {{ margin: .3rem 0; max-width: 60rem; }}
.wide {{ overflow-x: auto; margin-bottom: .75rem; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }}
th, td {{ padding: .35rem .9rem .35rem 0; border-bottom: 1px solid var(--line); text-align: right; }}
th {{ vertical-align: bottom; font-weight: 600; min-width: 4rem; }}
td {{ white-space: nowrap; }}
.text {{ text-align: left; }}
.pictures {{ display: grid; gap: 1.25rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr));
  align-items: start; margin-bottom: 1rem; }}
figure {{ margin: 0; max-width: 34rem; min-width: 0; }}
figure.alone {{ grid-column: 1 / -1; width: fit-content; max-width: 100%; }}
.frame {{ overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: .5rem;
  padding: .4rem; }}
svg {{ display: block; width: 100%; height: auto; }}
.alone svg {{ width: var(--natural); max-width: none; }}
svg * {{ stroke-linejoin: round; stroke-linecap: butt; }}
svg text {{ font-family: system-ui, sans-serif; fill: var(--ink); }}
svg image {{ image-rendering: pixelated; }}
figcaption {{ margin-top: .3rem; }}
details {{ margin-top: 1rem; }}
summary {{ cursor: pointer; }}
pre {{ overflow-x: auto; font-size: .8rem; }}
"""

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def write_report(runs: Sequence[Run], path: str | Path) -> None:
    """Writes the page: a table of all runs, the curves of all runs, and then each run by itself.

    Args:
        runs: runs to show, at least one; each has the same colour in every picture.
        path: path of the file; its directory must exist.

    Raises:
        SettingError: the record of a run is damaged.
    """
    labels = run_labels(runs)
    title = html.escape("Swift: " + ", ".join(labels))
    parts = [f"<h1>{title}</h1>", _comparison(runs), *map(_section, sections_of_all(runs))]
    for index, (run, label) in enumerate(zip(runs, labels, strict=True)):
        parts += [
            f"<h2>{_swatch(index)}{html.escape(label)}</h2>",
            _facts(run),
            *map(_section, sections_of(run, index)),
            _events(run),
            _config(run),
        ]
    page = PAGE.format(title=title, style=STYLE, body="\n".join(parts))
    replace_file(Path(path), page.encode())


def _comparison(runs: Sequence[Run]) -> str:
    rows = [cells(row) for row in comparison_rows(runs)]
    table = Table([heading for heading, _ in COLUMNS.values()], rows, num_text=2)
    return _table(table, [*map(_swatch, range(len(runs)))])


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
    return f'<p class="faint">{html.escape(", ".join([*facts, str(run.path)]))}</p>'


def _section(section: Section) -> str:
    parts = [f"<h3>{html.escape(section.title)}</h3>"] if section.title else []
    shown, folded = section.pictures[:NUM_OPEN], section.pictures[NUM_OPEN:]
    parts.append(_pictures(shown))
    if folded:
        parts.append(f"<details><summary>{len(folded)} more pictures</summary>{_pictures(folded)}</details>")
    parts += map(_table, section.tables)
    if section.note:
        parts.append(f'<p class="note">{html.escape(section.note)}</p>')
    return f"<section>{''.join(parts)}</section>"


def _pictures(pictures: Sequence[Picture]) -> str:
    return f'<div class="pictures">{"".join(map(_picture, pictures))}</div>' if pictures else ""


def _picture(picture: Picture) -> str:
    kind = ' class="alone"' if picture.is_wide else ""
    svg = inline_svg(picture.figure, picture.name, picture.caption)
    # Focusable, so that it can be scrolled by keyboard.
    frame = f'<div class="frame"{" tabindex=0" * picture.is_wide}>{svg}</div>'
    return f"<figure{kind}>{frame}<figcaption>{html.escape(picture.caption)}</figcaption></figure>"


def _events(run: Run) -> str:
    if not run.events:
        return ""
    rows = [[*(str(event.get(key, "-")) for key in ("time", "event", "step")), _more(event)] for event in run.events]
    table = _table(Table(["time", "event", "step", "more"], rows[-MAX_EVENTS:], num_text=4))
    which = f", the last {MAX_EVENTS:,}" * (len(rows) > MAX_EVENTS)
    return f"<details><summary>events ({len(rows):,}{which})</summary>{table}</details>"


def _more(event: dict[str, Any]) -> str:
    """Formats the other fields of an event, except those that have their own picture."""

    def fields() -> Iterator[str]:
        for key, value in event.items():
            if key not in ("time", "event", "step"):
                text = "drawn above" if key == "plan" else str(value)
                yield f"{key}: {text if len(text) <= 200 else text[:199] + chr(0x2026)}"

    return ", ".join(fields())


def _config(run: Run) -> str:
    return f"<details><summary>config.gin</summary><pre>{html.escape(run.config_text)}</pre></details>"


def _swatch(index: int) -> str:
    color = run_color(index)
    return f'<span class="swatch" style="background:var({variable(color)}, {color})"></span>'


def _table(table: Table, marks: Sequence[str] = ()) -> str:
    """Formats an HTML table in a scrollable box, with ``marks`` before the rows."""

    def cell(tag: str, column: int, text: str, mark: str = "") -> str:
        kind = ' class="text"' if column < table.num_text else ""
        return f"<{tag}{kind}>{mark}{html.escape(text)}</{tag}>"

    lines = ["".join(cell("th", column, text) for column, text in enumerate(table.headings))]
    for row, mark in zip(table.rows, marks or [""] * len(table.rows), strict=True):
        lines.append("".join(cell("td", column, text, "" if column else mark) for column, text in enumerate(row)))
    return f'<div class="wide" tabindex="0"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'
