"""The papers' tables and figures, measured again, and each number beside the one that is kept.

``make reproduce`` runs all that fit on two cores in half an hour, prints a table of all numbers, and writes the new
documents to ``runs/reproduced``. It exits with 1 if a number that has to be equal differs. Only with ``--keep`` do the
new documents replace those in ``experiments/results``. The tables in ``experiments/*/README.md``
and the plots in ``experiments/plots`` are made of these files and nothing else.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from children import ROOT, check_known, document_of, tell
from kept_numbers import EXACT, compare, summary, table
from paper_plots import draw_all
from paper_tables import read_results, rewrite_tables

from swift.files import replace_file

RESULTS = ROOT / "experiments" / "results"
REPRODUCED = ROOT / "runs" / "reproduced"
SECONDS, SHARE, RATIO, LOSS, ANY = 3.0, 1.5, 1.3, 1.05, math.inf
"""Spreads: seconds of another machine; shares of tokens where another processor rounds differently, or of a time;
ratios of times of one machine; losses; and differences of two such numbers, which have none."""
_GIVEN = ("*.limit", "*paper*", "*seed*", "*tokens_per_rank", "*steps", "*every", "*rounds", "*iterations", "benchmark")
GIVEN = dict.fromkeys(_GIVEN, EXACT)
"""Settings, and figures of papers, beside what is measured."""
TRAINED = {"*fewer*": ANY, "*above_full*": ANY, "*growth*": ANY, "*_ms*": SECONDS, "*loss*": LOSS, "*": SHARE}
TIMED = {"*cpu_s*": SECONDS, "*_ms*": SECONDS, "*.ms*": SECONDS, "*share*": SHARE, "*": RATIO}


@dataclass(frozen=True)
class Result:
    """A document that a program of ``benchmarks`` prints.

    Attributes:
        name: name of the document's file.
        command: path of the program, and its arguments.
        is_quick: whether it is reproduced by default.
        spreads: allowed ratios between two measurements of a number, see ``kept_numbers.compare``; if empty, all
            numbers are computed and must be equal.
    """

    name: str
    command: tuple[str, ...]
    is_quick: bool = True
    spreads: Mapping[str, float] = field(default_factory=dict)


ALL = (
    Result("symi_drops", ("bench_drops.py",), spreads=GIVEN | TRAINED),
    Result("symi_aux_loss", ("study_symi.py", "aux-loss"), spreads=GIVEN | TRAINED),
    Result("symi_capacity", ("study_symi.py", "capacity"), is_quick=False, spreads=GIVEN | TRAINED),
    Result("symi_breakdown", ("study_symi.py", "breakdown"), spreads=GIVEN | TIMED),
    Result("symi_cost", ("bench_cost.py", "--rounds", "12"), spreads=GIVEN | TIMED),
    Result(
        "symi_bytes",
        ("bench_bytes.py",),
        spreads={"*migrating_iterations": ANY, "*moved_on_average": SHARE, "*bytes_of_a_migration*": SHARE},
    ),
    Result("recycle_ablation", ("study_recycle.py", "ablation")),
    Result("recycle_failures", ("study_recycle.py", "failures")),
    Result("recycle_scale", ("study_recycle.py", "scale")),
    Result("recycle_traces", ("study_recycle.py", "traces", "--trace"), is_quick=False),
    Result("recycle_recovery", ("bench_recovery.py",), is_quick=False, spreads=GIVEN | {"*": SECONDS}),
    Result("simulation", ("bench_simulate.py",)),
    Result("gspmd", ("bench_gspmd.py", "--rounds", "9"), is_quick=False, spreads=GIVEN | TIMED),
    Result("beyond", ("bench_packed.py",), is_quick=False, spreads=GIVEN | {"*cpu_s*": SECONDS} | TRAINED),
    Result(
        "placement",
        ("bench_placement.py",),
        spreads={"*.limit": EXACT, "*_us": SECONDS, "*time_over_eplb": SHARE, "claims.time over*": SHARE}
        | {"*.loads": EXACT, "over_eplb_by_kind.recorded.*": LOSS, "over_eplb_by_kind.*": EXACT}
        | {"over_eplb*": LOSS, "claims.*": LOSS},  # recorded loads, of a trained run, are among them
    ),
    Result("spare_slots", ("study_spare_slots.py",), is_quick=False, spreads=GIVEN | TRAINED),
    Result("balance", ("study_balance.py", "table"), is_quick=False, spreads=GIVEN | TRAINED),
    Result("balance_long", ("study_balance.py", "long"), is_quick=False, spreads=GIVEN | TRAINED),
    Result("balance_olmoe", ("study_balance.py", "olmoe"), is_quick=False, spreads=GIVEN | TRAINED),
    Result(
        "locality",
        ("study_locality.py", "--steps", "192", "--seeds", "0", "1"),
        is_quick=False,
        spreads=GIVEN | TRAINED,
    ),
    Result("waiting", ("bench_waiting.py",), is_quick=False, spreads=GIVEN | {"claims.*": SHARE} | TIMED),
    Result(
        "moc_checkpoint",
        ("bench_checkpoint.py", "--saves", "24"),
        spreads={"*.limit": EXACT, "*.saves": EXACT, "stalls.*": SECONDS, "memory.*": SHARE, "claims.*": SHARE},
    ),
    Result(
        "agents",
        ("bench_agents.py",),
        spreads=dict.fromkeys(("*steps", "*outcomes*", "*.limit", "benchmark", "times.[bp]*"), EXACT)
        | {"*_s": SECONDS, "*.seconds.*": SECONDS, "*": RATIO},
    ),
    Result(
        "moc_faults",
        ("bench_faults.py", "--seeds", "1"),
        spreads=GIVEN | dict.fromkeys(("faults.*", "classes", "plt_budget"), EXACT) | TRAINED,
    ),
)


def main() -> int:
    names = [result.name for result in ALL]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: the quick ones of {', '.join(names)}")
    parser.add_argument(
        "--keep", action="store_true", help="replace the kept results, and tables and plots, by the new"
    )
    parser.add_argument("--draw", action="store_true", help="only draw tables and plots from the results that are kept")
    parser.add_argument("--trace", nargs="+", default=[], metavar="FILE", help="the traces of recycle_traces")
    options = parser.parse_args()
    check_known(parser, options.names, names, "result")
    if options.draw and (options.names or options.trace or options.keep):
        parser.error("--draw takes the results as they are: no names, no --trace, no --keep")
    if options.trace and "recycle_traces" not in options.names:
        parser.error("--trace is for recycle_traces")
    if "recycle_traces" in options.names and not options.trace:
        parser.error("recycle_traces needs --trace FILE ...: the published traces are not part of this repository")
    wanted = [result for result in ALL if (result.name in options.names if options.names else result.is_quick)]
    if options.draw:
        draw()
        return 0
    made = make(wanted, options.trace)
    is_same = report([result for result in wanted if result.name in made], made, read_results(RESULTS))
    if options.keep:
        for name, document in made.items():
            write(RESULTS, name, document)
        draw()
    if failed := [result.name for result in wanted if result.name not in made]:
        tell(f"without a result: {', '.join(failed)}")
    return int(bool(failed) or not is_same)


def make(wanted: list[Result], traces: list[str]) -> dict[str, dict[str, Any]]:
    """Runs the programs of the wanted results; returns the documents that they printed, by name."""
    made = {}
    for number, result in enumerate(wanted, start=1):
        tell(f"{number} of {len(wanted)}: {result.name}")
        more = traces if result.name == "recycle_traces" else []
        document = document_of([f"benchmarks/{result.command[0]}", *result.command[1:]], more)
        if document is not None:
            made[result.name] = document
            write(REPRODUCED, result.name, document)
    return made


def report(results: Sequence[Result], made: Mapping[str, Any], kept: Mapping[str, Any]) -> bool:
    """Prints each number beside the stored one, then a line for each result.

    Args:
        results: results that were measured again.
        made: new documents by name.
        kept: stored documents by name.

    Returns:
        False if a number that must be equal differs.
    """
    found = {one.name: compare(kept[one.name], made[one.name], one.spreads) for one in results if one.name in kept}
    for name, numbers in found.items():
        print(table(name, numbers), end="\n\n")
    lines = [summary(one.name, found[one.name]) if one.name in found else f"{one.name}: none kept" for one in results]
    print("\n".join(lines), flush=True)
    is_same = [number.is_same for numbers in found.values() for number in numbers if number.spread == EXACT]
    return all(is_same)


def draw() -> None:
    """Updates tables and plots from the stored results."""
    results = read_results(RESULTS)
    draw_all(results, ROOT / "experiments" / "plots")
    for path in sorted((ROOT / "experiments").glob("*/README.md")):
        replace_file(path, rewrite_tables(path.read_text(), results).encode())


def write(directory: Path, name: str, document: dict[str, Any]) -> None:
    """Writes the document of a result to its JSON file."""
    directory.mkdir(parents=True, exist_ok=True)
    replace_file(directory / f"{name}.json", (json.dumps(document, indent=1) + "\n").encode())


if __name__ == "__main__":
    sys.exit(main())
