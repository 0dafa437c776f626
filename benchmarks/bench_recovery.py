"""Recovery after killing real processes, one after the other: time until the others resume, by cause.

Each is killed at a random moment of an iteration and rejoins. At the end the losses are compared with those of the
same run in one process without failures. With `--recovery restart` all start again each time, in processes that were
held ready; they need the program with all workers alone, so that no other is prepared.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from measure import publish

from swift.runlog import Run, read_run

_SWIFT = [sys.executable, "-m", "swift"]
_CONFIG = Path(__file__).parent.parent / "experiments" / "recycle" / "kill.gin"
_PATIENCE_S = 600.0
_MAX_LOSS_DISTANCE = 1e-8
_MAX_MEDIAN_S = {"live": 1.0, "restart": 12.0}


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        shared = [str(options.config), "--set", "Experiment.num_steps=1000000"]
        command = [*_SWIFT, "launch", "--processes", str(options.processes), *shared, "--run-dir", str(run_dir)]
        command += ["--recovery", options.recovery, "--restarts", str(options.kills), "--trim-executables"]
        if options.recovery == "restart":
            command += ["--copy-every", str(options.copy_every), "--prepare", "none"]
        begun = time.monotonic()
        with subprocess.Popen(command, stderr=sys.stderr) as supervisor:
            try:
                pids_stay = _kill_one_by_one(supervisor, run_dir, options)
            finally:
                supervisor.send_signal(signal.SIGINT)
        seconds, run = time.monotonic() - begun, read_run(run_dir)
        whole_dir, num_steps = Path(directory) / "whole", len(run.metrics)
        whole = ["train", *shared, "--run-dir", str(whole_dir), "--stop-at", str(num_steps), "--prepare", "none"]
        subprocess.run([*_SWIFT, *whole], check=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
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
        "joins_s": _spread([event["join_s"] for event in run.events if event["event"] == "join"]),
    }
    return publish(
        "recovery",
        figures,
        {
            "loss of the run with kills over that without": (distance, _MAX_LOSS_DISTANCE),
            "iterations run again": (rerun, 1 if options.recovery == "live" else max(1, options.copy_every - 1)),
            "median seconds from a death to the next finished step": (
                statistics.median(event["recovery_s"] for event in recoveries),
                _MAX_MEDIAN_S[options.recovery],
            ),
        },
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=_CONFIG)
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--recovery", choices=list(_MAX_MEDIAN_S), default="live")
    parser.add_argument("--copy-every", type=int, default=10, help="iterations between copies, for restart alone")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _kill_one_by_one(supervisor: subprocess.Popen[bytes], run_dir: Path, options: argparse.Namespace) -> bool:
    """Kills each process in turn, once all run again and what they may need next is prepared.

    Returns:
        True if all others were the same processes before and after.
    """
    order, same = random.Random(options.seed), True
    for kill in range(options.kills):
        _wait(supervisor, lambda: _has_settled(run_dir, options))
        if options.recovery == "restart":
            _wait(supervisor, lambda: _are_ready(supervisor.pid, options.processes))
        time.sleep(order.uniform(0.5, 1.5))  # at any moment of an iteration
        before = _members(supervisor.pid)
        who = sorted(before)[kill % len(before)]
        with suppress(ProcessLookupError):
            os.kill(before[who], signal.SIGKILL)
        _wait(supervisor, lambda: _count(run_dir, "recovery") > kill)  # noqa: B023
        after = _members(supervisor.pid)
        same &= all(after.get(other) == pid for other, pid in before.items() if other != who)
        print(f"{kill + 1} of {options.kills} killed: {' '.join(who)}", file=sys.stderr)
    _wait(supervisor, lambda: _has_settled(run_dir, options))
    return same


def _wait(supervisor: subprocess.Popen[bytes], is_there: Any) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not is_there():
        if supervisor.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the run ended, or did not resume, before all were killed")
        time.sleep(0.1)


def _has_settled(run_dir: Path, options: argparse.Namespace) -> bool:
    """Checks that all run in a generation with some iterations, and that the next programs are compiled."""
    epochs = [event for event in _events(run_dir) if event["event"] == "epoch"]
    if not epochs or len(epochs[-1]["members"]) < options.processes:
        return False
    ready = {tuple(event["failed"]) for event in _events(run_dir) if event["event"] == "prepared"}
    is_prepared = len(ready) > options.processes or options.recovery == "restart"
    return is_prepared and _last_step(run_dir) >= epochs[-1]["step"] + 3


def _members(supervisor: int) -> dict[tuple[str, ...], int]:
    """Finds the process ids of the members of a run, by worker and rank: of two of a name, the second is held ready."""
    return {name: pid for name, (_, pid, _) in reversed(_started_members(supervisor))}


def _started_members(supervisor: int) -> list[tuple[tuple[str, ...], tuple[int, int, int]]]:
    """Finds all processes of members: worker and rank; and time of start, process id and time on the processor."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            words = (path / "cmdline").read_text().split("\0")
            stat = (path / "stat").read_text().rpartition(")")[2].split()
            if int(stat[1]) == supervisor and "member" in words and stat[0] != "Z":
                found.append((tuple(words[-4:-1]), (int(stat[19]), int(path.name), int(stat[11]) + int(stat[12]))))
    return sorted(found, key=lambda one: one[1])


def _are_ready(supervisor: int, num_processes: int) -> bool:
    """Checks that a process is held ready for each one, and has come to rest."""
    held = _started_members(supervisor)[num_processes:]
    time.sleep(0.5)
    return len(held) == num_processes and _started_members(supervisor)[num_processes:] == held


def _events(run_dir: Path) -> list[dict[str, Any]]:
    return list(_lines(run_dir / "events.jsonl"))


def _count(run_dir: Path, event: str) -> int:
    return sum(found["event"] == event for found in _events(run_dir))


def _last_step(run_dir: Path) -> int:
    return max((record["step"] for record in _lines(run_dir / "metrics.jsonl")), default=0)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Reads the events so far; the last line may be incomplete."""
    for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else []:
        yield json.loads(line)


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
