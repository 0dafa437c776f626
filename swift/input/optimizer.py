"""The optimizer for input pipelines: chooses the plan predicted to be fastest, from a profile of the operators.

Passes improve the plan one after another, and each is judged by the predicted time. As in cedar (section 4), an
operator's time is proportional to the bytes of the fields that it reads, so it is cheaper after an operator that
shrinks them. A dropped record costs nothing afterwards. The passes:

- Reordering: the cheapest order among those that give the same samples. Every order is judged with its best cache,
  since a cache cannot come after the first random operator.
- Caching: samples are cached where producing them again costs more than reading them, before the first random operator.
- Workers: threads for operators that wait or release Python's global interpreter lock, processes for the others.
- Offloading: input hosts run the first operators. Requesting and reading an answer costs this machine time in
  proportion to the answer's bytes, so offloading ends where samples are small. With a cache, only operators before the
  cache are offloaded, so hosts help only while it is being filled.
- Prefetching: as many samples as the workers produce at once and as memory allows.
"""

import math
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from swift.data.operators import DropDuplicates, Element, Filter, Stack, name_of
from swift.data.pipeline import CachePoint, InputPlan, Pipeline, plain_plan
from swift.data.remote_records import InputHosts, RecordAnswer, RecordRequest, make_request, read_answer, run_locally
from swift.errors import check_count, check_number
from swift.input.profile import HostsProfile, InputProfile, OperatorProfile, profile_input

_START_S = 3.0
"""Seconds that a worker process takes to start."""
_DISK_S_PER_BYTE = 1e-9
"""Seconds to read a byte of a cache in files, decoding not included."""

_READY_PER_WORKER = 2
"""Samples to prefetch for each worker thread: one is taken while the next is produced."""
_MEMORY_OVER_AHEAD = 8
"""Prefetched samples may take 1 / 8 of the memory."""

_MOST_ORDERS = 2000
"""Number of legal orders up to which all are tried; if there are more, the best one is improved by swaps."""

_MOST_THREADS = 16
_LITTLE_WAITING = 0.2
"""Share of a thread's time that may be spent waiting before another thread is worthwhile."""
_LEAST_THREADED_S = 1e-4
"""Seconds per record below which passing it between threads would take as long as producing it."""
_THREAD_GAIN = 1.4
"""Minimum speedup from a second thread for threads to be worthwhile."""

_OFFLOAD_GAIN = 1.25
"""Minimum speedup from input hosts for offloading to be worthwhile."""
_OFFLOAD_LEAST_S = 1.0
"""Minimum time in seconds that input hosts must save."""
_ECHO_BYTES = 1 << 20
_ECHO_ROUNDS, _HOST_RECORDS = 5, 8
_HOST_PROFILE_S = 2.0
"""Seconds after which profiling does not request another record from hosts."""

_AHEAD = 64
"""Documents to prefetch while an index is built."""
_CHECK_EVERY = 1000
"""One sample in this many is compared with the order as written."""


@dataclass(frozen=True)
class Resources:
    """The resources that a plan may use.

    Args:
        num_epochs: number of epochs that will be read, within which a cache has to pay off.
        num_cores: number of cores for producing samples.
        memory_bytes: memory for cached and prefetched samples.
        disk_bytes: disk space for cached samples.
        cache_directory: directory for caches in files; None for no such caches.
        hosts: profile of the input hosts; None for no hosts.
    """

    num_epochs: float = 3.0
    num_cores: int = 1
    memory_bytes: int = 1 << 30
    disk_bytes: int = 1 << 36
    cache_directory: Path | None = None
    hosts: HostsProfile | None = None

    def __post_init__(self) -> None:
        check_number("Resources.num_epochs", self.num_epochs, above=0)
        check_count("Resources.num_cores", self.num_cores, least=1)
        check_count("Resources.memory_bytes", self.memory_bytes, least=0, most=2**63)
        check_count("Resources.disk_bytes", self.disk_bytes, least=0, most=2**63)


