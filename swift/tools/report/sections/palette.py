"""Colours of all pictures, on light and on dark backgrounds.

Pictures are drawn once, in the colours for a light background; within a page, colours become CSS variables, so that the
reader's setting decides. Hues are Okabe and Ito's or Tol's, which colour-blind readers can distinguish.
"""

from collections.abc import Mapping

INK, GROUND, GRID = "#333333", "#fdfdfb", "#e4e4e0"
RUN_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c6d00", "#56b4e9", "#000000")
"""Okabe and Ito's, with the yellow darkened for a light background."""
CLASS_COLORS = ("#332288", "#117733", "#aa4499", "#cc8800")
CAUSE_COLORS = {
    "startup": "#0072b2",
    "useful": "#009e73",
    "slowdown": "#a6d9c7",
    "saving": "#56b4e9",
    "detection": "#8c6d00",
    "reconfiguration": "#d55e00",
    "rerun": "#cc79a7",
    "lost": "#cc79a7",
    "waiting": "#bbbbbb",
    "other": "#88888a",
    "out_of_memory": "#343434",
}
MOMENT_COLORS = {
    "failure": "#d55e00",
    "recovery": "#009e73",
    "return": "#0072b2",
    "restore": "#cc79a7",
    "resume": "#8c6d00",
    "stop": "#000000",
}

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
    "#332288": "#a79cf5",
    "#117733": "#5fc27e",
    "#aa4499": "#dd7fcd",
    "#cc8800": "#e0a53a",
    "#343434": "#c8c8c4",
    # Colours of schedules, see ``swift.tools.draw.picture``.
    "#222222": "#dededa",
    "#ffffff": "#1f2226",
    "#eeeeee": "#33373c",
    "#cccccc": "#4a4e54",
    "#542788": "#8a5cc9",
}
"""Colours for a dark background by drawn colour; others are the same on both."""


def variable(color: str) -> str:
    """Name of the CSS variable for a colour of ``ON_DARK``."""
    return f"--c{color[1:]}"


def style() -> str:
    """CSS that defines the variables on light and dark backgrounds."""
    light = " ".join(f"{variable(color)}: {color};" for color in ON_DARK)
    dark = " ".join(f"{variable(color)}: {dark};" for color, dark in ON_DARK.items())
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
