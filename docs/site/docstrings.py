"""Examples in docstrings, as the site's reference shows them."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Examples(griffe.Extension):
    """Puts a heading over examples that have none, without which they would be read as Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Changes the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(_headed, obj.docstring.value)


def _headed(example: re.Match[str]) -> str:
    return "Examples:\n" + "\n".join(f"    {line}" for line in example[0].splitlines())
