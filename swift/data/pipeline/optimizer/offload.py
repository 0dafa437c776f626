"""Offloading: the first operators of records run on other hosts, where that is predicted to be faster.

An answer costs this host the time to ask and to read it, in proportion to its bytes; so what is offloaded ends where
samples are small. With a cache only what runs before it is offloaded, and so only while samples are kept.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from swift.data.pipeline.elsewhere import InputHosts, RecordAnswer, RecordRequest, asked, made_here, read_answer
from swift.data.pipeline.operators import DropDuplicates, Filter
from swift.data.pipeline.optimizer.cost import PlacedOperator, Resources, predict, steps_of, visits
from swift.data.pipeline.optimizer.profile import HostsProfile, InputProfile
from swift.data.pipeline.pipeline import Pipeline
from swift.data.pipeline.plan import InputPlan, plain_plan

_GAIN = 1.25
"""Ratio of the times without and with other hosts from which on these are worth it."""
_LEAST_S = 1.0
"""Seconds that they have to save."""
_ECHO_BYTES = 1 << 20
_ROUNDS, _RECORDS = 5, 8
_AT_MOST_S = 2.0
"""Seconds after which no further record is tried."""


def add_offload(plan: InputPlan, profile: InputProfile, resources: Resources) -> InputPlan:
    """Returns the plan with the operators on other hosts that save most; without any where none do."""
    hosts = resources.hosts
    if hosts is None:
        return plan
    here_s = predict(plan, profile).total_s(resources.num_epochs) / _speed_here(plan, profile)
    choices = [(_seconds(plan, profile, hosts, end, resources.num_epochs), end) for end in _ends(plan, profile)]
    best_s, best = min(choices, default=(here_s, 0))
    if here_s < _GAIN * best_s or here_s - best_s < _LEAST_S:
        why = f"{best_s:.3g} s instead of {here_s:.3g} s" if choices else "samples cannot be sent"
        return replace(plan, reasons=(*plan.reasons, f"offload: none; {why}"))
    last = plan.orders[0][best - 1] if best else "the source"
    processes = f"{hosts.num_workers} process{'es' if hosts.num_workers > 1 else ''}"
    reason = (
        f"offload: all up to {last} on {processes} of other hosts, {hosts.speed:.2f} times as fast as a thread here: "
        f"{best_s:.3g} s instead of {here_s:.3g} s"
    )
    return replace(
        plan,
        num_offloaded=best,
        num_processes=0,
        num_threads=hosts.num_workers,
        alone=(plan.num_threads, plan.num_processes),
        reasons=(*plan.reasons, reason),
    )


def _ends(plan: InputPlan, profile: InputProfile) -> Iterator[int]:
    last = len(plan.elements(0)) if plan.cache is None else plan.cache.num_elements
    return (end for end in range(last + 1) if end not in profile.unkept)


def _seconds(plan: InputPlan, profile: InputProfile, hosts: HostsProfile, end: int, num_epochs: float) -> float:
    """Predicts the seconds of all epochs if the first operators run on other hosts."""
    steps = list(steps_of(plan, plan.elements(0), profile))
    num, read_s = profile.num_records, profile.source.seconds
    kept = steps[-1].kept if steps else 1.0
    size = steps[end - 1].num_bytes if end else profile.source.bytes_out
    own = predict(plan, profile)

    def slower(there_s: float, here_s: float, sent: float) -> float:
        """Returns the seconds of one record: of the other hosts, the network that all share, or this one."""
        making_s = there_s / hosts.speed + hosts.ask_s[0] / hosts.num_workers
        sending_s, cpu_s = hosts.ask_s[1] * size * sent, hosts.cpu_s[0] + hosts.cpu_s[1] * size * sent
        return max(making_s, sending_s, cpu_s + here_s)

    surveyed = steps[: plan.num_surveyed]
    once_s = 0.0
    if own.once_s:
        ahead, rest = surveyed[:end], surveyed[end:]
        sent = ahead[-1].kept if ahead else 1.0
        keep_s = own.kept_bytes * profile.keep_s[0] / num
        once_s = num * slower(read_s + _sum(ahead), _sum(rest) + keep_s, sent)
    epoch_s = own.epoch_s
    if plan.cache is None:
        made = [0.0 if isinstance(one.element, Filter | DropDuplicates) else one.alone_s for one in steps]
        epoch_s = num * kept * visits(plan, profile) * slower(read_s + sum(made[:end]), sum(made[end:]), 1.0)
    return once_s + num_epochs * epoch_s


def _sum(steps: list[PlacedOperator]) -> float:
    return sum(step.seconds for step in steps)


def _speed_here(plan: InputPlan, profile: InputProfile) -> float:
    """Returns how much faster the plan's threads and processes are than one thread."""
    every = (profile.source, *profile.operators)
    computing = sum(one.cpu_s for one in every) / max(sum(one.seconds for one in every), 1e-12)
    threads = min(max(plan.num_threads, 1), max(profile.thread_gain, 1 / max(computing, 1e-3)))
    return max(1.0, float(plan.num_processes), threads)


