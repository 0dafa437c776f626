"""Parts of a report: sections with pictures and tables."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from swift.draw.charts import Chart, LayerMaps
from swift.draw.style import figure_file


@dataclass(frozen=True)
class Picture:
    """A drawn figure, with data for a page that makes it interactive.

    Attributes:
        name: file name without suffix, unique among the pictures of a report.
        caption: description of the picture.
        figure: figure in the colors of ``swift.draw.style``.
        is_wide: whether the picture keeps its width even on a narrow page.
        chart: the figure's lines, for a script that redraws them; None for a static picture.
        maps: the figure's heat maps, for a script that shows their values; None if there are none.
    """

    name: str
    caption: str
    figure: Figure
    is_wide: bool = False
    chart: Chart | None = None
    maps: LayerMaps | None = None

    @property
    def png(self) -> bytes:
        """Content of a PNG file with the picture."""
        return figure_file(self.figure, "png")


@dataclass(frozen=True)
class Table:
    """A table of formatted text.

    Attributes:
        headings: heading of each column.
        rows: text of each cell, row by row.
        num_text: number of leading columns that contain text; the others contain numbers.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_text: int


@dataclass(frozen=True)
class Section:
    """A part of a report under one heading.

    Attributes:
        title: heading of the section.
        pictures: pictures of the section.
        tables: tables with the numbers behind the pictures.
        note: remark below the content; for an empty section, the reason why it is empty.
    """

    title: str
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    note: str = ""


def seconds_text(seconds: float) -> str:
    """Formats a duration in seconds in a readable unit.

    >>> [seconds_text(seconds) for seconds in (0.00321, 1.234, 74.2, 4000.0)]
    ['3 ms', '1.23 s', '74.2 s', '66 min 40 s']
    >>> [seconds_text(seconds) for seconds in (0.9999, 9.999, 599.99, 7300.0)]
    ['1.00 s', '10.0 s', '10 min 0 s', '2 h 1 min']
    """
    if round(1000 * seconds) < 1000:
        return f"{1000 * seconds:.0f} ms"
    if round(seconds, 1) < 600:
        return f"{seconds:.2f} s" if round(seconds, 2) < 10 else f"{seconds:.1f} s"
    hours, rest = divmod(round(seconds), 3600)
    if hours >= 2:
        return f"{hours:,} h {rest // 60} min"
    return f"{round(seconds) // 60} min {round(seconds) % 60} s"
