"""Figures as inline SVG, which follows the page's colours and whose text can be selected and read aloud."""

import html
import io
import re

from matplotlib import rc_context
from matplotlib.figure import Figure

from swift.tools.palette import ON_DARK, variable

_COLOR = re.compile("|".join(ON_DARK))
_NUMBER = re.compile(r"(-?\d+\.\d\d)\d+")
_ID = re.compile(r'(\bid="|\bclip-path="url\(#|fill: url\(#|\bhref="#)')


def inline_svg(figure: Figure, name: str, caption: str) -> str:
    """Renders a figure as an ``svg`` element.

    Args:
        figure: figure drawn in the palette's colours.
        name: name that is unique in the page; letters, digits and ``-_.``.
        caption: text alternative.
    """
    file = io.StringIO()
    # Keeps text as text. Without a salt and a date, ids would be random and the file would contain the time.
    with rc_context({"svg.hashsalt": "swift", "svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    view = re.search(r'viewBox="([^"]+)"', text)
    assert view is not None, "not an SVG of Matplotlib"
    body = text[text.index(">", text.index("<svg")) + 1 : text.rindex("</svg>")]
    body = re.sub(r"<(metadata|style)\b.*?</\1>|<!--.*?-->", "", body, flags=re.DOTALL).replace("xlink:href", "href")
    body = _COLOR.sub(lambda color: f"var({variable(color[0])})", body)
    body = re.sub(r"font-family: [^;\"]*;? ?", "", body)  # the page sets the font
    body = re.sub(r' transform="rotate\(-?0 [^"]*"', "", body)
    body = _ID.sub(lambda match: match[0] + f"{name}.", body)
    body = re.sub(r' (?:d|x|y|transform|points)="[^"]*"', lambda match: _NUMBER.sub(r"\1", match[0]), body)
    body = re.sub(r"\n\s*", "\n", body).strip()
    box = f'viewBox="{view[1]}" style="--natural: {float(view[1].split()[2]) * 4 / 3:.0f}px"'
    title = f"<title>{html.escape(caption)}</title>"
    return f'<svg {box} role="img" aria-label="{html.escape(caption)}">{title}{body}</svg>'