@dataclass(frozen=True)
class Cost:
    """A plan's predicted time, in seconds of one thread for all records.

    Attributes:
        once_s: seconds before the first sample, to survey the source and fill the cache.
        epoch_s: seconds per epoch.
        kept_bytes: size of the cache in bytes.
    """

    once_s: float
    epoch_s: float
    kept_bytes: float

    def total_s(self, num_epochs: float) -> float:
        """Returns the seconds for the survey and ``num_epochs`` epochs."""
        return self.once_s + num_epochs * self.epoch_s


def predict(plan: InputPlan, profile: InputProfile) -> Cost:
    """Predicts a plan's time and its cache's size from a profile of the pipeline."""
    elements = plan.elements(0)
    steps = list(_steps_of(plan, elements, profile))
    read_s, num = profile.source.seconds, profile.num_records
    kept_num = num * (steps[-1].passing_share if steps else 1.0)
    cache, num_surveyed = plan.cache, plan.num_surveyed
    is_surveyed = bool(num_surveyed or plan.num_packed or cache)
    once_s = num * (read_s + sum(step.seconds for step in steps[:num_surveyed])) if is_surveyed else 0.0
    first, begin_s, kept_bytes = 0, read_s, 0.0
    if cache is not None:
        first = cache.num_elements
        size = steps[first - 1].num_bytes if first else profile.source.bytes_out
        kept_bytes = kept_num * size
        once_s += kept_bytes * profile.keep_s[0]
        begin_s = size * (profile.keep_s[1] + (_DISK_S_PER_BYTE if cache.kind == "disk" else 0.0))
    makes_s = sum(step.alone_s for step in steps[first:] if not isinstance(step.element, Filter | DropDuplicates))
    return Cost(once_s, kept_num * _visits(plan, profile) * (begin_s + makes_s), kept_bytes)


@dataclass(frozen=True)
class PlacedOperator:
    """An operator at its position in an order, with its predicted costs.

    Attributes:
        element: operator.
        alone_s: seconds for one sample that reaches the operator.
        seconds: ``alone_s`` times the share of records that reach the operator.
        passing_share: share of records that pass this operator and all before it.
        num_bytes: bytes of a sample after the operator.
    """

    element: Element
    alone_s: float
    seconds: float
    passing_share: float
    num_bytes: float


def _steps_of(plan: InputPlan, elements: Sequence[Element], profile: InputProfile) -> Iterator[PlacedOperator]:
    """Yields the record operators in the given order, each with its predicted time and bytes."""
    written = [name_of(element) for element in plan.pipeline.levels[0].elements]
    means = dict(zip(written, profile.operators, strict=True))
    by_name = {name_of(element): element for element in elements}
    before, passing_share = list[str](), 1.0
    size = profile.source.bytes_out
    grown = _growth(written, means, profile.source.bytes_out)
    for element in elements:
        name = name_of(element)
        operator, usual = means[name], written[: written.index(name)]
        # The profile is for the order as written: scale by every operator that has moved to the other side of this one.
        ratio = 1.0
        for other in set(before) ^ set(usual):
            if _writes_what(by_name[other], element):
                ratio *= means[other].writes_ratio if other in before else 1 / means[other].writes_ratio
        seconds = operator.seconds * ratio
        size = max(0.0, size + grown[name] * ratio)
        reach, passing_share = passing_share, passing_share * operator.kept_share
        before.append(name)
        yield PlacedOperator(element, seconds, reach * seconds, passing_share, size)


def _growth(written: Sequence[str], means: dict[str, OperatorProfile], size: float) -> dict[str, float]:
    """Returns how many bytes each operator adds to a sample in the order as written."""
    added = {}
    for name in written:
        after = means[name].bytes_out or size  # 0 if no profiled sample got this far
        added[name], size = (0.0, size) if after == size else (after - size, after)
    return added


def _writes_what(other: Element, element: Element) -> bool:
    """Whether an operator may change the size of the fields that another one reads."""
    if other.writes is None or element.reads is None:
        return other.writes != ()
    return bool(set(other.writes) & set(element.reads))


