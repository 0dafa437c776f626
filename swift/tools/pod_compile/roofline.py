"""Predicted time of an iteration: the roofline of its ops, tick by tick, and its collectives on the pod's links.

No overlap is assumed. A tick of a pipeline takes as long as its longest op, because all workers wait for each other's
messages.

T: ticks, R: rows of the axis ``worker``, C: chunks.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from swift.mesh.hlo_collectives import Collective
from swift.pipeline import scopes
from swift.schedules.ops import Kind
from swift.tools.pod_compile.interconnect import Interconnect
from swift.tools.pod_compile.op_work import EMBEDDING, HEAD, Work
from swift.tools.pod_compile.repetitions import OTHER, Runs

_Value = TypeVar("_Value")
_OPS = {Kind.F: scopes.FORWARD, Kind.B: scopes.BACKWARD_INPUT, Kind.W: scopes.BACKWARD_WEIGHT}
_UPDATE = (scopes.UPDATE, scopes.COLLECT, scopes.PEERS, scopes.MATERIALIZE)


def total_flops(runs: Runs, work: Mapping[str, Work]) -> int:
    """Floating-point operations of an iteration, over all devices."""
    live, K = runs.spec.live, runs.num_iterations
    total = live.num_live * K * work[scopes.UPDATE].num_flops
    if runs.table is None:
        total += runs.spec.num_microbatches * work[scopes.MICROBATCH].num_flops
    else:
        for name in _OPS.values():
            num_ops_C = runs.ops(name).sum(axis=0).tolist()
            total += sum(ops * one.num_flops for ops, one in zip(num_ops_C, _by_chunk(runs, work, name), strict=True))
        total += int(runs.ops(scopes.BACKWARD_INPUT)[:, 0].sum()) * work[EMBEDDING].num_flops
        total += int(runs.ops(scopes.FORWARD)[:, -1].sum()) * work[HEAD].num_flops
    return total * live.num_ranks // K


def predict(
    runs: Runs, work: Mapping[str, Work], found: Sequence[Collective], links: Interconnect, dtype: str
) -> dict[str, float] | None:
    """Predicts the milliseconds of an iteration by part; None if the chip's figures are unknown.

    Args:
        runs: run counts of the program's parts.
        work: work of the ops.
        found: collectives of the program.
        links: links that the collectives use.
        dtype: compute dtype.
    """
    chip, K = links.pod.chip, runs.num_iterations
    if not chip.peak_flops or dtype not in chip.peak_flops:
        return None
    busy = {name: one.seconds(chip, dtype) for name, one in work.items()}
    nothing = dict.fromkeys((*_OPS.values(), scopes.MICROBATCH), np.zeros(len(runs.spec.chunks.sizes)))
    inside_C = dict(nothing)
    update_R, messages, other = np.zeros(runs.spec.live.num_live), 0.0, 0.0
    for one in found:
        part, runs_R = runs.part(one).partition("/")[0], runs.of(one)
        seconds = links.seconds(one)
        if part in inside_C:
            inside_C[part] = inside_C[part] + runs.trips_C(one) * seconds
        elif part in _UPDATE:
            update_R += runs_R * seconds
        elif part == OTHER:
            other += int(runs_R.max()) * seconds
        else:
            messages += int(runs_R.max()) * seconds
    computing = _ticks(runs, busy, nothing)
    parts = {
        "compute": computing,
        "tokens": _ticks(runs, busy, inside_C) - computing,
        "messages": messages,
        "update": K * busy[scopes.UPDATE],
        "exchange": float(update_R.max()),
        "other": other,
    }
    parts_ms = {f"{name}_ms": 1e3 * seconds / K for name, seconds in parts.items()}
    return {"step_ms": sum(parts_ms.values()), **parts_ms}


def _by_chunk(runs: Runs, by_name: Mapping[str, _Value], name: str) -> list[_Value]:
    """Value of an op of every chunk; they may be unlike."""
    chunks = range(len(runs.spec.chunks.sizes))
    return [by_name[name] if name in by_name else by_name[f"{name}/{chunk}"] for chunk in chunks]


def _ticks(runs: Runs, busy: Mapping[str, float], inside_C: Mapping[str, np.ndarray]) -> float:
    """Seconds of all ops of a call, where all workers wait for the longest op of every tick.

    Args:
        runs: run counts of the program's parts.
        busy: seconds of computing of each part.
        inside_C: seconds of the collectives in an op of each chunk, by part.
    """
    if runs.table is None:
        return runs.spec.num_microbatches * (busy[scopes.MICROBATCH] + float(inside_C[scopes.MICROBATCH].max()))
    num_ticks = runs.table.phase_bounds[-1]
    opcode_TR, chunk_TR = runs.table.opcode_TR[:num_ticks], runs.table.chunk_TR[:num_ticks]
    took_TR = np.zeros(opcode_TR.shape)
    for kind, name in _OPS.items():
        took_TR += (opcode_TR == kind + 1) * (np.array(_by_chunk(runs, busy, name)) + inside_C[name])[chunk_TR]
    took_TR += (opcode_TR == Kind.F + 1) * (chunk_TR == len(runs.spec.chunks.sizes) - 1) * busy[HEAD]
    took_TR += (opcode_TR == Kind.B + 1) * (chunk_TR == 0) * busy[EMBEDDING]
    return float(took_TR.max(axis=1).sum())
