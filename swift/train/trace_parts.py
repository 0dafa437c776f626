"""The largest parts of a step in a trace of JAX's profiler, by the name scopes of the code.

The profiler writes ``*.trace.json.gz`` beside the file that XProf reads. An event of a device has the name of its
instruction in the compiled program, and no scope on CPU; the text of the program has the scope of each instruction.
"""

import gzip
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from swift.pipeline import scopes

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = .*? ([a-z][a-z0-9-]*)\(", re.ASCII)
_SCOPES = re.compile(r'op_name="([^"]*)"')
_CONTROL = ("while", "conditional", "call", "async-start", "async-done")
"""Instructions that only run others, which have events of their own."""
_COLLECTIVES = (
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "all-reduce",
    "all-gather",
    "reduce-scatter",
)
"""Instructions that are shown apart from the rest of their scope. Matmuls are not: the compiler fuses them."""
_PART_OF_UPDATE = (scopes.COLLECT, scopes.PEERS, scopes.MATERIALIZE)
_SHOWN = {
    scopes.FORWARD: "forward",
    scopes.BACKWARD_INPUT: "input gradient",
    scopes.BACKWARD_WEIGHT: "weight gradient",
    scopes.UPDATE: "update",
    scopes.EMBEDDING: "embedding",
    scopes.HEAD: "head",
    scopes.COPIES: "copies of rows",
} | {name: name for name in (scopes.BLOCKS, scopes.ACTIVATIONS, scopes.GRADIENTS, scopes.MICROBATCH, *_PART_OF_UPDATE)}
"""Name scopes by which parts are told apart, as they are shown."""
_NUM_PARTS = 10


def trace_line(path: Path, steps: tuple[int, int]) -> str:
    """Returns a line on a trace: where it is and how to open it.

    Args:
        path: directory of the profiler.
        steps: first and last step of the trace.
    """
    first, last = steps
    opened = f"{_newest(path) or path} opens at https://ui.perfetto.dev"
    return f"profiler trace of iterations {first}-{last}: {opened}; or `pip install xprof` and `xprof --logdir {path}`"


def _newest(path: Path) -> Path | None:
    try:
        return max(path.rglob("*.trace.json.gz"), key=lambda file: file.stat().st_mtime, default=None)
    except OSError:
        return None


def part_lines(path: Path, steps: tuple[int, int], program_texts: Callable[[], Sequence[str]]) -> Iterator[str]:
    """Yields lines on the largest parts of a step in a trace; none if they cannot be found out, for any reason.

    Args:
        path: directory of the profiler.
        steps: first and last step of the trace.
        program_texts: function that returns the HLO texts of the programs that ran.
    """
    first, last = steps
    try:
        newest = _newest(path)
        seconds, num_devices = part_seconds(newest, program_texts()) if newest else (Counter[str](), 0)
    except Exception:  # damaged, too large for the memory, or written otherwise by another version
        return
    total_s = sum(seconds.values())
    if not total_s:
        return
    yield "largest parts of an iteration, mean over the devices; collectives include waiting for other devices:"
    for name, spent_s in seconds.most_common(_NUM_PARTS):
        mean_ms = 1000 * spent_s / num_devices / (last - first + 1)
        yield f"{100 * spent_s / total_s:6.1f} %  {mean_ms:9.2f} ms  {name}"


def part_seconds(file: Path, program_texts: Iterable[str]) -> tuple[Counter[str], int]:
    """Adds up the time of the instructions of a trace by part, over all devices.

    Args:
        file: trace in Chrome's format, compressed with gzip.
        program_texts: HLO texts of the programs that ran.

    Returns:
        (seconds by part; number of devices).
    """
    part_of: dict[str, dict[str, str | None]] = {}
    for text in program_texts:
        module = re.match(r"HloModule ([\w.-]+)", text)
        part_of[module[1] if module else ""] = instruction_parts(text)
    with gzip.open(file) as content:
        events = json.load(content)["traceEvents"]
    seconds: Counter[str] = Counter()
    devices = set()
    for event in events:
        facts = event.get("args", {})
        if event.get("ph") != "X" or "hlo_op" not in facts:
            continue
        part = part_of.get(facts.get("hlo_module", ""), {}).get(facts["hlo_op"], "other programs")
        devices.add(facts.get("device_ordinal", event["pid"]))
        if part is not None:
            seconds[part] += event["dur"] / 1e6
    return seconds, max(1, len(devices))


def instruction_parts(program_text: str) -> dict[str, str | None]:
    """Returns the part that each instruction of a program belongs to; None for one that only runs others.

    >>> instruction_parts('%sum.1 = f32[2]{0} all-reduce(a), metadata={op_name="jit(f)/U/peers/expert/psum"}')
    {'sum.1': 'update/peers/expert: all-reduce'}
    """
    parts: dict[str, str | None] = {}
    for line in program_text.splitlines():
        match = _INSTRUCTION.match(line)
        if match:
            name, kind = match.groups()
            found = _SCOPES.search(line)
            parts[name] = None if kind in _CONTROL else _part(found[1] if found else "", kind.removesuffix("-start"))
    return parts


def _part(op_name: str, kind: str) -> str:
    """Formats the known scopes of an instruction, with its kind if that is shown apart."""
    names = op_name.split("/")
    shown = []
    for index, name in enumerate(names[:-1]):
        if name in _SHOWN:
            shown.append(_SHOWN[name])
        elif index and names[index - 1] in _PART_OF_UPDATE:
            shown.append(name)  # the parameter group
    path = "/".join(shown) or "outside of named parts"
    return f"{path}: {kind}" if kind in _COLLECTIVES else path
