"""File writes that end after the save they belong to has failed: the user hears of the failure, and only once."""

import subprocess
import sys

import pytest

SAVES = """
import resource, sys, time
from pathlib import Path
import numpy as np
from swift.checkpoint.storage.orbax_files import write_arrays
from swift.cli import main, models

def save(options):
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    try:
        write_arrays(Path(sys.argv[1]) / "arrays", {f"a{i}": np.zeros(100_000 if i % 2 else 9) for i in range(60)})
    except OSError as error:
        print(error, flush=True)
    time.sleep(1)  # for the other 59, which continue

if sys.argv[2] == "in a command":
    models.generate = save
    sys.exit(main(["generate", "a-run"]))
save(None)
"""


@pytest.mark.parametrize("where", ["in a command", "outside"])
def test_a_failed_save_prints_one_line_in_a_command(tmp_path, where):
    """Outside, the tracebacks are there: otherwise the work-around has nothing to work around any more."""
    line = [sys.executable, "-c", SAVES, str(tmp_path), where]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[Errno 27] File too large\n"
    assert ("Event loop is closed" in done.stderr) == (where == "outside")
