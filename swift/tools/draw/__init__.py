"""Drawings of a schedule: characters in a terminal, a picture for a paper, a trace for Perfetto.

``picture`` is not imported here, since it loads Matplotlib.
"""

from swift.tools.draw.rows import counted
from swift.tools.draw.summary import summarize
from swift.tools.draw.text import draw_chart
from swift.tools.draw.trace import trace_json

__all__ = [
    "counted",
    "draw_chart",
    "summarize",
    "trace_json",
]
