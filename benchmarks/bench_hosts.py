"""One of four hosts of ``swift train`` is killed, frozen or cut off at a random moment; the other three resume.

Prints seconds until no process of a survivor is left, and the largest distance of the losses from those of the same run
on one host without a fault. Cutting a wire requires root, for a network namespace per host; it is left out otherwise.
"""

import argparse
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from children import tell
from faults.machines import BridgedMachines
from measure import publish

from swift.checkpoint.manifest import checkpoint_steps
from swift.runlog.reading import read_run

_SWIFT = [sys.executable, "-m", "swift"]
_CONFIG = Path(__file__).parent.parent / "experiments" / "recycle" / "kill.gin"
_NUM_HOSTS = 4
_SETTINGS = ["Topology.num_stages=1", "ModelConfig.num_layers=1", "ModelConfig.moe_pattern=(True,)"]
_SETTINGS += ["Experiment.num_steps=100000", "CheckpointConfig.every=10"]
_ALL, _FEWER = ([f"Topology.num_pipelines={hosts}", f"Experiment.num_microbatches={12 // hosts}"] for hosts in (4, 3))
_MARK, _QUICKLY = "SWIFT_BENCH_HOST", {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
_LATEST_S, _PATIENCE_S, _LIMIT_S, _MAX_LOSS_DISTANCE = 6.0, 300.0, 60.0, 1e-8


@dataclass(frozen=True)
class Episode:
    """A fault on one host, the end of the run, and its resumption on the others.

    Attributes:
        kind: ``kill``, ``freeze`` or ``cut``.
        host: number of the host that was lost.
        step: number of recorded iterations when the fault occurred.
        seconds: seconds until no process was left on the other hosts, nor on a host that was cut off.
        resumed_from: iteration from which the three others resumed.
        last: last iteration that they should record.
        complaint: description of what went wrong, or empty if nothing did.
    """

    kind: str
    host: int
    step: int = 0
    seconds: float = _PATIENCE_S
    resumed_from: int = 0
    last: int = 0
    complaint: str = ""


def has_networks() -> bool:
    """Returns whether this machine can give each host its own network namespace."""
    with (
        tempfile.TemporaryDirectory() as directory,
        suppress(OSError, subprocess.CalledProcessError),
        BridgedMachines(Path(directory)),
    ):
        return True
    return False


def alive(mark: str) -> Iterator[int]:
    """Yields the process ids of a host, except those of processes that have ended."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state = (path / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and f"{_MARK}={mark}" in (path / "environ").read_text(errors="replace").split("\0"):
                yield int(path.name)


def wait_until(holds: Callable[[], bool]) -> float | None:
    """Waits until a condition holds; returns the seconds waited, or None after a timeout."""
    begun = time.monotonic()
    while not holds():
        if time.monotonic() - begun > _PATIENCE_S:
            return None
        time.sleep(0.1)
    return time.monotonic() - begun


@contextmanager
def running(
    run_dir: Path, num_hosts: int, settings: Sequence[str], *options: str, network: BridgedMachines | None = None
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Runs hosts for the duration of the ``with`` block; the environment of every process names its host."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"{'127.0.0.1' if network is None else 'node0'}:{probe.getsockname()[1]}"
    place = ["--run-dir", str(run_dir), "--coordinator", address, "--num-hosts", str(num_hosts)]
    place += [] if network is None else ["--insecure-network"]
    sets = [word for setting in (*_SETTINGS, *settings) for word in ("--set", setting)]
    hosts: list[subprocess.Popen[bytes]] = []
    try:
        for host in range(num_hosts):
            command = [*_SWIFT, "train", str(_CONFIG), *sets, *options, *place, "--host", str(host)]
            environment = os.environ | _QUICKLY | {_MARK: f"{run_dir}:{host}"}
            inside = [] if network is None else network.wrap(host)
            with open(run_dir.parent / f"host{host}-of-{num_hosts}.txt", "wb") as said:
                hosts.append(subprocess.Popen([*inside, *command], env=environment, stdout=said, stderr=said))
        yield hosts
    finally:
        for host in range(num_hosts):
            strike("kill", host, run_dir, None)
        for process in hosts:
            process.wait()


def strike(kind: str, host: int, run_dir: Path, network: BridgedMachines | None) -> None:
    """Kills, freezes or cuts off a host."""
    if kind == "cut":
        assert network is not None
        network.cut(host)
        return
    for pid in alive(f"{run_dir}:{host}"):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


def episode(kind: str, chance: random.Random, top: Path) -> Episode:
    """Runs four hosts, loses one, and resumes on the others."""
    run_dir, lost, late_s = top / "run", chance.randrange(_NUM_HOSTS), chance.uniform(0, _LATEST_S)
    # A host that is cut off is still alive, and must also end by itself.
    ending = [host for host in range(_NUM_HOSTS) if host != lost or kind == "cut"]
    marks = [f"{run_dir}:{host}" for host in ending]
    with ExitStack() as stack:
        network = stack.enter_context(BridgedMachines(top, _NUM_HOSTS)) if kind == "cut" else None
        hosts = stack.enter_context(running(run_dir, _NUM_HOSTS, _ALL, network=network))
        if wait_until(lambda: bool(checkpoint_steps(run_dir / "checkpoints"))) is None:
            return Episode(kind, lost, complaint="no checkpoint is saved")
        time.sleep(late_s)
        step = (run_dir / "metrics.jsonl").read_bytes().count(b"\n")
        strike(kind, lost, run_dir, network)
        seconds = wait_until(lambda: not any(pid for mark in marks for pid in alive(mark)))
        if seconds is None:
            return Episode(kind, lost, step, complaint=f"processes are left after {_PATIENCE_S:.0f} s")
        codes = tuple(hosts[host].wait() for host in ending)
    last = checkpoint_steps(run_dir / "checkpoints")[-1] + 3
    with running(run_dir, _NUM_HOSTS - 1, _FEWER, "--resume", "--stop-at", str(last)) as hosts:
        is_over = wait_until(lambda: all(host.poll() is not None for host in hosts)) is not None
        ended = [host.poll() for host in hosts]
    complaint = "" if is_over and not any(ended) else f"the others do not resume: {ended}"
    if set(codes) != {3}:
        complaint = f"ended with {codes}"
    resumed_from = next(
        (event["step"] for event in reversed(read_run(run_dir).events) if event["event"] == "resume"), 0
    )
    return Episode(kind, lost, step, round(seconds, 1), resumed_from, last, complaint)


def losses(run_dir: Path) -> np.ndarray:
    """Reads the losses of all iterations of a run."""
    return np.array([record["loss"] for record in read_run(run_dir).metrics])


def distance(run_dir: Path, expected: np.ndarray, last: int) -> float:
    """Computes a run's largest deviation from the losses without a fault; infinite if an iteration is missing."""
    found = losses(run_dir)
    return float(np.abs(found - expected[:last]).max()) if len(found) == last else float("inf")


def undisturbed(run_dir: Path, last: int) -> np.ndarray:
    """Returns the losses of the same run on one host without a fault."""
    sets = [word for setting in (*_SETTINGS, *_ALL) for word in ("--set", setting)]
    command = [*_SWIFT, "train", str(_CONFIG), *sets, "--run-dir", str(run_dir), "--stop-at", str(last)]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | _QUICKLY)
    return losses(run_dir)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=2, help="faults of each kind (default: 2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="directory for the runs, which are removed otherwise")
    options = parser.parse_args()
    kinds = ["kill", "freeze", *(["cut"] if has_networks() else [])]
    chance, found = random.Random(options.seed), []
    with ExitStack() as stack:
        top = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for number in range(options.faults * len(kinds)):
            (top / str(number)).mkdir(parents=True)
            found.append(episode(kinds[number % len(kinds)], chance, top / str(number)))
            tell(f"{number + 1} of {options.faults * len(kinds)}: {found[-1]}")
        last = max(one.last for one in found)
        expected = undisturbed(top / "whole", last) if last else np.zeros(0)
        distances = [distance(top / str(n) / "run", expected, one.last) for n, one in enumerate(found) if one.last]
    seconds = {kind: [one.seconds for one in found if one.kind == kind] for kind in kinds}
    figures: dict[str, Any] = {
        "hosts": _NUM_HOSTS,
        "median_s": {kind: statistics.median(values) for kind, values in seconds.items()},
        "largest_s": {kind: max(values) for kind, values in seconds.items()},
        "episodes": [asdict(one) for one in found],
    }
    claims = {
        "seconds until no process is left": (max(one.seconds for one in found), _LIMIT_S),
        "distance of the losses from those without a fault": (max(distances, default=0.0), _MAX_LOSS_DISTANCE),
        "faults after which a run did not end or resume as promised": (
            float(sum(bool(one.complaint) for one in found)),
            0.0,
        ),
    }
    return publish("lost hosts", figures, claims)


if __name__ == "__main__":
    sys.exit(main())
