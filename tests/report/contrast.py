"""Contrast of two colours, and the colours of text on a report's page."""

import re
from importlib.resources import files

from swift.draw import style as palette


def luminance(color):
    """Luminance as the web's guidelines on accessible content define it."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def text_colors():
    """Colours of text and of what it stands on, by name, on the page in light and in dark."""
    style = (files("swift.report") / "assets" / "page.css").read_text()
    light, dark = (dict(re.findall(r"--(\w+): (#\w{6})", part)) for part in re.findall(r":root \{([^}]*)\}", style))
    own = {"ink": palette.INK, "card": palette.GROUND}
    return [own | light, {name: palette.ON_DARK[color] for name, color in own.items()} | dark]