def _visits(plan: InputPlan, profile: InputProfile) -> float:
    """Returns how often a record is produced per epoch.

    With shuffled rows, a document is produced once for each row that contains a part of it.
    """
    rows = next((level for level in plan.pipeline.levels[1:] if hasattr(level.group, "length")), None)
    if rows is None or not rows.is_shuffled:
        return 1.0
    return 1.0 + profile.tokens / plan.num_packed


def _cache_choices(plan: InputPlan, profile: InputProfile, resources: Resources) -> Iterator[InputPlan]:
    """Yields the plan without a cache, and with each cache that fits and comes before the first random operator."""
    yield replace(plan, cache=None)
    elements = plan.elements(0)
    for position in range(len(elements) + 1):
        if position in profile.unkept or any(element.is_random for element in elements[:position]):
            continue
        memory, disk = (replace(plan, cache=CachePoint(position, kind)) for kind in ("memory", "disk"))
        size = predict(memory, profile).kept_bytes
        if size <= resources.memory_bytes:
            yield memory
        if resources.cache_directory is not None and size <= resources.disk_bytes:
            yield disk


def _cheapest_cache(plan: InputPlan, profile: InputProfile, resources: Resources) -> tuple[InputPlan, float]:
    """Returns the plan with the cheapest cache, which may be none, and its predicted seconds."""
    costs = [
        (predict(candidate, profile).total_s(resources.num_epochs), number, candidate)
        for number, candidate in enumerate(_cache_choices(plan, profile, resources))
    ]
    seconds, _, chosen = min(costs, key=lambda cost: cost[:2])
    return chosen, seconds


def _add_cache(plan: InputPlan, profile: InputProfile, resources: Resources) -> InputPlan:
    """Returns the plan with the cheapest cache, which may be none, and the reason."""
    best, seconds = _cheapest_cache(plan, profile, resources)
    without = predict(replace(plan, cache=None), profile).total_s(resources.num_epochs)
    if best.cache is None:
        reason = f"samples cannot be kept: {next(iter(profile.unkept.values()))}" if profile.unkept else ""
        reason = reason or f"keeping samples does not pay within {resources.num_epochs:g} epochs, or they do not fit"
        return replace(plan, cache=None, reasons=(*plan.reasons, f"cache: none; {reason}"))
    after = best.orders[0][best.cache.num_elements - 1] if best.cache.num_elements else "the source"
    size = predict(best, profile).kept_bytes
    reason = (
        f"cache: in {'memory' if best.cache.kind == 'memory' else 'files'} after {after}, {size / 1e6:,.1f} MB: "
        f"{seconds:.3g} s instead of {without:.3g} s of one core for {resources.num_epochs:g} epochs"
    )
    return replace(best, reasons=(*plan.reasons, reason))


def _must_precede(first: Element, second: Element) -> bool:
    """Whether ``first`` has to run before ``second``, which comes somewhere after it in the pipeline.

    Operators commute if neither writes a field that the other reads or writes. This includes random ones, since their
    random numbers depend on the sample and not on its position. If a moved operator raises on a record, the record is
    processed again in the order as written, so that only errors in that order count.
    """
    if first.is_fixed or second.is_fixed:
        return True
    chooses = isinstance(first, Filter | DropDuplicates)
    if chooses and not isinstance(second, Filter | DropDuplicates):
        return True  # nothing is gained by working on samples that are then dropped
    if chooses and (isinstance(first, DropDuplicates) or isinstance(second, DropDuplicates)):
        return not _keeps_equals_together(first, second)
    if second.depends_on is not None:
        return name_of(first) in second.depends_on
    return _meet(first.writes, second.reads) or _meet(first.writes, second.writes) or _meet(first.reads, second.writes)


