"""``make demo``: the project in a few minutes on two cores; it ends with a summary.

First a model is trained twice: with experts that stay where they are, and with experts that are placed again every
iteration. Then a smaller one is trained in two pipelines, and once more in four processes, of which one is killed and
comes back.
"""

import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import numpy as np

from swift.report.page import write_report
from swift.runlog.reading import Run, read_run, scalars

HERE = Path(os.path.relpath(Path(__file__).parent))
FIXED, MOVING, PIPELINES = (HERE / f"{name}.gin" for name in ("fixed", "moving", "pipelines"))
KILLED = "0:0"
FAULTS = (f"step 20: kill {KILLED} once compiled", f"step 21: restart {KILLED}")


def main() -> None:
    """Trains, and prints a summary."""
    top = Path("runs") / f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    fixed, moving, alone, killed = (top / name for name in ("fixed", "moving", "pipelines", "killed"))
    swift("compare", str(FIXED), str(MOVING), "--run-dir", str(top))
    swift("train", str(PIPELINES), "--run-dir", str(alone))
    swift("launch", "--processes", "4", str(PIPELINES), "--run-dir", str(killed), "--chaos", *FAULTS)
    page = top / "report.html"
    runs = [read_run(path) for path in (fixed, moving, alone, killed)]
    write_report(runs, page)
    summary = [*gain_of(*runs[:2]), *recovery_of(*runs[2:])]
    print("\n".join(["", *summary, "", f"report of all runs: {page}"]))


def swift(*words: str) -> None:
    """Shows and runs a command; ends with its exit code if it fails."""
    print(f"\n$ python -m swift {' '.join(f'{word!r}' if ' ' in word else word for word in words)}", flush=True)
    code = subprocess.run([sys.executable, "-m", "swift", *words], check=False).returncode
    if code:
        sys.exit(code)


def gain_of(fixed: Run, moving: Run) -> list[str]:
    """Summarizes in plain sentences what it is worth to place experts anew."""
    dropped = [100 * np.mean(scalars(run, "drop_fraction")) for run in (fixed, moving)]
    losses = [means_of_20(scalars(run, "loss")) for run in (fixed, moving)]
    before, after = (losses_T[-1] for losses_T in losses)
    lines = [
        f"Static placement dropped {dropped[0]:.2g} % of the tokens, load-following placement {dropped[1]:.2g} %,",
        "with as many slots and as many rows for tokens.",
        f"The loss of the last 20 iterations is {after:.2f} instead of {before:.2f}.",
    ]
    if after < before:
        later, sooner = (int(np.argmax(losses_T <= before)) + 20 for losses_T in losses)
        lines.append(f"It was {before:.2f} after {sooner} iterations instead of {later}.")
    return lines


def means_of_20(losses_T: np.ndarray) -> np.ndarray:
    """Means of the losses of each 20 iterations in a row; the last is that of the last 20."""
    return np.convolve(losses_T, np.full(20, 1 / 20), mode="valid")


def recovery_of(alone: Run, killed: Run) -> list[str]:
    """Summarizes in plain sentences what became of a run whose process was killed, beside the run without."""
    goodput = (killed.summary or {}).get("goodput", {})
    if not goodput.get("num_recoveries"):
        return ["No process was killed: the program for that failure was not ready before the run ended."]
    live_T, steps_T = scalars(killed, "live_workers"), killed.metrics.steps_T
    without = steps_T[live_T < live_T.max()]
    apart = np.abs(scalars(killed, "loss") - scalars(alone, "loss")).max()
    returns = [event for event in killed.events if event["event"] == "rejoin" and KILLED in event["rejoined"]]
    is_back = len(returns) == 1 and returns[0]["resumed_from"] == without[-1] < steps_T[-1]
    until = "until it was back with a copy of its stage" if is_back else "and it was not back when the run ended"
    return [
        f"Process {KILLED} was killed after iteration {without[0] - 1}. {goodput['recovery_median_s']:.1f} s later the "
        f"other three trained on; they ran its",
        f"micro-batches for {len(without)} iterations, {until}.",
        f"Every loss of that run is within {apart:.0e} of the run without failures.",
    ]


if __name__ == "__main__":
    main()
