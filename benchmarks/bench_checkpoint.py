"""Cost of a checkpoint for a running iteration: partial ones against Orbax's asynchronous save of the full state.

In every round each way of saving is measured on the same state: a plain iteration, then one that begins with a save
and runs while it is written. Wall time counts, because training waits; so nothing else should run on the machine.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from measure import Trainee, demo, publish, turns
from orbax.checkpoint import v1 as ocp

from swift.checkpoint.config import CheckpointConfig
from swift.checkpoint.selection import partial_bytes
from swift.config.experiment import Experiment
from swift.experts.config import ExpertConfig
from swift.experts.placement.symi import Symi
from swift.mesh.live import storage_mesh
from swift.models.config import ModelConfig
from swift.runlog.run_directory import RunDirectory
from swift.topology import Topology
from swift.train.build import make_step_spec
from swift.train.checkpointer import Checkpointer
from swift.train.saved_state import split_of

CLASSES = 16
GPT_350M_16E = Experiment(
    model=ModelConfig(num_layers=24, model_dim=1024, num_heads=16, ffn_dim=4096, sequence_length=2048),
    experts=ExpertConfig(num_classes=CLASSES, slots_per_rank=1),
    topology=Topology(num_expert_ranks=CLASSES),
)


class Ours:
    """Saves K experts of every layer, as ``swift train`` does.

    Args:
        trainee: experiment whose state is saved.
        directory: directory of the checkpoints.
        k: experts per layer, or ``all``.
    """

    def __init__(self, trainee: Trainee, directory: Path, k: Any):
        self._trainee = trainee
        experiment = replace(trainee.experiment, checkpoint=CheckpointConfig(every=1, experts_per_layer=k))
        self._saver = Checkpointer(experiment, trainee.spec, RunDirectory.create(directory, ""), None)
        self.begin()  # the first save is a full one
        self.end()

    def begin(self) -> None:
        """Runs the part of a save for which training waits."""
        trainee = self._trainee
        self._saver.save(trainee.spec, trainee.state, {}, trainee.count + 1, full=False)

    def end(self) -> None:
        """Waits for the rest of the save."""
        lines = self._saver.follow(wait=True)
        assert not lines, lines


class Orbax:
    """Saves the full state with Orbax's asynchronous save and its defaults; keeps the last two checkpoints."""

    def __init__(self, trainee: Trainee, directory: Path):
        self._trainee, self._path, self._saved = trainee, directory, list[Path]()
        self.begin()
        self.end()

    def begin(self) -> None:
        """Runs the part of a save for which training waits: the next iteration donates the old state."""
        self._saved.append(self._path / f"{self._trainee.count}")
        state = self._trainee.state
        tree = {name: getattr(state, name) for name in ("step", "master", "moments", "placement")}
        self._response = ocp.save_async(self._saved[-1], tree)

    def end(self) -> None:
        """Waits for the rest of the save."""
        self._response.result()
        while len(self._saved) > 2:
            shutil.rmtree(self._saved.pop(0))


def resident_bytes() -> int:
    """Reads the resident memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


@contextmanager
def watched(peaks: list[float]) -> Any:
    """Context that appends the peak increase of resident memory within the block, in megabytes, to ``peaks``."""
    before, is_over, highest = resident_bytes(), threading.Event(), [0]

    def watch() -> None:
        while not is_over.wait(0.002):
            highest[0] = max(highest[0], resident_bytes() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    is_over.set()
    thread.join()
    peaks.append(highest[0] / 1e6)


def timed(call: Callable[[], Any]) -> float:
    """Measures the duration of a call in milliseconds."""
    begun = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - begun)


def stalls(trainee: Trainee, ways: dict[str, Any], rounds: int) -> dict[str, dict[str, Any]]:
    """Measures, for every way of saving, the median time training waits and the median slowdown of the iteration."""
    found: dict[str, dict[str, list[float]]] = {
        name: {"blocked_ms": [], "stall_ms": [], "written_ms": [], "peak_mb": []} for name in ways
    }
    plain = list[float]()
    for name in turns(list(ways), rounds):
        trainee()
        plain.append(timed(trainee))
        with watched(found[name]["peak_mb"]):
            begun = time.perf_counter()
            found[name]["blocked_ms"].append(timed(ways[name].begin))
            trainee()
            found[name]["stall_ms"].append(1000 * (time.perf_counter() - begun) - plain[-1])
            ways[name].end()
            found[name]["written_ms"].append(1000 * (time.perf_counter() - begun))
    medians = {name: {what: round(statistics.median(of), 2) for what, of in own.items()} for name, own in found.items()}
    return medians | {"plain_step": {"ms": round(statistics.median(plain), 2)}}


def growth(trainee: Trainee, way: Ours, num_saves: int) -> dict[str, float]:
    """Measures the growth of memory, in megabytes, from the first quarter of many saves to the last quarter."""
    memory = []
    for _ in range(num_saves):
        way.begin()
        trainee()
        way.end()
        memory.append(resident_bytes() / 1e6)
    quarter = num_saves // 4
    first, last = statistics.median(memory[:quarter]), statistics.median(memory[-quarter:])
    return {"saves": num_saves, "resident_mb": round(first, 1), "grown_mb": round(last - first, 1)}


def sizes(experiment: Experiment) -> dict[str, Any]:
    """Computes the sizes of partial checkpoints, as shares of a full one, from the shapes of the state alone."""
    split = split_of(make_step_spec(experiment, storage_mesh(experiment.topology)))
    num_bytes = {name: int(np.prod(leaf.shape)) * leaf.dtype.itemsize for name, leaf in split.shapes.items()}
    dense = sum(num_bytes[name] for name in split.dense_shapes)
    total = sum(num_bytes.values())
    share = {k: round(partial_bytes(dense, total - dense, k, CLASSES) / total, 4) for k in (1, 2, 4, CLASSES)}
    return {"full_gb": round(total / 1e9, 3), "dense_share": round(dense / total, 4), "share_of_full": share}


def main() -> int:
    """Measures and prints the figures; returns exit code 1 if a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--saves", type=int, default=200)
    options = parser.parse_args()
    experiment = replace(demo(Symi(), "decoupled"), experts=ExpertConfig(num_classes=CLASSES, slots_per_rank=4))
    trainee = Trainee(experiment)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        (path / "orbax").mkdir()
        ways = {f"k_{k}": Ours(trainee, path / f"k_{k}", k) for k in (1, 4, "all")}
        ways["orbax_full"] = Orbax(trainee, path / "orbax")
        found = stalls(trainee, ways, options.rounds)
        grown = growth(trainee, ways["k_1"], options.saves)
    paper = {"by_shares": round(partial_bytes(0.14, 0.86, 1, 16), 4), "measured": 0.423}
    figures = {
        "state": sizes(experiment),
        "stalls": found,
        "memory": grown,
        "gpt_350m_16e": sizes(GPT_350M_16E) | {"paper_k_1": paper},
    }
    orbax, partial = found["orbax_full"], found["k_1"]
    claims = {
        "blocked, K = 1 of 16 over Orbax's full": (round(partial["blocked_ms"] / orbax["blocked_ms"], 3), 0.2),
        "memory grown over all saves, share": (round(grown["grown_mb"] / grown["resident_mb"], 4), 0.02),
    }
    return publish("checkpoint", figures, claims)


if __name__ == "__main__":
    sys.exit(main())
