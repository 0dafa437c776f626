"""Tables for a terminal that show every value, however narrow the terminal is."""

import textwrap
from collections.abc import Collection, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from swift.errors import printable

_HEADING_WIDTH = 10
_LEAST_TEXT = 8
"""Minimum width, in terminal columns, at which a text broken into lines is still readable."""


class TerminalTable:
    """A table whose numbers are never truncated or wrapped; control characters in cells are escaped.

    If the terminal is too narrow for the columns, each row is printed as a list with one line per cell.

    Args:
        headings: headings of the columns.
        texts: headings of the text columns, whose cells may be wrapped; the other columns hold numbers.
    """

    def __init__(self, headings: Sequence[str], texts: Collection[str] = ()):
        self._headings, self._texts = [*map(printable, headings)], {*map(printable, texts)}
        self._rows: list[list[str]] = []

    def add_row(self, *cells: str) -> None:
        """Adds a row, with a cell for each column."""
        self._rows.append([*map(printable, cells)])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wrapped = [*map(self._wrapped, range(len(self._headings)))]
        for headings, padding in ((self._headings, 1), (wrapped, 1), (wrapped, 0)):
            if self._least_width(headings, padding) <= options.max_width:
                yield self._table(headings, padding)
                return
        for row in self._rows:
            yield Text()
            for name, cell in zip(self._headings, row, strict=True):
                yield Text(f"{name}: {cell}", overflow="fold", no_wrap=False)

    def _width(self, column: int) -> int:
        return max((cell_len(row[column]) for row in self._rows), default=0)

    def _wrapped(self, column: int) -> str:
        """Wraps a heading to the width of the cells below it, or to ``_HEADING_WIDTH`` if they are narrower."""
        return "\n".join(textwrap.wrap(self._headings[column], max(_HEADING_WIDTH, self._width(column))))

    def _least_width(self, headings: Sequence[str], padding: int) -> int:
        """Returns the table's width if its texts are wrapped to the minimum readable width."""
        edges = 2 * padding * len(headings) + len(headings) + 1
        widths = [max(self._width(at), *map(cell_len, lines.split("\n"))) for at, lines in enumerate(headings)]
        named = zip(self._headings, widths, strict=True)
        return edges + sum(min(width, _LEAST_TEXT) if name in self._texts else width for name, width in named)

    def _table(self, headings: Sequence[str], padding: int) -> Table:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, padding))
        for name, lines in zip(self._headings, headings, strict=True):
            is_text = name in self._texts
            table.add_column(
                Text(lines),
                justify="left" if is_text else "right",
                overflow="fold",
                no_wrap=not is_text,
                vertical="bottom",
            )
        for row in self._rows:
            table.add_row(*map(Text, row))
        return table
