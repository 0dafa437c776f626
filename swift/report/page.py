"""One self-contained HTML page about one run or several: nothing in it is fetched from anywhere."""

import base64
import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from swift.files import replace_file
from swift.record import Run
from swift.report.compare import COLUMNS, cells, comparison_rows, run_labels
from swift.report.figures import Picture, draw_pictures, run_color

STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --ink: #222222; --faint: #6a6a66; --line: #dcdcd6;
  --card: #fdfdfb; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #16181b; --ink: #e6e6e3; --faint: #9c9c97; --line: #3a3d42; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 84rem; background: var(--ground); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: .5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; overflow-wrap: anywhere; }
.swatch { display: inline-block; width: .8em; height: .8em; border-radius: .2em; margin-right: .4em;
  border: 1px solid var(--card); }
.faint, figcaption { color: var(--faint); font-size: .9rem; }
.wide { overflow-x: auto; margin-bottom: 1.25rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--line); text-align: right; }
th { vertical-align: bottom; }
td { white-space: nowrap; }
.text { text-align: left; }
.pictures { display: grid; gap: 1.25rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
figure { margin: 0; max-width: 44rem; }
img { display: block; width: 100%; height: auto; background: var(--card); border-radius: .5rem; padding: .4rem; }
figcaption { margin-top: .3rem; }
details { margin-top: 1rem; }
pre { overflow-x: auto; font-size: .8rem; }
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
        runs: at least one; one colour each, in this order, in every picture.
        path: the file to write; its directory has to be there.

    Raises:
        SettingError: the metrics of a run are damaged.
    """
    pictures = list(draw_pictures(runs))
    labels = run_labels(runs)
    title = html.escape("Swift: " + ", ".join(labels))
    together = [picture for picture in pictures if picture.run_index is None]
    parts = [f"<h1>{title}</h1>", _comparison(runs), _pictures(together)]
    for index, (run, label) in enumerate(zip(runs, labels, strict=True)):
        own = [picture for picture in pictures if picture.run_index == index]
        parts += [
            f"<h2>{_swatch(index)}{html.escape(label)}</h2>",
            _facts(run),
            _pictures(own),
            _events(run),
            _config(run),
        ]
    page = PAGE.format(title=title, style=STYLE, body="\n".join(parts))
    replace_file(Path(path), page.encode())


def _comparison(runs: Sequence[Run]) -> str:
    rows = [cells(row) for row in comparison_rows(runs)]
    return _table(
        [heading for heading, _ in COLUMNS.values()], rows, num_text=2, marks=[*map(_swatch, range(len(runs)))]
    )


def _facts(run: Run) -> str:
    """What the run was, in a line: pipelines, stages, layout, device, steps, JAX version, directory."""
    summary: dict[str, Any] = run.summary or {}
    names = ("pipelines", "stages", "layout", "device")
    facts = [f"{name}: {summary[name]}" for name in names if summary.get(name) is not None]
    last_step = run.metrics[-1]["step"] if run.metrics else 0
    facts.append(f"{last_step:,} steps" if run.summary else f"{last_step:,} steps, not ended")
    if summary.get("jax_version"):
        facts.append(f"JAX {summary['jax_version']}")
    return f'<p class="faint">{html.escape(", ".join([*facts, str(run.path)]))}</p>'


def _pictures(pictures: Iterable[Picture]) -> str:
    figures = []
    for picture in pictures:
        source = f"data:image/png;base64,{base64.b64encode(picture.png).decode()}"
        caption = html.escape(picture.caption)
        figures.append(f'<figure><img src="{source}" alt="{caption}"><figcaption>{caption}</figcaption></figure>')
    return f'<div class="pictures">{"".join(figures)}</div>' if figures else ""


def _events(run: Run) -> str:
    if not run.events:
        return ""
    rows = []
    for event in run.events:
        more = ", ".join(f"{key}: {value}" for key, value in event.items() if key not in ("time", "event", "step"))
        rows.append([str(event.get(key, "-")) for key in ("time", "event", "step")] + [more])
    table = _table(["time", "event", "step", "more"], rows, num_text=4)
    return f"<details><summary>events ({len(rows):,})</summary>{table}</details>"


def _config(run: Run) -> str:
    return f"<details><summary>config.gin</summary><pre>{html.escape(run.config_text)}</pre></details>"


def _swatch(index: int) -> str:
    return f'<span class="swatch" style="background:{run_color(index)}"></span>'


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], num_text: int, marks: Sequence[str] = ()) -> str:
    """An HTML table; the first ``num_text`` columns are text, the others numbers; ``marks`` go before the rows."""

    def cell(tag: str, column: int, text: str, mark: str = "") -> str:
        kind = ' class="text"' if column < num_text else ""
        return f"<{tag}{kind}>{mark}{html.escape(text)}</{tag}>"

    lines = ["".join(cell("th", column, text) for column, text in enumerate(headings))]
    for row, mark in zip(rows, marks or [""] * len(rows), strict=True):
        lines.append("".join(cell("td", column, text, "" if column else mark) for column, text in enumerate(row)))
    return f'<div class="wide"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'
