"""Colours by meaning, for everything that is drawn, and rendering of figures to files.

A name has the same colour wherever it is drawn: in reports, charts of plans, simulations and the papers' plots. Blue is
Swift's default, among placement policies and among answers to failures; orange is the plain baseline of either.
Pictures are drawn once, in colours for a light background. In a page, these become CSS variables, so that the reader's
dark mode applies. The hues are close to Okabe and Ito's and to Tol's, which colour-blind readers can distinguish.
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
"""Colours of placement policies by name without brackets; FlexMoE's names end in the iterations between its moves."""
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
"""Colours of answers to failures: the strategies of ``swift simulate``, and the parts of Swift's own."""
CHECKPOINT_COLORS = {
    "no fault": "#888888",
    "full": "#d55e00",
    "K = 4": "#3a96cc",
    "K = 2": "#009e73",
    "K = 1": "#cc79a7",
    "K = 1, Dynamic-K": "#0072b2",
}
"""Colours of partial checkpoints by their number of experts, K."""
SPARE_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c6d00", "#3a96cc", "#7b3294", "#7f3b08", "#000000")
"""Colours for names without their own, for example several runs of one policy."""
LAYER_COLORS = ("#8a63d2", "#2f7fc4", "#14887a", "#5c8a1e")
"""End points for interpolating layers' colours, from first to last layer; all are visible on both backgrounds."""
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
"""Colours of the causes of time spent; light, since they fill areas, whereas lines are dark."""
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
"""Colours of a schedule's ops, from light to dark, so that they differ in greyscale too."""
_LINE_STYLES = ("-", "--", ":", "-.")
"""Styles for lines that have to share a colour."""

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
    # Colours of schedules, see ``swift.draw.picture``.
    "#222222": "#dededa",
    "#ffffff": "#1f2226",
    "#eeeeee": "#33373c",
    "#cccccc": "#4a4e54",
    "#542788": "#8a5cc9",
}
"""Colours for a dark background by drawn colour; colours that are missing here are the same on both."""

_DPI = 160


def colors_of(names: Sequence[str], palette: Mapping[str, str]) -> list[str]:
    """Chooses colours for names that are drawn together.

    A name gets its own colour at its first occurrence. Later occurrences, and names without a colour, get the first
    spare colour that is free; when none is left, the spare colours repeat.

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
    """Finds the colour for a name or its family, for example ``flexmoe`` for ``flexmoe(30)``."""
    plain = name.replace("(", "").replace(")", "")
    return palette.get(plain, palette.get(plain.rstrip("0123456789")))


def line_styles(colors: Sequence[str]) -> list[str]:
    """Chooses line styles: solid, and other styles where a colour repeats."""
    seen = [colors[:index].count(color) for index, color in enumerate(colors)]
    return [_LINE_STYLES[number % len(_LINE_STYLES)] for number in seen]


def variable(color: str) -> str:
    """Returns the name of the CSS variable for a colour in ``ON_DARK``."""
    return f"--c{color[1:]}"


def style() -> str:
    """Returns the CSS that defines the colour variables for light and dark backgrounds."""
    light = " ".join(f"{variable(color)}: {color};" for color in ON_DARK)
    dark = " ".join(f"{variable(color)}: {dark};" for color, dark in ON_DARK.items())
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"


def figure_file(figure: Figure, suffix: Literal["svg", "png"]) -> bytes:
    """Renders a figure to a file's content; equal figures give equal bytes."""
    file = io.BytesIO()
    # Without these, the ids in an SVG are random, and it contains the current time. A PNG names the program that drew
    # it, without a version: by that a command recognizes its own file.
    metadata = {"Date": None} if suffix == "svg" else {"Software": "Matplotlib"}
    with rc_context({"svg.hashsalt": "swift"}):
        figure.savefig(file, format=suffix, dpi=_DPI, metadata=metadata)
    return file.getvalue()
