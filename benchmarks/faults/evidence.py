"""Evidence: the files that a run has left, read without any of Swift's code."""

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TAIL = 1 << 18
_CHECKPOINT = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Lines:
    """A file of JSON objects.

    Attributes:
        records: objects that can be parsed.
        damaged: numbers, from 1, of lines that cannot; an incomplete last line does not count.
    """

    records: list[dict[str, Any]]
    damaged: list[int]


def read_lines(path: Path) -> Lines:
    """Reads the complete lines of a file; none if there is no file."""
    records, damaged = [], []
    whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for number, line in enumerate(whole, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            records.append(record)
        else:
            damaged.append(number)
    return Lines(records, damaged)


def losses(run_dir: Path) -> dict[int, float]:
    """Reads the loss of every recorded iteration."""
    records = read_lines(run_dir / "metrics.jsonl").records
    return {record["step"]: record["loss"] for record in records if "step" in record and "loss" in record}


def is_record_damaged(run_dir: Path) -> bool:
    """Whether a line of the record is no JSON object."""
    return any(read_lines(run_dir / name).damaged for name in ("metrics.jsonl", "events.jsonl"))


def newest_step(run_dir: Path) -> int:
    """Reads the last recorded iteration from the end of the file; 0 if there is none."""
    path = run_dir / "metrics.jsonl"
    with suppress(OSError, ValueError, IndexError, KeyError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        return int(json.loads(file.read().split(b"\n")[-2])["step"])
    return 0


def events(run_dir: Path) -> list[dict[str, Any]]:
    """Reads all events, in order of time."""
    return [record for record in read_lines(run_dir / "events.jsonl").records if "event" in record]


def checkpoints_there(run_dir: Path) -> list[int]:
    """Lists the iterations of checkpoints that have a manifest, oldest first."""
    found = [_CHECKPOINT.fullmatch(path.parent.name) for path in (run_dir / "checkpoints").glob("step-*/manifest.json")]
    return sorted(int(match[1]) for match in found if match)


def promised(told: list[dict[str, Any]]) -> int | None:
    """Finds the newest checkpoint reported by the run that it has not gone back behind since; None if there is none."""
    newest = None
    for event in told:
        if event["event"] == "checkpoint":
            newest = event["step"]
        elif event["event"] in ("resume", "restore") and newest is not None:
            newest = min(newest, event["step"])
    return newest


def lost_updates_at(told: list[dict[str, Any]]) -> int | None:
    """Finds the iteration at which some weights reportedly resumed from older parts; None if they never did.

    These are an expert rank's slices, or experts of whose newest copies the files are damaged. From then on losses
    differ from those of the run without faults.
    """
    for event in told:
        copies = [source.get(kind) or {} for source in event.get("sources", ()) for kind in ("weights", "moments")]
        if event["event"] == "reshard" and any(copy.get("step", event["step"]) < event["step"] for copy in copies):
            return int(event["step"])
        if event["event"] == "restore" and any(int(step) < event["step"] for step in event["experts"]):
            return int(event["step"])
    return None


def is_saving(run_dir: Path) -> bool:
    """Checks if a checkpoint is being written."""
    return any((run_dir / "checkpoints").glob(".step-*.tmp"))
