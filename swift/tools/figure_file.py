"""Figures as files."""

import io
from typing import Literal

from matplotlib import rc_context
from matplotlib.figure import Figure

_DPI = 160


def figure_file(figure: Figure, suffix: Literal["svg", "png"]) -> bytes:
    """Renders a figure as the content of a file, identical for identical figures."""
    file = io.BytesIO()
    # Otherwise the ids in an SVG are random, and it contains the current time. A PNG names what drew it, without a
    # version, so that a command knows its own file.
    metadata = {"Date": None} if suffix == "svg" else {"Software": "Matplotlib"}
    with rc_context({"svg.hashsalt": "swift"}):
        figure.savefig(file, format=suffix, dpi=_DPI, metadata=metadata)
    return file.getvalue()
