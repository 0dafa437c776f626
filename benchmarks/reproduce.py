"""The papers' tables and figures, measured again: results as JSON, tables and plots drawn from them.

``make reproduce`` runs all that fit on two cores in half an hour. Results are kept in ``experiments/results``; the
tables in ``experiments/*/README.md`` and ``docs/simulate.md``, and the plots in ``experiments/plots``, are made of
these files and nothing else.
"""

import argparse
import json
import sys
from dataclasses import dataclass

from children import ROOT, check_known, document_of, tell
from paper_plots import draw_all
from paper_tables import read_results, rewrite_tables

from swift.files import replace_file

RESULTS = ROOT / "experiments" / "results"


@dataclass(frozen=True)
class Result:
    """A document that a program of ``benchmarks`` prints.

    Attributes:
        name: name of its file.
        command: path of the program, and its arguments.
        is_quick: True if it is reproduced by default.
    """

    name: str
    command: tuple[str, ...]
    is_quick: bool = True


ALL = (
    Result("symi_drops", ("bench_drops.py",)),
    Result("symi_aux_loss", ("study_symi.py", "aux-loss")),
    Result("symi_capacity", ("study_symi.py", "capacity"), is_quick=False),
    Result("symi_breakdown", ("study_symi.py", "breakdown")),
    Result("symi_cost", ("bench_cost.py", "--rounds", "12")),
    Result("symi_bytes", ("bench_bytes.py",)),
    Result("recycle_ablation", ("study_recycle.py", "ablation")),
    Result("recycle_failures", ("study_recycle.py", "failures")),
    Result("recycle_scale", ("study_recycle.py", "scale")),
    Result("recycle_traces", ("study_recycle.py", "traces", "--trace"), is_quick=False),
    Result("recycle_recovery", ("bench_recovery.py",), is_quick=False),
    Result("simulation", ("bench_simulate.py",)),
    Result("gspmd", ("bench_gspmd.py", "--rounds", "9"), is_quick=False),
    Result("beyond", ("bench_packed.py",), is_quick=False),
    Result("placement", ("bench_placement.py",)),
    Result("spare_slots", ("study_spare_slots.py",), is_quick=False),
    Result("balance", ("study_balance.py", "table"), is_quick=False),
    Result("balance_long", ("study_balance.py", "long"), is_quick=False),
    Result("balance_olmoe", ("study_balance.py", "olmoe"), is_quick=False),
    Result("locality", ("study_locality.py", "--steps", "192", "--seeds", "0", "1"), is_quick=False),
    Result("waiting", ("bench_waiting.py",), is_quick=False),
    Result("moc_checkpoint", ("bench_checkpoint.py", "--saves", "24")),
    Result("agents", ("bench_agents.py",)),
    Result("moc_faults", ("bench_faults.py", "--seeds", "1")),
)


def main() -> int:
    names = [result.name for result in ALL]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: the quick ones of {', '.join(names)}")
    parser.add_argument("--draw", action="store_true", help="only draw tables and plots from the results that are kept")
    parser.add_argument("--trace", nargs="+", default=[], metavar="FILE", help="the traces of recycle_traces")
    options = parser.parse_args()
    check_known(parser, options.names, names, "result")
    if options.draw and (options.names or options.trace):
        parser.error("--draw takes the results as they are: no names, no --trace")
    if options.trace and "recycle_traces" not in options.names:
        parser.error("--trace is for recycle_traces")
    if "recycle_traces" in options.names and not options.trace:
        parser.error("recycle_traces needs --trace FILE ...: the published traces are not part of this repository")
    wanted = [result for result in ALL if (result.name in options.names if options.names else result.is_quick)]
    failed = [] if options.draw else make(wanted, options.trace)
    results = read_results(RESULTS)
    draw_all(results, ROOT / "experiments" / "plots")
    for path in (ROOT / "docs" / "simulate.md", *sorted((ROOT / "experiments").glob("*/README.md"))):
        replace_file(path, rewrite_tables(path.read_text(), results).encode())
    if failed:
        tell(f"without a result: {', '.join(failed)}")
    return int(bool(failed))


def make(wanted: list[Result], traces: list[str]) -> list[str]:
    """Runs the programs of results and keeps their documents; returns the names of those that printed none."""
    failed = []
    for number, result in enumerate(wanted, start=1):
        tell(f"{number} of {len(wanted)}: {result.name}")
        more = traces if result.name == "recycle_traces" else []
        document = document_of([f"benchmarks/{result.command[0]}", *result.command[1:]], more)
        if document is None:
            failed.append(result.name)
        else:
            replace_file(RESULTS / f"{result.name}.json", (json.dumps(document, indent=1) + "\n").encode())
    return failed


if __name__ == "__main__":
    sys.exit(main())
