"""Time that copying the state to host memory costs real processes, as a multiple of an iteration.

In one run with `--recovery restart` each copy is compared with the other iterations around it: the two after it, in
which a thread writes it, against the median of the rest up to the next copy. Members compute on the cores with which
they copy, so this is the work of the copy, too, and not only the time for which training waits.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import numpy as np
from measure import publish

from swift.runlog.reading import read_run

_CONFIG = Path(__file__).parent.parent / "experiments" / "recycle" / "kill.gin"
_WARM_UP, _DURING = 40, 2
_MAX_SHARE = 0.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=_CONFIG)
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument(
        "--memory-checkpoint-every", type=int, default=10, help="iterations between copies (default: %(default)s)"
    )
    parser.add_argument("--copies", type=int, default=30, help="copies to measure (default: %(default)s)")
    options = parser.parse_args()
    every = options.memory_checkpoint_every
    steps = _WARM_UP + options.copies * every + _DURING
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        command = [sys.executable, "-m", "swift", "launch", "--processes", str(options.processes), str(options.config)]
        command += ["--recovery", "restart", "--memory-checkpoint-every", str(every), "--prepare", "none"]
        command += ["--run-dir", str(run_dir), "--set", f"Experiment.num_steps={steps}"]
        command += ["--set", "CheckpointConfig.every=0"]
        subprocess.run(command, check=True, stderr=sys.stderr, stdout=subprocess.DEVNULL)
        times = [datetime.fromisoformat(record["time"]).timestamp() for record in read_run(run_dir).metrics]
    stalls, seconds = stalls_of(np.diff(times), every)
    low, median, high = np.percentile(stalls, [25, 50, 75])
    figures = {
        "processes": options.processes,
        "memory_checkpoint_every": every,
        "copies": len(stalls),
        "iteration_s": seconds,
        "delay_of_a_copy_in_iterations": {"p25": float(low), "median": float(median), "p75": float(high)},
    }
    return publish(
        "host copies", figures, {"delay of copies over the iterations between": (median / every, _MAX_SHARE)}
    )


def stalls_of(seconds: Sequence[float], every: int) -> tuple[list[float], float]:
    """Computes the delay of training by each copy, in iterations, and the median duration of an iteration in seconds.

    Args:
        seconds: seconds from one recorded iteration to the next, starting at the second iteration. The copy after
            iteration s delays iterations s + 1 and s + 2.
        every: iterations between copies.
    """
    stalls, usual = [], []
    for step in range(_WARM_UP // every * every, len(seconds) - every, every):
        after = seconds[step - 1 : step - 1 + every]
        rest = statistics.median(after[_DURING:])
        stalls.append((sum(after[:_DURING]) - _DURING * rest) / rest)
        usual.append(rest)
    return stalls, statistics.median(usual)


if __name__ == "__main__":
    sys.exit(main())