def profile_hosts(hosts: InputHosts, pipeline: Pipeline, profile: InputProfile) -> HostsProfile | None:
    """Measures how long other hosts take for the first records, and the way there and back.

    Args:
        hosts: hosts that have the pipeline.
        pipeline: pipeline.
        profile: profile of it on this host.

    Returns:
        The profile; None if none of the hosts answers, or nothing can be sent.
    """
    plan, num_workers = plain_plan(pipeline), hosts.num_workers
    end = max((one for one in range(len(plan.orders[0]) + 1) if one not in profile.unkept), default=None)
    here_s = there_s = 0.0
    if end is not None and num_workers:  # the first record of each process may load a library
        with ThreadPoolExecutor(num_workers) as threads:
            first = asked(plan, RecordRequest(0, end))
            list(threads.map(hosts.ask, [first] * num_workers))
    begun = time.perf_counter()
    for number in range(min(_RECORDS + 1, profile.num_profiled)):
        if end is None or (number > 1 and time.perf_counter() - begun > _AT_MOST_S):
            break
        request = RecordRequest(number, end)
        answer = _answer(hosts, asked(plan, request))
        if answer is None or answer.begun is None:
            continue
        since = time.perf_counter()
        made_here(plan, request)
        if number or profile.num_profiled == 1:  # the first one may load a library
            here_s, there_s = here_s + time.perf_counter() - since, there_s + answer.took_s
    ways = [_way(hosts, size) for size in (0, _ECHO_BYTES)]
    if not here_s or not there_s or None in ways:
        return None
    (ask_s, ask_cpu_s), (long_s, long_cpu_s) = (way or (0.0, 0.0) for way in ways)
    byte_s, byte_cpu_s = max(0.0, long_s - ask_s) / _ECHO_BYTES, max(0.0, long_cpu_s - ask_cpu_s) / _ECHO_BYTES
    return HostsProfile(num_workers, num_workers * here_s / there_s, (ask_s, byte_s), (ask_cpu_s, byte_cpu_s))


def _way(hosts: InputHosts, size: int) -> tuple[float, float] | None:
    """Measures the shortest time from a request to an answer of a size, and that in which this thread computes."""
    found = list[tuple[float, float]]()
    for _ in range(_ROUNDS):
        begun, cpu = time.perf_counter(), time.thread_time()
        if _answer(hosts, b'{"echo": %d}' % size) is None:
            return None
        found.append((time.perf_counter() - begun, time.thread_time() - cpu))
    return min(found)


def _answer(hosts: InputHosts, request: bytes) -> RecordAnswer | None:
    found = hosts.ask(request)
    try:
        return None if found is None else read_answer(found[1])
    except ValueError:
        return None
