"""The record of a long run: seconds and memory to resume, summarize and report it.

A run of 200,000 iterations, 12 MoE layers and 64 experts is generated. Each reader is a separate process; its memory is
its peak resident set, less that of a process that reads nothing.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from swift.report.page import write_report
from swift.runlog.expert_counts import CLASS_COUNTS, CountsWriter
from swift.runlog.files import EVENTS, METRICS
from swift.runlog.reading import CONFIG, measure, read_run
from swift.runlog.run_directory import RunDirectory

LAYERS, CLASSES, TOKENS = 12, 64, 65536
SAVED_EVERY = 20
BEGUN = datetime(2026, 1, 1, tzinfo=UTC)
READERS: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: path,
    "resume after half": lambda path: RunDirectory.resume(path, "", len_of(path) // 2).close(),
    "resume after all but 50": lambda path: RunDirectory.resume(path, "", len_of(path) - 50).close(),
    "summary": lambda path: measure(read_run(path), 1.0),
    "report": lambda path: write_report([read_run(path)], path / "report.html"),
}


def len_of(path: Path) -> int:
    """Returns the number of iterations of a generated run."""
    return int((path / "steps").read_text())


def make_run(path: Path, num_steps: int) -> None:
    """Writes the record of a run with random metrics."""
    random = np.random.default_rng(0)
    path.mkdir()
    (path / CONFIG).touch()
    (path / "steps").write_text(str(num_steps))
    share_E = random.dirichlet(np.ones(CLASSES))
    popularity = random.multinomial(TOKENS, share_E, (64, LAYERS))
    drawn = np.stack([popularity, random.integers(1, 9, popularity.shape), popularity // 16], axis=1)
    counts = CountsWriter.open(path / CLASS_COUNTS)
    with (path / METRICS).open("w") as lines, (path / EVENTS).open("w") as events:
        for step in range(1, num_steps + 1):
            counts.write(step, drawn[step % len(drawn)])
            lines.write(json.dumps(scalars(step)) + "\n")
            if step % SAVED_EVERY == 0:
                saved = [[(step // SAVED_EVERY + layer) % CLASSES] for layer in range(LAYERS)]
                said = {"experts": "all" if step == SAVED_EVERY else saved, "experts_per_layer": 1, "save_ms": 900.0}
                events.write(json.dumps({"time": at(step), "event": "checkpoint", "step": step, **said}) + "\n")
    counts.close()


def at(step: int) -> str:
    """Formats the time at which an iteration ended."""
    return (BEGUN + timedelta(seconds=step / 4)).isoformat(timespec="milliseconds")


def scalars(step: int) -> dict[str, Any]:
    """Builds one line of metrics, with as many numbers as a pipelined training run records."""
    noise = (step * 2654435761 % 2**32) / 2**32
    return {
        "step": step,
        "time": at(step),
        "loss": 2 + 8 / step**0.3 + noise,
        "aux_loss": 1 + noise,
        "tokens": TOKENS,
        "tokens_routed": TOKENS * LAYERS,
        "tokens_dropped": TOKENS * LAYERS // 16,
        "tokens_overflowed": 0,
        "drop_fraction": 1 / 16,
        "load_imbalance": 1 + noise,
        "grad_norm": noise,
        "learning_rate": 1e-3 * noise,
        "step_ms": 250 + noise,
        "tokens_per_s": TOKENS * 4.0,
        "live_workers": 8,
        "live_ranks": 8,
        "bubble_share": 0.1,
        "period_ratio": 1.0,
        "was_discarded": False,
    }


def cost_of(name: str, path: Path) -> dict[str, float]:
    """Measures a reader's CPU-seconds, wall seconds and peak memory in a new process."""
    command = [sys.executable, __file__, "--reader", name, str(path)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def read(name: str, path: Path) -> None:
    """Runs a reader in this process, and prints its costs."""
    begun, cpu_begun = time.perf_counter(), time.process_time()
    READERS[name](path)
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - cpu_begun
    # Not ru_maxrss, which includes the memory of the process before exec.
    (peak_kb,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    peak_mb = int(peak_kb) / 1024
    print(
        json.dumps({"cpu_seconds": round(cpu_seconds, 3), "seconds": round(seconds, 3), "peak_mb": round(peak_mb, 1)})
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--reader", nargs=2, metavar=("NAME", "RUN_DIR"), help="used by the benchmark itself")
    options = parser.parse_args()
    if options.reader:
        read(options.reader[0], Path(options.reader[1]))
        return 0
    from measure import publish  # only here, since it takes memory that no reader needs

    figures = {}
    with tempfile.TemporaryDirectory() as directory:
        whole, run = Path(directory) / "whole", Path(directory) / "run"
        make_run(whole, options.steps)
        sizes = {name: round((whole / name).stat().st_size / 1e6, 1) for name in (METRICS, CLASS_COUNTS, EVENTS)}
        for name in READERS:
            if name.startswith("resume"):
                shutil.copytree(whole, run)
            figures[name] = cost_of(name, run if run.exists() else whole)
            shutil.rmtree(run, ignore_errors=True)
    limits_s = {"resume after half": 5.0, "resume after all but 50": 1.0, "summary": 10.0, "report": 30.0}
    claims = {f"CPU-seconds, {name}": (figures[name]["cpu_seconds"], limit) for name, limit in limits_s.items()}
    for name in limits_s:
        more_mb = figures[name]["peak_mb"] - figures["nothing"]["peak_mb"]
        claims[f"MB of memory, {name}"] = (round(more_mb, 1), 100.0 if name.startswith("resume") else 500.0)
    shape = {"steps": options.steps, "layers": LAYERS, "classes": CLASSES}
    return publish("record", {"shape": shape, "file_mb": sizes, "readers": figures}, claims)


if __name__ == "__main__":
    sys.exit(main())
