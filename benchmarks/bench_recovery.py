"""Recovery after killing real processes, one after the other: time until the others resume, by cause.

Each is killed at a random moment of an iteration and rejoins. At the end the losses are compared with those of the
same run in one process without failures. With `--recovery restart` all start again each time, in processes that were
held ready; they need the program with all workers alone, so that no other is prepared.
"""

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from launched import CONFIG, SWIFT, count, events, last_step, members, started_members, wait
from measure import publish

from swift.runlog.reading import Run, read_run

_MAX_LOSS_DISTANCE = 1e-8
_MAX_MEDIAN_S = {"live": 1.0, "restart": 12.0}


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        shared = [str(options.config), "--set", "Experiment.num_steps=1000000"]
        command = [*SWIFT, "launch", "--processes", str(options.processes), *shared, "--run-dir", str(run_dir)]
        command += ["--recovery", options.recovery, "--restarts", str(options.kills)]
        if options.recovery == "restart":
            command += ["--memory-checkpoint-every", str(options.memory_checkpoint_every), "--prepare", "none"]
        begun = time.monotonic()
        with subprocess.Popen(command, stderr=sys.stderr) as supervisor:
            try:
                pids_stay = _kill_one_by_one(supervisor, run_dir, options)
            finally:
                supervisor.send_signal(signal.SIGINT)
        seconds, run = time.monotonic() - begun, read_run(run_dir)
        whole_dir, num_steps = Path(directory) / "whole", len(run.metrics)
        whole = ["train", *shared, "--run-dir", str(whole_dir), "--stop-at", str(num_steps), "--prepare", "none"]
        subprocess.run([*SWIFT, *whole], check=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        distance = float(np.abs(_losses(run) - _losses(read_run(whole_dir))).max())
    recoveries = [event for event in run.events if event["event"] == "recovery"]
    rerun = max(event["rerun_steps"] for event in recoveries)
    figures = {
        "recovery": options.recovery,
        "processes": options.processes,
        "kills": options.kills,
        "steps": num_steps,
        "seconds": seconds,
        "survivors_keep_their_process_ids": pids_stay,
        "largest_loss_distance": distance,
        "recoveries": len(recoveries),
        "rerun_steps_at_most": rerun,
        "distribution_s": {name: _spread([event[name] for event in recoveries]) for name in _seconds(recoveries)},
        "rejoins_s": _spread([event["rejoin_s"] for event in run.events if event["event"] == "rejoin"]),
    }
    return publish(
        "recovery",
        figures,
        {
            "loss of the run with kills over that without": (distance, _MAX_LOSS_DISTANCE),
            "iterations run again": (
                rerun,
                1 if options.recovery == "live" else max(1, options.memory_checkpoint_every - 1),
            ),
            "median seconds from a death to the next finished step": (
                statistics.median(event["recovery_s"] for event in recoveries),
                _MAX_MEDIAN_S[options.recovery],
            ),
        },
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--recovery", choices=list(_MAX_MEDIAN_S), default="live")
    parser.add_argument(
        "--memory-checkpoint-every", type=int, default=10, help="iterations between copies, for restart alone"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _kill_one_by_one(supervisor: subprocess.Popen[bytes], run_dir: Path, options: argparse.Namespace) -> bool:
    """Kills each process in turn, after all are running again and the programs that they may need next are prepared.

    Returns:
        Whether all other processes survived each kill.
    """
    order, same = random.Random(options.seed), True
    for kill in range(options.kills):
        wait(supervisor, lambda: _has_settled(run_dir, options))
        if options.recovery == "restart":
            wait(supervisor, lambda: _are_ready(supervisor.pid, options.processes))
        time.sleep(order.uniform(0.5, 1.5))  # at any moment of an iteration
        before = members(supervisor.pid)
        who = sorted(before)[kill % len(before)]
        with suppress(ProcessLookupError):
            os.kill(before[who], signal.SIGKILL)
        wait(supervisor, lambda: count(run_dir, "recovery") > kill)  # noqa: B023
        after = members(supervisor.pid)
        same &= all(after.get(other) == pid for other, pid in before.items() if other != who)
        print(f"{kill + 1} of {options.kills} killed: {' '.join(who)}", file=sys.stderr)
    wait(supervisor, lambda: _has_settled(run_dir, options))
    return same


def _has_settled(run_dir: Path, options: argparse.Namespace) -> bool:
    """Returns whether the current generation has run some iterations, and the next programs are compiled."""
    generations = [event for event in events(run_dir) if event["event"] == "generation_live"]
    if not generations or len(generations[-1]["members"]) < options.processes:
        return False
    ready = {tuple(event["failed"]) for event in events(run_dir) if event["event"] == "compiled"}
    is_prepared = len(ready) > options.processes or options.recovery == "restart"
    return is_prepared and last_step(run_dir) >= generations[-1]["step"] + 3


def _are_ready(supervisor: int, num_processes: int) -> bool:
    """Returns whether a spare process is held ready for each process and is idle."""
    held = started_members(supervisor)[num_processes:]
    time.sleep(0.5)
    return len(held) == num_processes and started_members(supervisor)[num_processes:] == held


def _losses(run: Run) -> np.ndarray:
    return np.array([record["loss"] for record in run.metrics])


def _seconds(recoveries: Sequence[dict[str, Any]]) -> list[str]:
    return [name for name in recoveries[0] if name.endswith("_s")]


def _spread(seconds: Sequence[float | None]) -> dict[str, float]:
    known = [value for value in seconds if value is not None]
    if not known:
        return {}
    low, median, high = np.percentile(known, [10, 50, 90])
    return {"p10": float(low), "median": float(median), "p90": float(high), "max": max(known)}


if __name__ == "__main__":
    sys.exit(main())
