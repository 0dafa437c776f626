"""Colors by meaning, for everything that is drawn, and rendering of figures to files.

A name has the same color wherever it is drawn: in reports, charts of plans, simulations and the papers' plots. Among
both placement policies and responses to failures, Swift's default is blue and the plain baseline is orange. Pictures
are drawn once, in colors for a light background. In a page, these become CSS variables, so that the reader's dark mode
applies. The hues are close to those of Okabe and Ito and of Tol, which color-blind readers can distinguish.
"""

import io
from collections.abc import Mapping, Sequence
from typing import Literal

from matplotlib import rc_context
from matplotlib.figure import Figure

INK, GROUND, GRID = "#333333", "#fdfdfb", "#e4e4e0"

POLICY_COLORS = {
    "symi": "#0072b2",
    "static": "#d55e00",
    "packed": "#8c6d00",
    "minmax": "#cc79a7",
    "flexmoe": "#009e73",
    "flexmoe100": "#3a96cc",
    "flexmoe50": "#009e73",
    "flexmoe10": "#7b3294",
}
"""Colors of placement policies by name without brackets; FlexMoE's names end in the iterations between its moves."""
STRATEGY_COLORS = {
    "swift": "#0072b2",
    "full": "#d55e00",
    "recycle": "#009e73",
    "moc": "#cc79a7",
    "memory": "#3a96cc",
    "oobleck": "#8c6d00",
    "varuna": "#7b3294",
    "bamboo": "#7f3b08",
    "ideal": "#888888",
    "adapt": "#b8003d",
    "decoupled, staggered": "#0072b2",
    "decoupled": "#009e73",
    "re-routed": "#d55e00",
}
"""Colors of responses to failures: the strategies of ``swift simulate``, and the parts of Swift's own strategy."""
CHECKPOINT_COLORS = {
    "no fault": "#888888",
    "full": "#d55e00",
    "K = 4": "#3a96cc",
    "K = 2": "#009e73",
    "K = 1": "#cc79a7",
    "K = 1, Dynamic-K": "#0072b2",
}
"""Colors of partial checkpoints by their number of experts, K."""
SPARE_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c6d00", "#3a96cc", "#7b3294", "#7f3b08", "#000000")
"""Colors for names without a color of their own, for example for several runs with the same policy."""
LAYER_COLORS = ("#8a63d2", "#2f7fc4", "#14887a", "#5c8a1e")
"""Colors between which those of layers are interpolated, from first to last layer; visible on both backgrounds."""
EXPERT_COLORS = ("#332288", "#117733", "#aa4499", "#b87a00")
CAUSE_COLORS = {
    "startup": "#77aadd",
    "useful": "#44bb99",
    "slowdown": "#a6d9c7",
    "saving": "#99ddff",
    "detection": "#aaaa00",
    "reconfiguration": "#ee8866",
    "rerun": "#ffaabb",
    "lost": "#ffaabb",
    "waiting": "#dddddd",
    "other": "#a0a0a0",
    "out_of_memory": "#343434",
}
"""Colors of the causes of time spent; they are light, since they fill areas, whereas lines are dark."""
LIVE = CAUSE_COLORS["useful"]
MOMENT_COLORS = {
    "failure": "#b2182b",
    "recovery": "#009e73",
    "return": "#0072b2",
    "restore": "#cc79a7",
    "resume": "#8c6d00",
    "stop": "#000000",
}
OP_COLORS = {"F": "#b5d6e8", "B": "#e08214", "W": "#542788", "U": "#222222"}
"""Colors of a schedule's ops, which also differ in grayscale."""
_LINE_STYLES = ("-", "--", ":", "-.")
"""Styles for lines that have to share a color."""

ON_DARK: Mapping[str, str] = {
    INK: "#dededa",
    GROUND: "#1f2226",
    GRID: "#3a3d42",
    "#000000": "#f2f2ee",
    "#0072b2": "#4aa3dc",
    "#d55e00": "#ee8034",
    "#009e73": "#2cbf94",
    "#cc79a7": "#dc93bb",
    "#8c6d00": "#c2a136",
    "#3a96cc": "#a5dcff",
    "#7b3294": "#b98ad0",
    "#7f3b08": "#c98a58",
    "#b2182b": "#f0606c",
    "#b8003d": "#ff6f9c",
    "#332288": "#a79cf5",
    "#117733": "#5fc27e",
    "#aa4499": "#dd7fcd",
    "#b87a00": "#e0a53a",
    "#343434": "#c8c8c4",
    # Colors of schedules, see ``swift.draw.picture``.
    "#222222": "#dededa",
    "#ffffff": "#1f2226",
    "#eeeeee": "#33373c",
    "#cccccc": "#4a4e54",
    "#542788": "#8a5cc9",
}
"""Colors for a dark background, by the color that is drawn; other colors are the same on both backgrounds."""

_DPI = 160


def colors_of(names: Sequence[str], palette: Mapping[str, str]) -> list[str]:
    """Chooses colors for names that are drawn together.

    A color is given to the first name that has it in the palette. Other names with the same color, and names that are
    not in the palette, get the next free spare color; when all have been used, the spare colors repeat.

    >>> colors_of(["symi", "static", "symi"], POLICY_COLORS)
    ['#0072b2', '#d55e00', '#009e73']
    """
    owned = [_own_color(name, palette) for name in names]
    used = {*owned}
    free = [color for color in SPARE_COLORS if color not in used] or [*SPARE_COLORS]
    colors: list[str] = []
    num_spare = 0
    for color in owned:
        if color is not None and color not in colors:
            colors.append(color)
        else:
            colors.append(free[num_spare % len(free)])
            num_spare += 1
    return colors


def _own_color(name: str, palette: Mapping[str, str]) -> str | None:
    """Finds the color of a name or its family, for example ``flexmoe`` for ``flexmoe(30)``; None if it has none."""
    plain = name.replace("(", "").replace(")", "")
    return palette.get(plain, palette.get(plain.rstrip("0123456789")))


def line_styles(colors: Sequence[str]) -> list[str]:
    """Chooses a line style for each color: solid for its first occurrence, and other styles when it repeats."""
    seen = [colors[:index].count(color) for index, color in enumerate(colors)]
    return [_LINE_STYLES[number % len(_LINE_STYLES)] for number in seen]


def variable(color: str) -> str:
    """Returns the name of the CSS variable for a color in ``ON_DARK``."""
    return f"--c{color[1:]}"


def style() -> str:
    """Returns the CSS that defines the color variables for light and dark backgrounds."""
    light = " ".join(f"{variable(color)}: {color};" for color in ON_DARK)
    dark = " ".join(f"{variable(color)}: {dark};" for color, dark in ON_DARK.items())
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"


def figure_file(figure: Figure, suffix: Literal["svg", "png"]) -> bytes:
    """Renders a figure and returns the content of the file, which is the same for equal figures."""
    file = io.BytesIO()
    # Without these, the ids in an SVG are random, and it contains the current time. A PNG contains the name of the
    # program that drew it, without a version, by which a command recognizes its own files.
    metadata = {"Date": None} if suffix == "svg" else {"Software": "Matplotlib"}
    with rc_context({"svg.hashsalt": "swift"}):
        figure.savefig(file, format=suffix, dpi=_DPI, metadata=metadata)
    return file.getvalue()