def _keeps_equals_together(first: Element, second: Element) -> bool:
    """Whether a filter and a ``DropDuplicates`` commute.

    They do if the filter reads only the field that is compared, since it then keeps or drops equal samples together.
    """
    if isinstance(first, DropDuplicates) and isinstance(second, DropDuplicates):
        return False
    test, dropped = (second, first) if isinstance(first, DropDuplicates) else (first, second)
    assert isinstance(dropped, DropDuplicates)
    return test.reads is not None and set(test.reads) <= {dropped.field}


def _meet(fields: Sequence[str] | None, other_fields: Sequence[str] | None) -> bool:
    """Whether two sets of fields overlap; None stands for all fields."""
    if fields is None or other_fields is None:
        return fields != () and other_fields != ()
    return bool(set(fields) & set(other_fields))


def legal_orders(elements: Sequence[Element], most: int) -> Iterator[tuple[Element, ...]]:
    """Yields at most ``most`` orders of operators that give the same samples, the order as written first."""
    num = len(elements)
    before = [{i for i in range(j) if _must_precede(elements[i], elements[j])} for j in range(num)]
    left = most

    def extend(placed: tuple[int, ...]) -> Iterator[tuple[Element, ...]]:
        nonlocal left
        if left <= 0:
            return
        if len(placed) == num:
            left -= 1
            yield tuple(elements[position] for position in placed)
            return
        done = set(placed)
        for position in range(num):
            if position not in done and before[position] <= done:
                yield from extend((*placed, position))

    yield from extend(())


def _add_prefetch(plan: InputPlan, profile: InputProfile, resources: Resources) -> InputPlan:
    """Returns the plan with the number of samples to prefetch."""
    if not plan.num_threads and not plan.num_processes:
        return replace(plan, reasons=(*plan.reasons, "prefetch: none without workers"))
    size = profile.operators[-1].bytes_out if profile.operators else profile.source.bytes_out
    if plan.num_packed:
        size = 8.0 * (plan.num_packed + 1)  # int32 tokens and segments
    for level in plan.pipeline.levels:
        size *= level.group.size if isinstance(level.group, Stack) else 1
    num_ready = _READY_PER_WORKER * max(1, plan.num_threads) * max(1, plan.num_processes)
    fitting = int(resources.memory_bytes / _MEMORY_OVER_AHEAD / max(size, 1.0))
    num_ahead = max(1, min(num_ready, fitting))
    reason = f"prefetch: {num_ahead} samples of {size / 1e6:.3g} MB ahead of their use"
    return replace(plan, num_ahead=num_ahead, reasons=(*plan.reasons, reason))


def _reorder(plan: InputPlan, profile: InputProfile, resources: Resources) -> InputPlan:
    """Returns the plan with the cheapest order of the record operators; keeps the current order if none is cheaper."""

    def seconds_of(candidate: InputPlan) -> float:
        return _cheapest_cache(candidate, profile, resources)[1]

    elements = plan.pipeline.levels[0].elements
    orders = list(legal_orders(elements, _MOST_ORDERS + 1))
    candidates = [_with_order(plan, order) for order in orders[:_MOST_ORDERS]]
    best = min([plan, *candidates], key=seconds_of)
    if len(orders) > _MOST_ORDERS:
        best = _improved(best, elements, seconds_of)
    written_s, best_s = seconds_of(plan), seconds_of(best)
    if best_s >= written_s * (1 - 1e-9):
        reason = f"order: as written, the cheapest of {len(orders)} that give the same samples"
        return replace(plan, reasons=(*plan.reasons, reason))
    moved = ", ".join(best.orders[0])
    epoch_s = predict(plan, profile).epoch_s
    reason = (
        f"order: {moved}: {best_s:.3g} s instead of {written_s:.3g} s of one core as written ({epoch_s:.3g} s an epoch)"
    )
    return replace(best, reasons=(*plan.reasons, reason))


def _with_order(plan: InputPlan, order: tuple[Element, ...]) -> InputPlan:
    return replace(plan, orders=(tuple(map(name_of, order)), *plan.orders[1:]))


