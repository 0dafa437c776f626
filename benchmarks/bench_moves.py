"""The cost of a change of cut whose program is ready: blocks that move to the survivors of a failure, and back.

Wall time and bytes. In one process (as `swift train` runs) one worker after the other fails, stays away until its
blocks have moved, and some iterations more, and returns. With real processes (`swift launch`) one is killed for good,
in a run of its own each time. However long it takes to find a cut and to compile its program, training goes on
meanwhile, and the benchmark waits.

A change costs what passes from the end of the last iteration before it to the end of the first one after it, less an
ordinary iteration. It may cost one iteration more, and the time in which this machine copies as many bytes as move.
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
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from launched import SWIFT, count, events, last_step, members, records, wait
from measure import publish

from swift.checkpoint.config import CheckpointConfig
from swift.config.experiment import Experiment
from swift.config.failures import StageRank
from swift.config.stored import config_text
from swift.experts.config import ExpertConfig
from swift.mesh.devices import emulate_devices
from swift.models.config import ModelConfig
from swift.topology import Topology, Worker
from swift.train.start import TrainOptions
from swift.train.trainer import train

BETWEEN = 12
"""Minimum number of iterations between two changes whose programs are ready."""
PATIENCE_S = 900.0
"""Seconds within which a better cut must be found and compiled."""
_COPIED_BYTES = 1 << 28


class Over(Exception):
    """Ends the run: all changes have been made and measured."""


@dataclass
class Absences:
    """A ``FailureSource`` in which workers fail one after another, each until its blocks have moved.

    Attributes:
        run_dir: directory of the run, whose event log shows which blocks have moved.
        workers: workers in the order in which they fail.
        since: time at which each absence so far began, in seconds.
        loads: load average of the machine before each iteration.
    """

    run_dir: Path
    workers: Sequence[Worker]
    since: list[float] = field(default_factory=list)
    loads: dict[int, float] = field(default_factory=dict)

    def failed(self, first_step: int, last_step: int) -> frozenset[Worker]:
        """Returns the worker that is away; raises ``Over`` after the last one's return."""
        del last_step
        self.loads[first_step] = os.getloadavg()[0]
        moves, begin = [event["step"] for event in events(self.run_dir) if "cuts" in event], 1 + BETWEEN
        for number, worker in enumerate(self.workers):
            if first_step < begin:
                return frozenset()
            if number == len(self.since):
                self.since.append(time.monotonic())
            if number == len(moves) and time.monotonic() > self.since[number] + PATIENCE_S:
                raise SystemExit(f"no blocks have moved in {PATIENCE_S:g} s while {worker} was away")
            if number == len(moves) or first_step < moves[number] + BETWEEN:
                return frozenset({worker})
            begin = moves[number] + 2 * BETWEEN
        if first_step < begin:
            return frozenset()
        raise Over

    def lost_ranks(self, first_step: int, last_step: int) -> frozenset[StageRank]:
        """Returns no lost ranks."""
        del first_step, last_step
        return frozenset()


def experiment(width: int) -> Experiment:
    """Builds an experiment of three pipelines of two stages of two layers, with iterations of about a second."""
    return Experiment(
        model=ModelConfig(4, width, width // 64, 4 * width, sequence_length=128, moe_pattern=(False, True)),
        experts=ExpertConfig(num_classes=4, slots_per_rank=4),
        topology=Topology(3, 2, 1),
        ranks="emulated",
        num_microbatches=4,
        sequences_per_microbatch=2,
        num_steps=1_000_000,
        adapt="recut",
        eval_every=0,
        checkpoint=CheckpointConfig(every=0),
    )


def copies_a_second() -> float:
    """Measures how many bytes this machine copies in a second."""
    source, target = (np.ones(_COPIED_BYTES, np.uint8) for _ in range(2))
    seconds = []
    for _ in range(5):
        begun = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - begun)
    return _COPIED_BYTES / min(seconds)


def of_one_process(setup: Experiment, run_dir: Path, number: int) -> dict[str, list[dict[str, Any]]]:
    """Runs in this process until ``number`` workers have failed and returned; returns the costs of both changes."""
    absences = Absences(run_dir, [(turn % 3, 1) for turn in range(number)])
    with suppress(Over):
        train(setup, TrainOptions(run_dir), absences)
    found: dict[str, list[dict[str, Any]]] = {"move": [], "return": []}
    for event in events(run_dir):
        if event["event"] == "reconfigure" and not event["failed"]:
            parts = {name: event[f"{name}_ms"] / 1000 for name in ("plan", "compile", "move")}
            facts = {"bytes": event["moved_bytes"], "was_ready": event["prepared"], "parts_s": parts}
            cost = cost_of_change(run_dir, event["step"]) | {"load": absences.loads[event["step"]]}
            found["return" if event["rejoined"] else "move"].append(cost | facts)
    return found


