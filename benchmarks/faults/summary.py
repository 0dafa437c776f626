"""The record of a campaign as tables: `python -m benchmarks.faults.summary RECORD [--write DOCUMENT]`.

The tables by kind and by commit are printed; a document has a shorter one, with similar kinds in one row.
"""

import argparse
import re
import statistics
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .evidence import read_lines

_PLACE = re.compile(r"(<!-- faults -->\n).*?(<!-- end -->)", re.DOTALL)
Line = dict[str, Any]


class Family(NamedTuple):
    """Similar kinds of faults, a row of the table in a document."""

    kinds: tuple[str, ...]
    text: str


FAMILIES = (
    Family(
        ("kill-member", "kill-stage", "kill-all-members", "freeze-member", "freeze-stage", "pause-member"),
        "SIGKILL, or SIGSTOP with SIGCONT never or soon, for one or two members, all of a stage, or all",
    ),
    Family(
        (
            *(f"{how}-checkpoint-service" for how in ("kill", "freeze", "pause")),
            *(f"{how}-compile-service" for how in ("kill", "freeze", "pause")),
        ),
        "the same for the services",
    ),
    Family(
        ("kill-first", "pause-first", "power-off"), "the command itself is killed or paused; all processes are killed"
    ),
    Family(("interrupt", "terminate", "hang-up"), "SIGINT; SIGTERM; SIGHUP, with the terminal closed"),
    Family(("close-terminal", "still-terminal"), "the reader of the output ends, or reads nothing for up to 9 s"),
    Family(
        ("kill-node", "pause-node", "cut-wire", "slow-wire"),
        "a second machine (a network namespace) and its connection: cut both ways or one way, delayed, lossy",
    ),
    Family(
        ("full-disk", "frozen-disk", "lost-disk", "cut-power"),
        "the run directory's file system is full, hangs, is read-only or broken, or keeps only synchronized data",
    ),
    Family(("io-error", "slow-disk"), "file functions fail (EIO, ENOSPC, EROFS, EDQUOT) or take up to 5 s"),
    Family(("clock-jump",), "the wall clock jumps by up to 400 days, forward or back"),
    Family(
        ("small-shm", "full-shm", "full-tmp"),
        "shared memory of at most 4 MB, from the start or suddenly; `TMPDIR` full, or without inodes",
    ),
    Family(("remove-tmp", "remove-shm", "remove-both"), "these directories are removed while the run trains"),
    Family(("few-tasks",), "room for 0 to 8 more threads, for up to 5 s"),
    Family(
        tuple(f"damage-{what}" for what in ("checkpoint", "manifest", "metrics", "events", "other")),
        "files of a run that has ended: a bit is flipped, or they are cut, zeroed, emptied, removed or extended",
    ),
    Family(("damage-programs",), "the same for compiled programs in use"),
    Family(("rival",), "the same command again, in the same run directory"),
)
"""All kinds, in the order of the table in a document."""


def table(lines: Sequence[Line]) -> str:
    """Formats the faults by kind and by commit: their number and outcomes, in Markdown."""
    struck = _struck(lines)
    rows = ["| fault | times | right | seconds until all is well: median | largest |", "|---|---|---|---|---|"]
    rows += [_row(kind, _of_kinds(struck, [kind])) for kind in sorted({line["kind"] for line in struck})]
    return "\n".join([*rows, _row("**all**", struck), "", _by_commit(struck)]) + "\n"


def short_table(lines: Sequence[Line]) -> str:
    """Formats the faults by family: what they do, their number and outcomes, in Markdown."""
    struck = _struck(lines)
    rows = ["| fault | what it does | times | right | median, s | largest |", "|---|---|---|---|---|---|"]
    rows += [
        _row(f"{', '.join(f'`{kind}`' for kind in kinds)} | {text}", _of_kinds(struck, kinds))
        for kinds, text in FAMILIES
    ]
    return "\n".join([*rows, _row("**all** | ", struck)]) + "\n"


def _struck(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if line["kind"] != "none"]


def _of_kinds(lines: Sequence[Line], kinds: Collection[str]) -> list[Line]:
    return [line for line in lines if line["kind"] in kinds]


def _row(name: str, lines: Sequence[Line]) -> str:
    if not lines:
        return f"| {name} | 0 | | | |"
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
    """Returns a document with the short table of a record between its marks."""
    return _PLACE.sub(lambda marks: marks[1] + short_table(lines) + marks[2], document)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults.summary", description=__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument(
        "--write", type=Path, metavar="DOCUMENT", help="put the short table between the marks of a document"
    )
    options = parser.parse_args()
    lines = read_lines(options.record).records
    if options.write is None:
        print(table(lines), end="")
    else:
        options.write.write_text(rewritten(options.write.read_text(), lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