def _improved(plan: InputPlan, elements: tuple[Element, ...], seconds_of: object) -> InputPlan:
    """Improves a plan by swapping adjacent operators until no swap makes it cheaper."""
    assert callable(seconds_of)
    best, seconds = plan, seconds_of(plan)
    is_better = True
    while is_better:
        is_better = False
        for swapped in _swaps(best, elements):
            if seconds_of(swapped) < seconds * (1 - 1e-9):
                best, seconds, is_better = swapped, seconds_of(swapped), True
                break
    return best


def _swaps(plan: InputPlan, elements: tuple[Element, ...]) -> Iterator[InputPlan]:
    """Yields a plan for each legal swap of two adjacent operators."""
    order = plan.elements(0)
    for position in range(len(order) - 1):
        pair = sorted(order[position : position + 2], key=elements.index)
        if not _must_precede(pair[0], pair[1]):
            yield _with_order(plan, (*order[:position], order[position + 1], order[position], *order[position + 2 :]))


def _add_workers(plan: InputPlan, profile: InputProfile, resources: Resources) -> InputPlan:
    """Returns the plan with the numbers of threads and processes that are predicted to be fastest."""
    seconds = profile.source.seconds + sum(operator.seconds for operator in profile.operators)
    waits_s = sum(step.seconds - step.cpu_s for step in (profile.source, *profile.operators))
    waiting = waits_s / max(seconds, 1e-12)
    num_threads = min(_MOST_THREADS, math.ceil(1 / max(1 - waiting, 1e-3) - _LITTLE_WAITING))
    total_s = predict(plan, profile).total_s(resources.num_epochs)
    gain = f"two threads are {profile.thread_gain:.2f} times as fast as one"
    evidence = f"{100 * waiting:.0f} % of the time is waiting, {gain}"
    if seconds < _LEAST_THREADED_S:
        reason = f"a record takes {1e6 * seconds:.0f} us, and handing it over would take as long"
        return replace(plan, reasons=(*plan.reasons, f"workers: none; {reason}"))
    if num_threads == 1 and profile.thread_gain < _THREAD_GAIN and resources.num_cores == 1:
        return replace(plan, reasons=(*plan.reasons, f"workers: none; {evidence}, and there is one core"))
    if profile.thread_gain >= _THREAD_GAIN or resources.num_cores == 1:
        num_threads = max(num_threads, resources.num_cores)
        reason = f"workers: {num_threads} threads; {evidence}"
        return replace(plan, num_threads=num_threads, reasons=(*plan.reasons, reason))
    is_shared = plan.cache is None or plan.cache.kind == "disk"  # processes share no memory
    saved_s = total_s * (1 - 1 / resources.num_cores)
    if is_shared and saved_s > _START_S:
        reason = f"workers: {resources.num_cores} processes; {evidence}, and {saved_s:.3g} s are saved"
        return replace(plan, num_processes=resources.num_cores, num_threads=1, reasons=(*plan.reasons, reason))
    num_threads = max(1, num_threads)
    reason = (
        "starting processes takes longer than they save" if is_shared else "what is kept in memory is of one process"
    )
    reason = f"workers: {num_threads} threads; {evidence}; {reason}"
    return replace(plan, num_threads=num_threads, reasons=(*plan.reasons, reason))


def add_offload(plan: InputPlan, profile: InputProfile, resources: Resources) -> InputPlan:
    """Returns the plan that offloads the first n operators, with the n that saves the most time.

    The plan is unchanged if offloading does not save enough.
    """
    hosts = resources.hosts
    if hosts is None:
        return plan
    here_s = predict(plan, profile).total_s(resources.num_epochs) / _speed_here(plan, profile)
    choices = [
        (_offloaded_s(plan, profile, hosts, end, resources.num_epochs), end) for end in _offload_ends(plan, profile)
    ]
    best_s, best = min(choices, default=(here_s, 0))
    if here_s < _OFFLOAD_GAIN * best_s or here_s - best_s < _OFFLOAD_LEAST_S:
        reason = f"{best_s:.3g} s instead of {here_s:.3g} s" if choices else "samples cannot be sent"
        return replace(plan, reasons=(*plan.reasons, f"offload: none; {reason}"))
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


