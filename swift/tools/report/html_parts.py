"""Parts of a page as HTML: sections, pictures in cards, and tables. All text is escaped here, and nowhere else."""

import html
from collections.abc import Sequence
from typing import NamedTuple

from swift.tools.palette import variable
from swift.tools.report.inline import inline_svg
from swift.tools.report.sections.parts import Picture, Section, Table

_NO_BREAK = "\N{NO-BREAK SPACE}"
NUM_OPEN = 7
"""Number of a section's pictures that are shown at once; the others are folded away."""


class TableKind(NamedTuple):
    """A class of tables with a similar number of columns.

    Attributes:
        name: CSS class.
        most_columns: largest number of columns.
        least_rem: width of the page below which the table becomes a list, in rem.
    """

    name: str
    most_columns: int
    least_rem: int


TABLE_KINDS = (TableKind("few", 4, 24), TableKind("some", 6, 32), TableKind("many", 8, 42), TableKind("most", 99, 62))
"""All kinds of tables, the smallest first."""


def section_html(section: Section, name: str) -> str:
    """Formats a section, to which ``#name`` links."""
    parts = [f"<h3>{html.escape(section.title)}</h3>"] if section.title else []
    tables = [table_html(table, section.title) for table in section.tables]
    shown, folded = [*section.pictures[:NUM_OPEN]], section.pictures[NUM_OPEN:]
    if tables and shown and not shown[0].is_wide:
        # The first picture and the numbers stand beside each other, the other pictures below.
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


def table_html(table: Table, name: str, marks: Sequence[str] = ()) -> str:
    """Formats a table as a card.

    Args:
        table: table to format.
        name: name for readers who do not see where it stands.
        marks: HTML before each text of its first column.
    """

    def cell(column: int, text: str, mark: str = "") -> str:
        kind = ' class="text"' if column < table.num_text else ""
        heading = html.escape(table.headings[column])
        if column >= table.num_text:  # a number stays in one line; what is in brackets after it may be in the next
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
    kind = next(kind.name for kind in TABLE_KINDS if len(table.headings) <= kind.most_columns)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f'<div class="card {kind}"><div class="wide" tabindex="0" role="group" aria-label="table: {html.escape(name)}">'
        f"<table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div></div>"
    )


def swatch(color: str) -> str:
    """Formats a small square in a colour of the palette."""
    return f'<span class="swatch" style="background:var({variable(color)})"></span>'


def link(name: str, text: str) -> str:
    """Formats a link to a place of the page."""
    return f'<a href="#{name}">{html.escape(text)}</a>'


def _cards(cards: Sequence[str], kind: str = "cards") -> str:
    return f'<div class="{kind}">{"".join(cards)}</div>' if cards else ""


def _pictures(pictures: Sequence[Picture]) -> str:
    # Four in rows of three would leave one alone.
    return _cards([*map(_picture, pictures)], "cards by-two" if len(pictures) == 4 else "cards")


def _picture(picture: Picture) -> str:
    kind = ' class="alone"' if picture.is_wide else ""
    chart = f' data-chart="{picture.name}"' if picture.chart is not None else ""
    if picture.maps is not None:
        chart = f' data-maps="{picture.name}"'
    svg = inline_svg(picture.figure, picture.name, picture.caption)
    caption = html.escape(picture.caption)
    # Focusable, so that it can be scrolled by keyboard.
    scrolls = f' tabindex="0" role="group" aria-label="{caption}"' * picture.is_wide
    return f'<figure{kind}{chart}><div class="frame"{scrolls}>{svg}</div><figcaption>{caption}</figcaption></figure>'
