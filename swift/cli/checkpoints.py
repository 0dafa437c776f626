"""``swift checkpoint list|inspect|verify DIR``: shows and verifies the checkpoints of a run."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from swift.checkpoint.arrays import Verifier
from swift.checkpoint.inspection import coverage, describe_restore, find_checkpoints, find_damage, overview
from swift.checkpoint.manifest import checkpoint_path, read_manifest, step_named
from swift.errors import RunError, SettingError
from swift.terminal_table import TerminalTable


def checkpoint(options: argparse.Namespace) -> None:
    """Runs ``swift checkpoint ACTION DIR``."""
    directory, step = find_checkpoints(options.dir)
    if options.action == "inspect":
        _inspect(options, directory, step if options.step is None else step_named(directory, options.step))
    elif options.action == "verify":
        _verify(options, directory, step)
    else:
        rows = overview(directory)
        _show(options, {"checkpoints": rows}, *_overview_parts(rows))


def _inspect(options: argparse.Namespace, directory: Path, step: int | None) -> None:
    rows = overview(directory)
    steps = [row["step"] for row in rows]
    step = steps[-1] if step is None else step
    if step not in steps:
        raise SettingError("--step", step, f"must be one of {', '.join(map(str, steps))}, which have a checkpoint")
    manifest = read_manifest(checkpoint_path(directory, step), "DIR")
    expert_rows = coverage(manifest)
    lines, restore = describe_restore(directory, step)
    (row,) = (row for row in rows if row["step"] == step)
    dense = {"bytes": manifest.dense.num_bytes, "hashes": manifest.dense.contents}
    facts = {"checkpoint": row, "dense": dense, "experts": expert_rows, "restore": restore}
    title = f"iteration {step}: the newest copy of every expert"
    headings = ("layer", "class", "step", "age", "updates unsaved", "bytes", "hash", "falls back to")
    table = TerminalTable(headings, texts=("hash",))
    for expert in expert_rows:
        names = ("layer", "class", "step", "age", "updates_unsaved", "bytes", "hash", "fallback")
        table.add_row(*("-" if expert[name] is None else f"{expert[name]}" for name in names))
    _show(options, facts, *_overview_parts([row]), title, table, "a restore takes", *(f"  {line}" for line in lines))


def _verify(options: argparse.Namespace, directory: Path, step: int | None) -> None:
    checker = Verifier(directory)
    damage = list(find_damage(directory, step, checker))
    lines, restore = describe_restore(directory, step, checker)
    verdict = [f"damaged: {problem}" for problem in damage] or ["all files and values are as they were saved"]
    facts = {"damaged": damage, "restore": restore}
    _show(options, facts, *verdict, "a restore takes", *(f"  {line}" for line in lines))
    if damage:
        raise RunError(f"{options.dir}: {len(damage)} of its files or arrays damaged or missing")


def _overview_parts(rows: list[dict[str, Any]]) -> Iterator[TerminalTable | str]:
    """Yields a table of the readable checkpoints, then one line for each checkpoint that cannot be read."""
    has_losses = any(row.get("validation_loss") is not None for row in rows)
    headings = ("step", "experts per layer", "MB", "oldest expert", "lost tokens", "faults")
    table = TerminalTable((*headings, *["validation loss"] * has_losses))
    for row in rows:
        if "error" not in row:
            experts = "all" if row["is_full"] else str(row["experts_per_layer"])
            megabytes, oldest = f"{row['bytes'] / 1e6:.2f}", f"step {row['oldest_expert']}"
            lost, faults = f"{100 * row['plt']:.2f} %", str(row["faults"])
            loss = "-" if row["validation_loss"] is None else f"{row['validation_loss']:.4f}"
            table.add_row(str(row["step"]), experts, megabytes, oldest, lost, faults, *[loss] * has_losses)
    yield table
    yield from (f"step {row['step']} {row['error']}" for row in rows if "error" in row)


def _show(options: argparse.Namespace, facts: dict[str, Any], *parts: TerminalTable | str) -> None:
    if options.format == "json":
        print(json.dumps(facts))
        return
    console = Console(soft_wrap=True)
    for part in parts:
        console.print(part, highlight=False, markup=False)
