"""Threads for operators that wait or release Python's lock, processes for those that hold it."""

import math
from dataclasses import replace

from swift.data.pipeline.optimizer.cost import START_S, Resources, predict
from swift.data.pipeline.optimizer.profile import InputProfile
from swift.data.pipeline.plan import InputPlan

MOST_THREADS = 16
_LITTLE = 0.2
"""The share of a thread's time that may be waiting before another thread is worth it."""
_LEAST_S = 1e-4
"""Seconds of a record below which handing it from thread to thread takes as long."""
_GAIN = 1.4
"""Speed of two threads over one from which on threads are worth it."""


def add_workers(plan: InputPlan, profile: InputProfile, resources: Resources) -> InputPlan:
    """Returns the plan with the number of threads and processes that is predicted to be fastest."""
    seconds = profile.source.seconds + sum(one.seconds for one in profile.operators)
    waits_s = sum(one.seconds - one.cpu_s for one in (profile.source, *profile.operators))
    waiting = waits_s / max(seconds, 1e-12)
    num_threads = min(MOST_THREADS, math.ceil(1 / max(1 - waiting, 1e-3) - _LITTLE))
    total_s = predict(plan, profile).total_s(resources.num_epochs)
    gain = f"two threads are {profile.thread_gain:.2f} times as fast as one"
    said = f"{100 * waiting:.0f} % of the time is waiting, {gain}"
    if seconds < _LEAST_S:
        why = f"a record takes {1e6 * seconds:.0f} us, and handing it over would take as long"
        return replace(plan, reasons=(*plan.reasons, f"workers: none; {why}"))
    if num_threads == 1 and profile.thread_gain < _GAIN and resources.num_cores == 1:
        return replace(plan, reasons=(*plan.reasons, f"workers: none; {said}, and there is one core"))
    if profile.thread_gain >= _GAIN or resources.num_cores == 1:
        num_threads = max(num_threads, resources.num_cores)
        reason = f"workers: {num_threads} threads; {said}"
        return replace(plan, num_threads=num_threads, reasons=(*plan.reasons, reason))
    is_shared = plan.cache is None or plan.cache.kind == "disk"  # each process would have a copy of its own
    saved_s = total_s * (1 - 1 / resources.num_cores)
    if is_shared and saved_s > START_S:
        reason = f"workers: {resources.num_cores} processes; {said}, and {saved_s:.3g} s are saved"
        return replace(plan, num_processes=resources.num_cores, num_threads=1, reasons=(*plan.reasons, reason))
    num_threads = max(1, num_threads)
    why = "starting processes takes longer than they save" if is_shared else "what is kept in memory is of one process"
    reason = f"workers: {num_threads} threads; {said}; {why}"
    return replace(plan, num_threads=num_threads, reasons=(*plan.reasons, reason))
