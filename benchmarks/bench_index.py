"""Index of a corpus: seconds of the first and second start on texts, and the memory that a large token file takes.

Every start is a process of its own, from its imports on. The token file is sparse: its size is real, its tokens are 0.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from swift.data.config import DataConfig
from swift.data.index import find_index
from swift.data.loader import Loader
from swift.data.sources import TextFiles, TokenFile

GB = 10**9
STEPS = (0, 1, 10**4, 10**6)
"""Batches to load, near the beginning and far into the data."""


def memory_mb(field: str) -> float:
    """Reads the memory of this process in MB: ``VmRSS`` for the current value, ``VmHWM`` for the peak so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1000


def start(source: str, path: str, cache: str) -> dict[str, float]:
    """Finds the index, opens both splits and loads a few batches; returns seconds and megabytes beyond the imports."""
    before, begun = memory_mb("VmRSS"), time.perf_counter()
    config = DataConfig(TokenFile(path, vocab_size=2) if source == "tokens" else TextFiles(f"{path}/*.txt"))
    index = find_index(config, Path(cache), lambda line: print(line, file=sys.stderr))
    assert index is not None
    shape = {"num_microbatches": 2, "sequences_per_microbatch": 8, "sequence_length": 1024}
    loaders = [Loader(config, split, seed=0, corpus=index, **shape) for split in ("train", "validation")]
    ready_s = time.perf_counter() - begun
    for loader in loaders:
        for step in STEPS:
            loader.batch(step)
    return {"ready_s": round(ready_s, 2), "memory_mb": round(memory_mb("VmHWM") - before, 1)}


def started(source: str, path: Path, cache: Path) -> dict[str, float]:
    """Runs ``start`` in a separate process."""
    command = [sys.executable, __file__, "--start", source, str(path), str(cache)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def write_texts(directory: Path, num_bytes: int) -> None:
    """Writes texts of 5 MB, each with a distinct line, up to ``num_bytes`` in total."""
    body = b"".join(b"a line of text, number %d of its kind\n" % number for number in range(125_000))
    directory.mkdir()
    for number in range(num_bytes // len(body)):
        (directory / f"{number:05}.txt").write_bytes(b"text %d\n" % number + body)


def measure(directory: Path, text_gb: float, token_gb: float) -> dict[str, Any]:
    write_texts(directory / "texts", int(text_gb * GB))
    with (directory / "tokens.bin").open("wb") as file:
        file.truncate(int(token_gb * GB) // 2 * 2)
    found: dict[str, Any] = {"text_gb": text_gb, "token_gb": token_gb}
    for source, path in (("texts", directory / "texts"), ("tokens", directory / "tokens.bin")):
        for turn in ("first", "second"):
            found[f"{source}, {turn} start"] = started(source, path, directory / "cache")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text-gb", type=float, default=1.0)
    parser.add_argument("--token-gb", type=float, default=100.0)
    parser.add_argument("--start", nargs=3, metavar=("SOURCE", "PATH", "CACHE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start:
        print(json.dumps(start(*options.start)))
        return 0
    from measure import publish

    with tempfile.TemporaryDirectory() as directory:
        found = measure(Path(directory), options.text_gb, options.token_gb)
    memory_mb = max(found[f"tokens, {turn} start"]["memory_mb"] for turn in ("first", "second"))
    return publish(
        "index of a corpus",
        found,
        {
            "seconds of the second start on the texts": (found["texts, second start"]["ready_s"], 5.0),
            "megabytes for the token file": (memory_mb, 100.0),
        },
    )


if __name__ == "__main__":
    sys.exit(main())
