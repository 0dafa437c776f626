"""The record of a campaign as a table: `python -m benchmarks.faults.summary RECORD [--write DOCUMENT]`."""

import argparse
import re
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .evidence import read_lines

_PLACE = re.compile(r"(<!-- faults -->\n).*?(<!-- end -->)", re.DOTALL)
Line = dict[str, Any]


def table(lines: Sequence[Line]) -> str:
    """Formats a table of the faults by kind: their number and outcomes, in Markdown."""
    struck = [line for line in lines if line["kind"] != "none"]
    rows = ["| fault | times | right | seconds until all is well: median | largest |", "|---|---|---|---|---|"]
    kinds = sorted({line["kind"] for line in struck})
    rows += [_row(kind, [line for line in struck if line["kind"] == kind]) for kind in kinds]
    return "\n".join([*rows, _row("**all**", struck), "", _by_commit(struck)]) + "\n"


def _row(name: str, lines: Sequence[Line]) -> str:
    right = sum(line["outcome"] == "ok" for line in lines)
    seconds = [line["seconds"] for line in lines if line["outcome"] == "ok"] or [0.0]
    return f"| {name} | {len(lines)} | {right} | {statistics.median(seconds):.1f} | {max(seconds):.1f} |"


def _by_commit(lines: Sequence[Line]) -> str:
    """Formats a table of wrong verdicts by the commit under test."""
    struck, wrong = Counter[str](), Counter[str]()
    for line in lines:
        struck[line["commit"]] += 1
        wrong[line["commit"]] += line["outcome"] != "ok"
    rows = ["| commit | faults | wrong |", "|---|---|---|"]
    return "\n".join([*rows, *(f"| {commit} | {struck[commit]} | {wrong[commit]} |" for commit in struck)])


def rewritten(document: str, lines: Sequence[Line]) -> str:
    """Returns a document with the table of a record between its marks."""
    return _PLACE.sub(lambda marks: marks[1] + table(lines) + marks[2], document)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults.summary", description=__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("--write", type=Path, metavar="DOCUMENT", help="put it between the marks of a document")
    options = parser.parse_args()
    lines = read_lines(options.record).records
    if options.write is None:
        print(table(lines), end="")
    else:
        options.write.write_text(rewritten(options.write.read_text(), lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