def _offload_ends(plan: InputPlan, profile: InputProfile) -> Iterator[int]:
    last = len(plan.elements(0)) if plan.cache is None else plan.cache.num_elements
    return (end for end in range(last + 1) if end not in profile.unkept)


def _offloaded_s(plan: InputPlan, profile: InputProfile, hosts: HostsProfile, end: int, num_epochs: float) -> float:
    """Predicts the seconds of all epochs if input hosts run the first ``end`` operators."""
    steps = list(_steps_of(plan, plan.elements(0), profile))
    num, read_s = profile.num_records, profile.source.seconds
    passing_share = steps[-1].passing_share if steps else 1.0
    size = steps[end - 1].num_bytes if end else profile.source.bytes_out
    prediction = predict(plan, profile)

    def slower(there_s: float, here_s: float, sent: float) -> float:
        """Returns the seconds per record of the bottleneck: the hosts, the shared network, or this machine."""
        making_s = there_s / hosts.speed + hosts.ask_s[0] / hosts.num_workers
        sending_s, cpu_s = hosts.ask_s[1] * size * sent, hosts.cpu_s[0] + hosts.cpu_s[1] * size * sent
        return max(making_s, sending_s, cpu_s + here_s)

    surveyed = steps[: plan.num_surveyed]
    once_s = 0.0
    if prediction.once_s:
        ahead, rest = surveyed[:end], surveyed[end:]
        sent = ahead[-1].passing_share if ahead else 1.0
        keep_s = prediction.kept_bytes * profile.keep_s[0] / num
        once_s = num * slower(read_s + _total_s(ahead), _total_s(rest) + keep_s, sent)
    epoch_s = prediction.epoch_s
    if plan.cache is None:
        step_seconds = [0.0 if isinstance(step.element, Filter | DropDuplicates) else step.alone_s for step in steps]
        epoch_s = (
            num
            * passing_share
            * _visits(plan, profile)
            * slower(read_s + sum(step_seconds[:end]), sum(step_seconds[end:]), 1.0)
        )
    return once_s + num_epochs * epoch_s


def _total_s(steps: list[PlacedOperator]) -> float:
    return sum(step.seconds for step in steps)


def _speed_here(plan: InputPlan, profile: InputProfile) -> float:
    """Returns the speedup of the plan's threads and processes over one thread."""
    steps = (profile.source, *profile.operators)
    computing = sum(step.cpu_s for step in steps) / max(sum(step.seconds for step in steps), 1e-12)
    threads = min(max(plan.num_threads, 1), max(profile.thread_gain, 1 / max(computing, 1e-3)))
    return max(1.0, float(plan.num_processes), threads)


def profile_hosts(hosts: InputHosts, pipeline: Pipeline, profile: InputProfile) -> HostsProfile | None:
    """Measures how fast input hosts produce the first records, and the round-trip time of requests.

    Args:
        hosts: hosts that have the pipeline.
        pipeline: pipeline to profile.
        profile: profile of the pipeline on this machine.

    Returns:
        The profile, or None if no host answers or no sample can be sent.
    """
    plan, num_workers = plain_plan(pipeline), hosts.num_workers
    end = max((index for index in range(len(plan.orders[0]) + 1) if index not in profile.unkept), default=None)
    here_s = there_s = 0.0
    if end is not None and num_workers:  # warm up: the first record of each process may load a library
        with ThreadPoolExecutor(num_workers) as threads:
            first = make_request(plan, RecordRequest(0, end))
            list(threads.map(hosts.ask, [first] * num_workers))
    start_time = time.perf_counter()
    for number in range(min(_HOST_RECORDS + 1, profile.num_profiled)):
        if end is None or (number > 1 and time.perf_counter() - start_time > _HOST_PROFILE_S):
            break
        request = RecordRequest(number, end)
        answer = _answer(hosts, make_request(plan, request))
        if answer is None or answer.begun is None:
            continue
        since = time.perf_counter()
        run_locally(plan, request)
        if number or profile.num_profiled == 1:  # the first one may load a library
            here_s, there_s = here_s + time.perf_counter() - since, there_s + answer.took_s
    ways = [_round_trip(hosts, size) for size in (0, _ECHO_BYTES)]
    if not here_s or not there_s or None in ways:
        return None
    (ask_s, ask_cpu_s), (long_s, long_cpu_s) = (way or (0.0, 0.0) for way in ways)
    byte_s, byte_cpu_s = max(0.0, long_s - ask_s) / _ECHO_BYTES, max(0.0, long_cpu_s - ask_cpu_s) / _ECHO_BYTES
    return HostsProfile(num_workers, num_workers * here_s / there_s, (ask_s, byte_s), (ask_cpu_s, byte_cpu_s))


