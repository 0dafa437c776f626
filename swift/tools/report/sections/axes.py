"""Shared parts of pictures: figures and axes in one style, legends, and bars of where time went."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from swift.tools.palette import CAUSE_COLORS, GRID, GROUND, INK

FONT_SIZE = 10.5
MAX_LABEL = 40
MAX_ENTRIES = 12
"""Largest number of entries of a legend; with more, its last one says how many are left out."""
LETTERS_PER_INCH = 12
_ROW_INCHES, _ROWS_WITHIN = 0.22, 3
"""Height of a row of a legend, and the rows for which figures have room; for further ones they are made higher."""


def new_figure(
    height: float, num_rows: int = 1, *, shares_x: bool = True, width: float = 4.8, heights: Sequence[float] = ()
) -> tuple[Figure, list[Axes]]:
    """Makes a figure in the common style, with axes from top to bottom.

    Args:
        height: height of the figure in inches.
        num_rows: number of axes.
        shares_x: True if all axes share one x axis.
        width: width of the figure in inches; a phone shows about five inches side by side legibly.
        heights: relative heights of the axes; equal if empty.
    """
    figure = Figure(figsize=(width, height), layout="constrained", facecolor=GROUND)
    rows = figure.subplots(num_rows, 1, sharex=shares_x, squeeze=False, height_ratios=heights or None)[:, 0]
    for axes in rows:
        axes.set_facecolor(GROUND)
        axes.grid(visible=True, color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(INK)
        axes.tick_params(colors=INK, labelsize=FONT_SIZE - 1)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
        for axis in (axes.xaxis, axes.yaxis):
            axis.label.set(fontsize=FONT_SIZE, color=INK)
    return figure, list(rows)


def put_title(axes: Axes, text: str) -> None:
    """Puts a title above axes."""
    axes.set_title(text, fontsize=FONT_SIZE, color=INK, loc="left")


def put_legend(figure: Figure, entries: Sequence[tuple[str, Any]], styles: Sequence[Any] = ()) -> None:
    """Puts the legend above the axes, where it hides nothing; names are shown literally, never as mathematics."""
    if len(entries) > MAX_ENTRIES:
        shown = MAX_ENTRIES - 1
        entries = [*entries[:shown], (f"and {len(entries) - shown:,} more", "none")]
        styles = [*styles[:shown], "-"] if styles else ()
    handles = [
        Line2D([], [], color=color, linestyle=style, linewidth=2.5)
        for (_, color), style in zip(entries, styles or ["-"] * len(entries), strict=True)
    ]
    labels = [drawable(label) for label, _ in entries]
    num_columns = max(1, min(4, int(LETTERS_PER_INCH * figure.get_figwidth()) // (max(map(len, labels)) + 6)))
    num_rows = -(-len(labels) // num_columns)
    figure.set_figheight(figure.get_figheight() + _ROW_INCHES * max(0, num_rows - _ROWS_WITHIN))
    # The labels are set afterwards, because a legend omits those with a leading underscore.
    legend = figure.legend(
        handles, ["."] * len(labels), loc="outside upper left", ncols=num_columns, frameon=False, handlelength=1.2
    )
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set(text=label, parse_math=False, fontsize=FONT_SIZE, color=INK)


def drawable(label: str) -> str:
    """Restricts a label to the font's characters and to the length that fits a legend."""
    glyphs = get_font(findfont("DejaVu Sans")).get_charmap()
    label = "".join(character if ord(character) in glyphs else "?" for character in " ".join(label.split()))
    return label if len(label) <= MAX_LABEL else label[: MAX_LABEL - 1] + "\N{HORIZONTAL ELLIPSIS}"


def draw_bars(axes: Axes, rows: Sequence[tuple[str, Mapping[str, float] | str]]) -> None:
    """Draws where time went: a bar for each row, divided by cause.

    Args:
        axes: axes to draw on.
        rows: (name, seconds by cause or the reason why there are none).
    """
    for y, (_, spent_s) in enumerate(rows):
        if isinstance(spent_s, str):
            axes.text(1.0, y, spent_s, va="center", fontsize=FONT_SIZE - 1, color=INK)
            continue
        left, total = 0.0, sum(spent_s.values())
        for cause, seconds in spent_s.items():
            share = 100 * seconds / total if total else 0.0
            axes.barh(y, share, left=left, color=CAUSE_COLORS[cause], edgecolor=GROUND, linewidth=0.4, height=0.7)
            left += share
    axes.set_yticks(range(len(rows)), [drawable(name) for name, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of the time (%)")
    all_spent_s = [spent_s for _, spent_s in rows if not isinstance(spent_s, str)]
    seen = [cause for cause in CAUSE_COLORS if any(spent_s.get(cause, 0.0) > 0 for spent_s in all_spent_s)]
    handles = [Patch(facecolor=CAUSE_COLORS[cause], label=cause.replace("_", " ")) for cause in seen]
    figure = axes.get_figure(root=True)
    assert figure is not None
    columns = int(0.75 * figure.get_figwidth())
    legend = figure.legend(
        handles=handles, loc="outside lower left", ncols=columns, frameon=False, fontsize=FONT_SIZE - 1
    )
    for text in legend.get_texts():
        text.set_color(INK)
