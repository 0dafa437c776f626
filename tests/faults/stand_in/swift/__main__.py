"""A run that computes nothing, whose promises a test may break, line by line."""

import fcntl
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EVERY, NUM_STEPS = 20, 1600


class Run:
    """Stand-in for `swift launch` or `swift train`."""

    def __init__(self, kind, config, run_dir, *, resume):
        self.run_dir, self.told, self.children = run_dir, [], {}
        self.checkpoints = run_dir / "checkpoints"
        found = sorted(self.checkpoints.glob("step-*/manifest.json"))
        if not resume and (run_dir / "events.jsonl").exists():
            stop(2, "the directory holds a run already; add --resume")
        if resume and not found:
            stop(2, "the directory holds no checkpoint to resume from")
        run_dir.mkdir(parents=True, exist_ok=True)
        self.lock = (run_dir / "lock").open("a")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            stop(2, "the directory is that of a run that lives")
        self.step = json.loads(found[-1].read_text())["step"] if resume else 0
        self.metrics = self.reopened("metrics.jsonl")
        self.events = self.reopened("events.jsonl")
        self.tell("resume" if resume else "start")
        if resume:
            self.tell("restore", experts={str(self.step): "all"})
        self.members = members_of(config) if kind == "launch" else []
        self.scratch = Path(tempfile.mkdtemp(prefix=f"swift-{os.getpid()}-"))
        self.generation = 0
        for member in self.members:
            self.start(member)
        for helper in ("checkpoint-service", "compile-service") if self.members else ():
            self.start(helper)
        self.form()

    def reopened(self, name):
        path = self.run_dir / name
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [line for line in lines if name == "events.jsonl" or json.loads(line)["step"] <= self.step]
        path.write_text("".join(f"{line}\n" for line in kept))
        return path.open("a")

    def tell(self, event, **fields):
        self.events.write(json.dumps({"event": event, "step": self.step, **fields}) + "\n")
        self.events.flush()

    def start(self, name):
        is_member = name in self.members
        words = ["worker", str(self.scratch), "memory", *re.findall(r"\d+", name + (" 0" * ("rank" not in name)))]
        words = words if is_member else [name, str(self.scratch)]
        command = [sys.executable, "-m", "swift", *words]
        self.children[name] = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def form(self):
        if self.members:
            self.generation += 1
            self.tell("generation_forming", generation=self.generation, members=self.members)
            self.tell("generation_live", generation=self.generation, members=self.members)

    def look_after(self):
        """Starts again who is dead or frozen."""
        for name, child in list(self.children.items()):
            state = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0]
            if child.poll() is None and state != "T":
                continue
            child.kill()
            child.wait()
            del self.children[name]
            if name in self.members:
                self.tell("process_died", process=name)
            self.start(name)
            if name in self.members:
                self.form()

    def iterate(self):
        self.step += 1
        loss = 1 + 1 / self.step + math.sin(self.step) / 1000
        self.metrics.write(json.dumps({"step": self.step, "loss": loss}) + "\n")
        self.metrics.flush()

    def save(self):
        half = self.checkpoints / f".step-{self.step:08d}.tmp"
        shutil.rmtree(half, ignore_errors=True)
        half.mkdir(parents=True)
        (half / "manifest.json").write_text(json.dumps({"step": self.step}))
        path = self.checkpoints / f"step-{self.step:08d}"
        shutil.rmtree(path, ignore_errors=True)
        half.rename(path)
        self.tell("checkpoint")

    def run(self, last, pause_s):
        try:
            while self.step < last:
                time.sleep(pause_s)
                self.scratch.mkdir(parents=True, exist_ok=True)
                self.look_after()
                if self.told:
                    self.save()
                    return 130
                self.iterate()
                if self.step % EVERY == 0:
                    self.save()
        finally:
            for child in self.children.values():
                child.kill()
                child.wait()
            shutil.rmtree(self.scratch)
        return 0


def members_of(config):
    sizes = [int(re.search(rf"num_{name} = (\d+)", config)[1]) for name in ("pipelines", "stages", "expert_ranks")]
    places = [(p, s, r) for p in range(sizes[0]) for s in range(sizes[1]) for r in range(sizes[2])]
    return [f"{p}:{s}" + (f" rank {r}" if r else "") for p, s, r in places]


def stop(code, reason):
    print(f"swift: {reason}", file=sys.stderr)
    sys.exit(code)


def main(kind, first, *words):
    if kind in ("worker", "checkpoint-service", "compile-service"):
        sys.stdin.read()  # until there is no supervisor
        shutil.rmtree(first, ignore_errors=True)
        return 0
    told = dict(itertools.pairwise(words))
    run = Run(kind, Path(first).read_text(), Path(told["--run-dir"]), resume="--resume" in words)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: run.told.append(True))
    return run.run(int(told.get("--stop-at", NUM_STEPS)), 0.03 if run.members else 0.0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
