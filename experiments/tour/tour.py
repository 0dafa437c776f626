"""``make demo``: the project in a few minutes on two cores; it ends with a summary.

The same model is trained three times: with experts that stay where they are; with experts that are placed again every
iteration; and once more with those in four processes, of which one is killed and comes back.
"""

import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import numpy as np

from swift.runlog import Run, read_run, scalars
from swift.tools.report import write_report

HERE = Path(os.path.relpath(Path(__file__).parent))
FIXED, MOVING = HERE / "fixed.gin", HERE / "moving.gin"
KILLED = "0:0"
FAULTS = (f"step 20: kill {KILLED} once prepared", f"step 21: restart {KILLED}")

SPREAD = 0.05
"""Losses of two seeds differ by up to this (experiments/balance/README.md): a smaller difference is no gain."""


def main() -> None:
    """Trains, and prints a summary."""
    top = Path("runs") / f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    swift("compare", str(FIXED), str(MOVING), "--run-dir", str(top))
    fixed, moving, killed = (top / name for name in (FIXED.stem, MOVING.stem, "killed"))
    swift("launch", "--processes", "4", str(MOVING), "--run-dir", str(killed), "--chaos", *FAULTS)
    page = top / "report.html"
    runs = [read_run(path) for path in (fixed, moving, killed)]
    write_report(runs, page)
    print("\n".join(["", *summary_of(*runs), "", f"report of all three: {page}"]))


def swift(*words: str) -> None:
    """Shows and runs a command; ends with its exit code if it fails."""
    print(f"\n$ python -m swift {' '.join(f'{word!r}' if ' ' in word else word for word in words)}", flush=True)
    code = subprocess.run([sys.executable, "-m", "swift", *words], check=False).returncode
    if code:
        sys.exit(code)


def summary_of(fixed: Run, moving: Run, killed: Run) -> list[str]:
    """Summarizes the three runs in plain sentences."""
    dropped = [100 * np.mean(scalars(run, "drop_share")) for run in (fixed, moving)]
    reached = [np.mean(scalars(run, "loss")[-20:]) for run in (fixed, moving)]
    lines = [
        f"Static placement dropped {dropped[0]:.2g} % of the tokens, load-following placement {dropped[1]:.2g} %,",
        "with the same slots and the same bytes on the wire.",
    ]
    before, after = (f"{loss:.2f}" for loss in reached)
    if abs(reached[0] - reached[1]) < SPREAD:
        lines.append(
            f"Their losses, {before} and {after}, differ less than those of two seeds: too short a run for more."
        )
    else:
        lines.append(f"The loss of the last 20 iterations is {after} instead of {before}.")
    goodput = (killed.summary or {}).get("goodput", {})
    if not goodput.get("num_recoveries"):
        return [*lines, "No process was killed: the program for that failure was not ready before the run ended."]
    live_T, steps_T = scalars(killed, "live_workers"), killed.metrics.steps_T
    without = steps_T[live_T < live_T.max()]
    apart = np.abs(scalars(killed, "loss") - scalars(moving, "loss")).max()
    returns = [event for event in killed.events if event["event"] == "join" and KILLED in event["joined"]]
    is_back = len(returns) == 1 and returns[0]["after"] == without[-1] < steps_T[-1]
    until = "until it was back with a copy of its stage" if is_back else "and it was not back when the run ended"
    return [
        *lines,
        f"Process {KILLED} was killed after iteration {without[0] - 1}. {goodput['recovery_median_s']:.1f} s later the "
        f"other three trained on; they ran its",
        f"micro-batches for {len(without)} iterations, {until}.",
        f"Every loss of that run is within {apart:.0e} of the run without failures.",
    ]


if __name__ == "__main__":
    main()
