"""Trace for Perfetto (ui.perfetto.dev) and chrome://tracing, with a track per worker and an arrow per message.

It uses the Trace Event Format's complete events ("X"), flow events ("s", "f") and metadata ("M"), with times in
microseconds.
"""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from swift.draw.text import KIND_NAMES
from swift.schedules.problem import Kind, Problem, TimedOp
from swift.schedules.schedule import Schedule, makespan
from swift.topology import worker_name

UNIT_US = 1000.0
"""Microseconds per unit of the costs' time, chosen so that one unit is shown as a millisecond."""


def trace_json(schedule: Schedule) -> Iterator[str]:
    """Yields pieces of one JSON document, ``{"traceEvents": [...], ...}``."""
    yield '{"displayTimeUnit": "ms", "traceEvents": [\n'
    for index, event in enumerate(trace_events(schedule)):
        yield (",\n" if index else "") + json.dumps(event)
    yield "\n]}\n"


def trace_events(schedule: Schedule) -> Iterator[dict[str, Any]]:
    """Yields track names, then ops, then messages; ``pid`` is the worker's pipeline, ``tid`` its stage."""
    yield from _tracks(schedule)
    for timed in schedule.ops():
        yield _op_event(timed, schedule.problem)
    yield from _messages(schedule)


def _tracks(schedule: Schedule) -> Iterator[dict[str, Any]]:
    problem = schedule.problem
    for d in range(problem.num_pipelines):
        yield {"ph": "M", "pid": d, "name": "process_name", "args": {"name": f"pipeline {d}"}}
        yield {"ph": "M", "pid": d, "name": "process_sort_index", "args": {"sort_index": d}}
    for d, p in problem.topology.workers:
        failed = (d, p) in problem.failed
        name = f"worker {worker_name((d, p))}" + " (failed)" * failed
        yield {"ph": "M", "pid": d, "tid": p, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": d, "tid": p, "name": "thread_sort_index", "args": {"sort_index": p}}
        if failed:
            # Perfetto hides tracks without events, so a failed worker gets one that covers the whole time.
            whole = {"ts": 0.0, "dur": makespan(schedule) * UNIT_US}
            yield {"ph": "X", "pid": d, "tid": p, "name": "failed", "cat": "failed", **whole, "args": {}}


def _op_event(timed: TimedOp, problem: Problem) -> dict[str, Any]:
    (kind, iteration, pipeline, microbatch, chunk), (d, p), start, end = timed
    args: dict[str, Any] = {"iteration": iteration, "stage": p, "does": KIND_NAMES[kind]}
    if not problem.is_plain:
        args["chunk"] = chunk
    if kind != Kind.U:
        args |= {"pipeline": pipeline, "microbatch": microbatch, "rerouted": pipeline != d}
    return {
        "ph": "X",
        "pid": d,
        "tid": p,
        "name": kind.name if kind == Kind.U else f"{kind.name} {pipeline}:{microbatch}",
        "cat": kind.name,
        "ts": start * UNIT_US,
        "dur": (end - start) * UNIT_US,
        "args": args,
    }


def _messages(schedule: Schedule) -> Iterator[dict[str, Any]]:
    """Yields arrows from F to the next chunk's F, and from B (or W, without decoupling) to the previous chunk's B."""
    problem, rows = schedule.problem, schedule.rows_of_microbatches
    back, number = Kind.B if problem.decoupled else Kind.W, 0
    for name, sender, reader, step in (("activation", Kind.F, Kind.F, 1), ("gradient", back, Kind.B, -1)):
        for k, m, i in np.ndindex(*rows.shape[1:3], problem.num_chunks - 1):
            chunk = i if step > 0 else i + 1
            ends = ("s", rows[sender, k, m, chunk]), ("f", rows[reader, k, m, chunk + step])
            if len({schedule.worker[row] for _, row in ends}) == 1:
                continue
            number += 1
            for phase, row in ends:
                d, p = divmod(int(schedule.worker[row]), problem.num_stages)
                yield {
                    "ph": phase,
                    "bp": "e",
                    "id": number,
                    "name": name,
                    "cat": "message",
                    "pid": d,
                    "tid": p,
                    "ts": float(schedule.start[row]) * UNIT_US,
                }
