"""The cost of a change whose program is ready: re-routing, blocks that move to the survivors, and that move back.

Wall time in iterations, and bytes. In one process (`train`) workers fail and return by a list. With real processes
(`launch`) one worker after the other is killed for good, and blocks move each time. What a change may cost is one
iteration, and the time in which this machine copies as many bytes as move.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from launched import CONFIG, SWIFT, count, events, last_step, members, metrics, wait
from measure import median, publish

from swift.runlog import read_run

_COPIED_BYTES = 1 << 28
_BETWEEN = 30
"""Iterations from a failure to the return, and from there to the next failure: time to find a cut and to compile."""


def settings(options: argparse.Namespace) -> list[str]:
    """The experiment: real processes' own, with wider layers, whose blocks move."""
    sizes = {"model_dim": options.width, "ffn_dim": 4 * options.width, "sequence_length": 128}
    chosen = {f"ModelConfig.{name}": value for name, value in sizes.items()}
    chosen |= {"Experiment.adapt": "'recut'", "Experiment.num_microbatches": 4, "CheckpointConfig.every": 0}
    return [str(CONFIG), *(word for name, value in chosen.items() for word in ("--set", f"{name} = {value}"))]


def copies_a_second() -> float:
    """Measures how many bytes this machine copies in a second."""
    source, target = (np.ones(_COPIED_BYTES, np.uint8) for _ in range(2))
    seconds = []
    for _ in range(5):
        begun = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - begun)
    return _COPIED_BYTES / min(seconds)


def of_one_process(options: argparse.Namespace, directory: Path) -> dict[str, list[dict[str, float]]]:
    """Lists the changes of `train` by kind: milliseconds, bytes, and those of the median iteration after it."""
    steps = range(_BETWEEN, _BETWEEN * (2 * options.failures + 1), _BETWEEN)
    workers = [f"{index // 2 % 3}:1" for index in range(len(steps))]
    what = [
        f"step {step}: {'rejoin' if index % 2 else 'fail'} {worker}"
        for index, (step, worker) in enumerate(zip(steps, workers, strict=True))
    ]
    command = [*SWIFT, "train", *settings(options), "--set", f"Experiment.failures = {what!r}"]
    command += ["--set", f"Experiment.num_steps = {steps[-1] + _BETWEEN}", "--run-dir", str(directory)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    run = read_run(directory)
    changes = [event for event in run.events if event["event"] == "reconfigure"]
    found: dict[str, list[dict[str, float]]] = {"re-routing": [], "move": [], "return": []}
    for change in changes:
        kind = "move" if "cuts" in change else "return" if change["rejoined"] else "re-routing"
        if change["prepared"]:
            found[kind].append(
                {
                    "ms": change["plan_ms"] + change["compile_ms"] + change["move_ms"],
                    "bytes": change["moved_bytes"],
                    "iteration_ms": iteration_ms(run.metrics, change["step"]),
                }
            )
    return found


def iteration_ms(records: Sequence[dict[str, Any]], step: int) -> float:
    """The median of the iterations after a change, without the first."""
    after = [record["step_ms"] for record in records if step < record["step"] < step + _BETWEEN // 2]
    return statistics.median(after)


def of_processes(options: argparse.Namespace, run_dir: Path, number: int) -> dict[str, float]:
    """Kills a process of a run of `launch`; returns its move of blocks, to the end of the first iteration after it."""
    command = [*SWIFT, "launch", "--processes", "6", *settings(options), "--run-dir", str(run_dir)]
    command += ["--restarts", "0", "--set", "Experiment.num_steps = 1000000"]
    with subprocess.Popen(command, stderr=sys.stderr) as supervisor:
        try:
            wait(supervisor, lambda: last_step(run_dir) >= 5)
            pids = members(supervisor.pid)
            os.kill(pids[sorted(pids)[(2 * number + 1) % len(pids)]], signal.SIGKILL)
            wait(supervisor, lambda: count(run_dir, "move") > 0)
            (move,) = (event for event in events(run_dir) if event["event"] == "move")
            wait(supervisor, lambda: last_step(run_dir) >= move["after"] + _BETWEEN // 2)
        finally:
            supervisor.terminate()
    return move | {"iteration_ms": iteration_ms(metrics(run_dir), move["after"] + 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--failures", type=int, default=3, help="failures in one process, and with real ones")
    parser.add_argument("--width", type=int, default=256, help="of the model (default: %(default)s)")
    options = parser.parse_args()
    bandwidth = copies_a_second()
    with tempfile.TemporaryDirectory() as directory:
        here = of_one_process(options, Path(directory) / "train")
        moves = [of_processes(options, Path(directory) / str(number), number) for number in range(options.failures)]
    moved_bytes = statistics.median(one["bytes"] for one in here["move"])
    figures: dict[str, Any] = {"copied_bytes_a_second": bandwidth, "moved_bytes": moved_bytes}
    claims: dict[str, tuple[float, float]] = {}
    for kind, changes in here.items():
        over = [(one["ms"] - 1000 * one["bytes"] / bandwidth) / one["iteration_ms"] for one in changes]
        figures[f"{kind}, one process"] = {
            "number": len(changes),
            "ms": median([one["ms"] for one in changes]),
            "iteration_ms": median([one["iteration_ms"] for one in changes]),
            "bytes": median([one["bytes"] for one in changes]),
        }
        claims[f"{kind}, one process: iterations beside the bytes, median"] = (median(over), 1.0)
    copy_s = moved_bytes / bandwidth
    # The first iteration is no cost.
    over = [1000 * (one["move_s"] - copy_s) / one["iteration_ms"] - 1 for one in moves]
    figures["move, real processes"] = {
        "number": len(moves),
        "s": median([one["move_s"] for one in moves]),
        "iteration_ms": median([one["iteration_ms"] for one in moves]),
        "largest": max(over),
    }
    claims["move, real processes: iterations beside the bytes, median"] = (median(over), 1.0)
    return publish("a change whose program is ready", figures, claims)


if __name__ == "__main__":
    sys.exit(main())
