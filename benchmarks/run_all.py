"""Runs all benchmarks one after the other: one JSON file of all documents, and one table of their claims."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from children import ROOT, check_known, document_of, tell
from rich import box
from rich.console import Console
from rich.table import Table

from swift.files import replace_file


def table(documents: dict[str, dict[str, Any]]) -> Table:
    """Builds a table with a row for each claim (figure, limit, result on this machine) and for each headline."""
    found = Table(box=box.SIMPLE_HEAD)
    for heading in ("benchmark", "claim", "figure", "at most", ""):
        found.add_column(heading, justify="right" if heading in ("figure", "at most") else "left", overflow="fold")
    for name, document in documents.items():
        for claim, judged in document["claims"].items():
            holds = "holds" if judged["holds"] else "missed"
            found.add_row(name, claim, f"{judged['figure']:.4g}", f"{judged['limit']:.4g}", holds)
        for headline, figure in document.get("headlines", {}).items():
            found.add_row(name, headline, f"{figure:.4g}", "-", "")
    return found


def run(names: Sequence[str], path: Path) -> int:
    """Runs benchmarks, and writes all results so far after each one.

    Returns:
        The exit code: 1 if a benchmark printed no document. A missed claim is reported, but is not a failure.
    """
    documents: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(names, start=1):
        tell(f"{number} of {len(names)}: {name}")
        document = document_of([f"benchmarks/bench_{name}.py"])
        if document is not None:
            documents[name] = document
            replace_file(path, json.dumps(documents, indent=1).encode())
    Console(width=150 if not sys.stdout.isatty() else None).print(table(documents))
    judged = [claim["holds"] for document in documents.values() for claim in document["claims"].values()]
    print(f"{sum(judged)} of {len(judged)} claims hold on this machine; all figures are in {path}")
    return int(len(documents) < len(names))


def main() -> int:
    known = sorted(path.stem.removeprefix("bench_") for path in (ROOT / "benchmarks").glob("bench_*.py"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(known)}")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / f"bench-{time.strftime('%Y%m%d-%H%M%S')}.json")
    options = parser.parse_args()
    check_known(parser, options.names, known, "benchmark")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    return run(options.names or known, options.out)


if __name__ == "__main__":
    sys.exit(main())
