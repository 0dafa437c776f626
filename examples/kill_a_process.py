"""Kills one of two processes that train together, lets it rejoin, and reads the cost from the run's record.

python examples/kill_a_process.py [RUN_DIR]
"""

import subprocess
import sys
from pathlib import Path

from swift.report.history import history_of, incidents_of, time_by_cause
from swift.runlog import read_run, scalars

SETTINGS = Path(__file__).with_name("pair.gin")
CHAOS = ("step 100: kill 1:0 once compiled", "step 101: restart 1:0")


def main() -> None:
    run_dir = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/examples/killed")
    command = [sys.executable, "-m", "swift", "launch", "--processes", "2", str(SETTINGS)]
    subprocess.run([*command, "--run-dir", str(run_dir), "--chaos", *CHAOS], check=True)

    run = read_run(run_dir)
    history = history_of(run)
    for found in incidents_of(run, history):
        took = "" if found.took_s is None else f", {found.took_s:.2f} s"
        print(f"{found.seconds:6.1f} s, iteration {found.step:3}: {found.kind} of {', '.join(found.who)}{took}")
    spent_s = time_by_cause(run, history) or {}
    print("seconds:", ", ".join(f"{cause} {seconds:.1f}" for cause, seconds in spent_s.items() if seconds))
    print(f"{len(scalars(run, 'loss'))} iterations are recorded, each once")


if __name__ == "__main__":
    main()
