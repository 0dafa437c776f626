"""Comparison of a newly measured result with the stored one, number by number.

Computed numbers must be equal. Numbers that are measured, or come from training, depend on the machine: they count as
the same if neither is more than ``spread`` times the other.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

EXACT = 1.0
OF_RUN = ("command", "machine", "minutes", "cpu_minutes")
"""Parts of a document that describe how and where it was produced."""


@dataclass(frozen=True)
class Number:
    """A number or a word in a result.

    Attributes:
        path: its place in the document, such as ``runs.0.final_loss``.
        kept: value in the stored result, or None if it has no such value.
        now: newly measured value, or None if there is no such value.
        spread: maximum ratio between the two values, in either direction; ``EXACT`` if they must be equal.
    """

    path: str
    kept: Any
    now: Any
    spread: float

    @property
    def ratio(self) -> float | None:
        """Ratio of the new value to the stored one, or None if it is undefined."""
        both = (self.kept, self.now)
        if not all(isinstance(one, int | float) and not isinstance(one, bool) and one != 0 for one in both):
            return None
        return self.now / self.kept

    @property
    def is_same(self) -> bool:
        """Whether the new value agrees with the stored one."""
        if self.kept == self.now or self.spread == EXACT:
            return self.kept == self.now
        ratio = self.ratio
        return self.spread == math.inf or (ratio is not None and 1 / self.spread <= ratio <= self.spread)

    @property
    def verdict(self) -> str:
        """Says in a few words whether the number is the same."""
        if self.kept == self.now:
            return "equal"
        if self.spread == EXACT:
            return "DIFFERS"
        if self.spread == math.inf:
            return "not compared"
        ratio = "no ratio" if self.ratio is None else f"x {self.ratio:.3g}"
        return f"{ratio}, {'within' if self.is_same else 'BEYOND'} {self.spread:g}"


def compare(kept: Mapping[str, Any], now: Mapping[str, Any], spreads: Mapping[str, float]) -> list[Number]:
    """Compares two documents of the same result, number by number.

    Args:
        kept: stored document.
        now: newly measured document.
        spreads: spread by path pattern; the first match applies, and numbers without a match must be equal.

    >>> [number.verdict for number in compare({"a": 2, "s": {"x": 4.0}}, {"a": 3, "s": {"x": 5.0}}, {"s.*": 1.5})]
    ['DIFFERS', 'x 1.25, within 1.5']
    """
    before, after = (dict(_leaves({k: v for k, v in one.items() if k not in OF_RUN})) for one in (kept, now))
    return [
        Number(
            path,
            before.get(path),
            after.get(path),
            next((spread for pattern, spread in spreads.items() if fnmatchcase(path, pattern)), EXACT),
        )
        for path in dict.fromkeys((*before, *after))
    ]


def table(name: str, numbers: list[Number]) -> str:
    """Formats a result's numbers as a text table with one number per line."""
    rows = [
        ("result", "number", "kept", "now", "same?"),
        *((name, number.path, _text(number.kept), _text(number.now), number.verdict) for number in numbers),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join(
            [f"{row[0]:<{widths[0]}}", f"{row[1]:<{widths[1]}}", f"{row[2]:>{widths[2]}}", f"{row[3]:>{widths[3]}}"]
        )
        + f"  {row[4]}"
        for row in rows
    )


def summary(name: str, numbers: list[Number]) -> str:
    """Summarizes in one line how many of a result's numbers agree with the stored ones."""
    exact = [number for number in numbers if number.spread == EXACT]
    others = [number for number in numbers if EXACT < number.spread < math.inf]
    parts = [
        f"{sum(number.is_same for number in group)} of {len(group)} {what}"
        for group, what in ((exact, "exact numbers are equal"), (others, "measured ones within their spread"))
        if group
    ]
    return f"{name}: {', '.join(parts)}"


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _text(value: Any) -> str:
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