def of_processes(setup: Experiment, directory: Path, number: int, *options: str) -> dict[str, Any]:
    """Kills a process of a ``swift launch`` run with these options; returns the cost of the move that follows."""
    config, run_dir = directory / "moves.gin", directory / f"launch-{number}{''.join(options)}"
    config.write_text(config_text(setup))
    command = [*SWIFT, "launch", "--processes", "6", str(config), "--run-dir", str(run_dir)]
    command += ["--restarts", "0", *options]
    with subprocess.Popen(command, stdout=sys.stderr) as supervisor:
        try:
            wait(supervisor, lambda: last_step(run_dir) >= BETWEEN)
            pids = members(supervisor.pid)
            os.kill(pids[sorted(pids)[(2 * number + 1) % len(pids)]], signal.SIGKILL)
            wait(supervisor, lambda: count(run_dir, "recut") > 0, PATIENCE_S)
            load, (move,) = os.getloadavg()[0], (event for event in events(run_dir) if event["event"] == "recut")
            wait(supervisor, lambda: last_step(run_dir) >= move["resumed_from"] + BETWEEN)
        finally:
            supervisor.send_signal(signal.SIGINT)
    parts = {
        name.removesuffix("_s"): took_s for name, took_s in move.items() if name.endswith("_s") and took_s is not None
    }
    return cost_of_change(run_dir, move["resumed_from"] + 1) | {"load": load, "parts_s": parts}


def cost_of_change(run_dir: Path, first: int) -> dict[str, float]:
    """Computes the cost of a change from the times at which iterations were recorded.

    Args:
        run_dir: directory of the run.
        first: first iteration after the change.
    """
    ended = {record["step"]: datetime.fromisoformat(record["time"]).timestamp() for record in records(run_dir)}
    took = {step: ended[step] - ended[step - 1] for step in ended if step - 1 in ended}
    before, after = (
        statistics.median(took[step] for step in steps)
        for steps in (range(first - BETWEEN // 2, first), range(first + 1, first + BETWEEN // 2))
    )
    return {
        "iteration_before_s": before,
        "iteration_after_s": after,
        "to_first_s": took[first],
        "cost_s": took[first] - before,
    }


def summary(changes: Sequence[dict[str, Any]], num_bytes: float, bandwidth: float) -> dict[str, Any]:
    """Computes the medians of the costs of several changes, and of their parts."""

    def median(name: str) -> float:
        return round(statistics.median(one[name] for one in changes), 4)

    names = ("iteration_before_s", "iteration_after_s", "to_first_s", "cost_s", "load")
    parts = {
        name: [one["parts_s"][name] for one in changes if name in one["parts_s"]] for name in changes[0]["parts_s"]
    }
    over = [(one["cost_s"] - num_bytes / bandwidth) / one["iteration_before_s"] for one in changes]
    return {
        "number": len(changes),
        **{name: median(name) for name in names},
        "parts_s": {name: round(statistics.median(values), 4) for name, values in parts.items()},
        "bytes": num_bytes,
        "cost_in_iterations": [round(one["cost_s"] / one["iteration_before_s"], 3) for one in changes],
        "iterations_beside_the_bytes": {"median": round(statistics.median(over), 3), "largest": round(max(over), 3)},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--moves", type=int, default=3, help="in one process, and with real ones (default: %(default)s)"
    )
    parser.add_argument("--width", type=int, default=192, help="of the model (default: %(default)s)")
    options = parser.parse_args()
    setup, bandwidth = experiment(options.width), copies_a_second()
    emulate_devices(6)
    with tempfile.TemporaryDirectory() as path:
        directory = Path(path)
        changes = of_one_process(setup, directory / "train", options.moves)
        was_ready = [one["was_ready"] for of_kind in changes.values() for one in of_kind]
        num_bytes = {kind: statistics.median(one["bytes"] for one in of_kind) for kind, of_kind in changes.items()}
        changes["real processes"] = [of_processes(setup, directory, number) for number in range(options.moves)]
        num_bytes["real processes"] = num_bytes["move"]
    figures = {kind: summary(of_kind, num_bytes[kind], bandwidth) for kind, of_kind in changes.items()}
    medians = {kind: figure["iterations_beside_the_bytes"]["median"] for kind, figure in figures.items()}
    return publish(
        "a change of cut whose program is ready",
        {"copied_bytes_a_second": bandwidth, **figures},
        {
            "changes in one process whose program was not ready": (was_ready.count(False), 0),
            **{f"{kind}: iterations beside the bytes, median": (median, 1.0) for kind, median in medians.items()},
        },
    )


if __name__ == "__main__":
    sys.exit(main())
