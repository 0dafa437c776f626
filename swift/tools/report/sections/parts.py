"""What a report consists of: sections with pictures and tables."""

import io
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from swift.tools.report.sections.axes import DPI


@dataclass(frozen=True)
class Picture:
    """A drawn figure.

    Attributes:
        name: unique among the pictures of a report; a file name without its ending.
        caption: what there is to see.
        figure: in the colours of ``swift.tools.report.sections.palette``.
        is_wide: it needs its own width, however narrow the page.
    """

    name: str
    caption: str
    figure: Figure
    is_wide: bool = False

    @property
    def png(self) -> bytes:
        """As a file's content."""
        file = io.BytesIO()
        self.figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
        return file.getvalue()


@dataclass(frozen=True)
class Table:
    """Key numbers.

    Attributes:
        headings: of the columns.
        rows: a text for each column.
        num_text: how many columns are text, the first ones; the others are numbers.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_text: int


@dataclass(frozen=True)
class Section:
    """A part of a report under a heading of its own.

    Attributes:
        title: the heading.
        pictures: what there is to see.
        tables: the same in numbers.
        note: a line; where there is nothing else, why there is nothing.
    """

    title: str
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    note: str = ""


def seconds_text(seconds: float) -> str:
    """A time for people.

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