def _round_trip(hosts: InputHosts, size: int) -> tuple[float, float] | None:
    """Measures the shortest round trip for an echo of ``size`` bytes: (seconds, this thread's CPU seconds)."""
    times = list[tuple[float, float]]()
    for _ in range(_ECHO_ROUNDS):
        start_time, cpu = time.perf_counter(), time.thread_time()
        if _answer(hosts, b'{"echo": %d}' % size) is None:
            return None
        times.append((time.perf_counter() - start_time, time.thread_time() - cpu))
    return min(times)


def _answer(hosts: InputHosts, request: bytes) -> RecordAnswer | None:
    reply = hosts.ask(request)
    try:
        return None if reply is None else read_answer(reply[1])
    except ValueError:
        return None


_PASSES = (_reorder, _add_cache, _add_workers, add_offload, _add_prefetch)


@dataclass(frozen=True)
class Alternative:
    """A candidate plan, for comparison with the chosen one.

    Attributes:
        name: short description, such as ``reordered``.
        plan: the plan.
        seconds: predicted seconds of one core for all epochs.
    """

    name: str
    plan: InputPlan
    seconds: float


def plan_input(
    pipeline: Pipeline, resources: Resources | None = None, profile: InputProfile | None = None
) -> InputPlan:
    """Chooses the plan for a pipeline that is predicted to be fastest; it has the same samples as ``plain_plan``.

    Args:
        pipeline: pipeline to plan.
        resources: resources that the plan may use; None for the defaults.
        profile: profile of the pipeline; None to measure it here.

    Raises:
        SettingError: the source has no records.
        DataError: an operator raises on one of the first records.
    """
    used, seen = resources or Resources(), profile or profile_input(pipeline)
    plan = plain_plan(pipeline)
    for improve in _PASSES:
        plan = improve(plan, seen, used)
    return replace(plan, check_every=_CHECK_EVERY)


def plan_once(pipeline: Pipeline, hosts: InputHosts | None) -> InputPlan:
    """Plans a single pass over a pipeline, without a cache, to build a corpus index; a ``PlanReading``."""
    profile = profile_input(pipeline)
    hosts_profile = None if hosts is None else profile_hosts(hosts, pipeline, profile)
    once = Resources(num_epochs=1, num_cores=os.cpu_count() or 1, memory_bytes=0, hosts=hosts_profile)
    plan = plan_input(pipeline, once, profile)
    reasons = plan.reasons if hosts_profile is not None else ("offload: none; no input host answers",)
    return replace(plan, num_ahead=_AHEAD, reasons=reasons)


def alternatives(pipeline: Pipeline, resources: Resources, profile: InputProfile) -> list[Alternative]:
    """Returns the plain plan, plans with a single pass, and the chosen plan, each with its predicted time."""
    plain, chosen = plain_plan(pipeline), plan_input(pipeline, resources, profile)
    plans = {
        "as written": plain,
        "reordered": replace(_reorder(plain, profile, resources), cache=None),
        "as written, with a cache": _add_cache(plain, profile, resources),
        "chosen": chosen,
    }
    return [
        Alternative(name, plan, predict(plan, profile).total_s(resources.num_epochs)) for name, plan in plans.items()
    ]
