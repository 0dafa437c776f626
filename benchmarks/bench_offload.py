"""An input host on the other core: seconds and CPU-seconds of the machine that asks, over those of making it all alone.

Two cores can show what the asking machine is spared, not how much faster many hosts are: one core makes the samples, as
it would here, and the other one is free for training. The operators make a spectrogram of noise. Rounds take turns.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from input_pipelines import noises
from measure import publish

from swift.data.pipeline import Pipeline, plain_plan
from swift.data.sample_store import pipeline_facts
from swift.data.samples import Samples
from swift.data.survey import in_order
from swift.input.client import connect
from swift.input.server import serve_input

KEY = "the key of a benchmark, which nobody else has to know"
RECORDS = 300
LIMIT = 0.5


def served(path: str) -> list[Pipeline]:
    """Returns the pipelines that the input host serves."""
    return [noises(path)]


def serve(path: str) -> None:
    """Serves the pipeline with one process on the last core until this program exits."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        serve_input(listener, KEY, partial(served, path), 1, lambda _: print(port, flush=True), lambda: False)


def cost(samples: Samples, plan: Any, hosts: Any) -> tuple[float, float]:
    """Produces all samples; returns (wall seconds, CPU-seconds of this process)."""
    begun, cpu = time.perf_counter(), time.process_time()
    for _, _one in zip(range(RECORDS), in_order(samples, plan, hosts=hosts), strict=False):
        pass
    return time.perf_counter() - begun, time.process_time() - cpu


def measure(path: str, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Measures reading with and without the input host, in turns."""
    pipeline = noises(path)
    alone = replace(plain_plan(pipeline), num_threads=1, num_ahead=2)
    asking = replace(alone, num_offloaded=1, alone=(1, 0))
    found: dict[str, list[tuple[float, float]]] = {"alone": [], "with a host": []}
    host = subprocess.Popen([sys.executable, __file__, "--serve", path], stdout=subprocess.PIPE, text=True)
    try:
        assert host.stdout is not None
        address = ("127.0.0.1", int(host.stdout.readline()))
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        hosts = connect([address], KEY, pipeline_facts(pipeline), lambda line: print(line, file=sys.stderr))
        for _ in range(rounds + 1):  # the first round is a warm-up
            found["alone"].append(cost(Samples(alone, 0), alone, None))
            found["with a host"].append(cost(Samples(asking, 0, hosts=hosts), asking, hosts))
        assert hosts.num_workers == 1, "the host was lost"
        hosts.close()
    finally:
        host.kill()
        host.wait()
    return {name: rows[1:] for name, rows in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", metavar="PATH", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return 0
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "seeds.jsonl"
        path.write_text("".join(f'{{"seed": {number}}}\n' for number in range(RECORDS)))
        found = measure(str(path), options.rounds)
    pairs = list(zip(found["with a host"], found["alone"], strict=True))
    wall, cpu = (statistics.median(with_one[kind] / alone[kind] for with_one, alone in pairs) for kind in (0, 1))
    claims = {"CPU-seconds of the asking machine over making it all there": (round(cpu, 3), LIMIT)}
    return publish("input host on the other core", {"seconds_ratio": round(wall, 3), "runs": found}, claims)


if __name__ == "__main__":
    sys.exit(main())
