"""The profiler for input pipelines: measures each operator's time and bytes on the first records."""

import resource
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from swift.data.encoding import Unencodable, decoded, encoded, num_bytes
from swift.data.operators import Element, OperatorError, draws, name_of
from swift.data.pipeline import Pipeline
from swift.data.sources import DataError
from swift.errors import SettingError

_AT_MOST_S = 1.0
"""Seconds after which profiling does not start another record."""
_SHARE, _LEAST, _MOST = 50, 16, 100
"""One record in 50 is profiled, at least 16 and at most 100: more would take as long as the plan saves."""
_THREADS = 2
_TRIED_S, _TRIED_AT_MOST_S = 0.03, 0.3
"""Seconds to measure one thread, and then two: excluding the time spent waiting for a core, and the maximum overall."""


@dataclass(frozen=True)
class OperatorProfile:
    """The profile of one operator, as means over its calls.

    Attributes:
        name: name of the operator; ``source`` for reading a record.
        seconds: seconds per call.
        cpu_s: CPU seconds per call; the thread waits for the rest of the call.
        bytes_in: bytes of the fields that the operator reads.
        bytes_out: bytes of the whole sample after the operator.
        kept_share: share of the samples that pass the operator.
        writes_ratio: bytes of the fields that the operator overwrites, after divided by before; 1 if there are none.
    """

    name: str
    seconds: float
    cpu_s: float
    bytes_in: float
    bytes_out: float
    kept_share: float = 1.0
    writes_ratio: float = 1.0


@dataclass(frozen=True)
class InputProfile:
    """The profile of a pipeline's record operators.

    Attributes:
        num_profiled: number of profiled records.
        num_records: number of records in the source.
        source: profile of reading a record.
        operators: profiles of the record operators, in the order as written.
        tokens: mean number of tokens per document if the pipeline packs or batches; otherwise 0.
        keep_s: seconds per byte to cache a sample, and to read it back.
        unkept: why samples cannot be cached, by the number of operators before the cache; no entry where they can.
        thread_gain: speedup from a second thread; 1 if the operators hold Python's global interpreter lock.
    """

    num_profiled: int
    num_records: int
    source: OperatorProfile
    operators: tuple[OperatorProfile, ...]
    tokens: float = 0.0
    keep_s: tuple[float, float] = (0.0, 0.0)
    unkept: dict[int, str] = field(default_factory=dict)
    thread_gain: float = 1.0


@dataclass(frozen=True)
class HostsProfile:
    """The profile of the input hosts.

    Attributes:
        num_workers: number of host processes that produce samples.
        speed: throughput of all processes together, relative to one thread of this machine.
        ask_s: round-trip time in seconds, excluding the production of the record: per request, and per byte of the
            answer.
        cpu_s: CPU seconds of this machine for a round trip: per request, and per byte of the answer.
    """

    num_workers: int
    speed: float
    ask_s: tuple[float, float]
    cpu_s: tuple[float, float]


class _Sums:
    """Running sums for the profile of one operator."""

    def __init__(self, element: Element | None):
        self.element, self.num_in, self.num_out = element, 0, 0
        self.seconds = self.cpu_s = self.bytes_in = self.bytes_out = self.before = self.after = 0.0

    def time(self, call: Callable[[], Any]) -> Any:
        start_time, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_THREAD)
        cpu = time.thread_time()
        result = call()
        cpu_s, elapsed_s = time.thread_time() - cpu, time.perf_counter() - start_time
        # Without a voluntary context switch the thread did not wait: time when others had its core does not count.
        is_blocked = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw > before.ru_nvcsw
        self.cpu_s += min(cpu_s, elapsed_s)
        self.seconds += elapsed_s if is_blocked else min(cpu_s, elapsed_s)
        self.num_in += 1
        return result

    def note(self, sample: Any, following: Any) -> None:
        reads = None if self.element is None else self.element.reads
        self.bytes_in += num_bytes(sample if reads is None else {name: sample[name] for name in reads})
        if following is None:
            return
        self.num_out += 1
        self.bytes_out += num_bytes(following)
        writes = () if self.element is None else self.element.writes
        shared = [name for name in (following if writes is None else writes) if name in sample and name in following]
        self.before += sum(num_bytes(sample[name]) for name in shared)
        self.after += sum(num_bytes(following[name]) for name in shared)

    def mean(self, name: str) -> OperatorProfile:
        num, out = max(self.num_in, 1), max(self.num_out, 1)
        kept_share = self.num_out / num if self.num_in else 1.0
        ratio = self.after / self.before if self.before else 1.0
        return OperatorProfile(
            name,
            self.seconds / num,
            min(self.cpu_s, self.seconds) / num,
            self.bytes_in / num,
            self.bytes_out / out,
            kept_share,
            ratio or 1.0,
        )


def profile_input(pipeline: Pipeline, num_records: int | None = None) -> InputProfile:
    """Runs the record operators on the first records, in the order as written, and times each.

    The first record is processed once beforehand, untimed, since it may load a library.

    Args:
        pipeline: pipeline to profile.
        num_records: maximum number of records; profiling stops early after a second. None for one in ``_SHARE``, at
            least ``_LEAST`` and at most ``_MOST``.

    Raises:
        SettingError: the source has no records.
        DataError: an operator raises on one of the records, and no record may be skipped.
    """
    source, elements = pipeline.source, pipeline.levels[0].elements
    if not len(source):
        raise SettingError("Pipeline.source", source, "has no records: there is nothing to read")
    functions = [pipeline.untraced(element) for element in elements]  # tracing takes as long as a fast operator
    _made(pipeline, [pipeline.applied(element) for element in elements], 0)
    reading, sums = _Sums(None), [_Sums(element) for element in elements]
    keeping = [_Keeping() for _ in range(len(elements) + 1)]
    start_time, num_profiled, num_tokens, num_kept = time.perf_counter(), 0, 0, 0
    usual = min(_MOST, max(_LEAST, len(source) // _SHARE))
    for number in range(min(len(source), usual if num_records is None else num_records)):
        if number and time.perf_counter() - start_time > _AT_MOST_S:
            break
        num_profiled += 1
        sample: Any = reading.time(partial(source.__getitem__, number))
        reading.note({}, sample)
        keeping[0].note(sample)
        try:
            for index, (element_sums, function) in enumerate(zip(sums, functions, strict=True)):
                draw = draws(0, 0, number)
                pipeline.notes(name_of(elements[index]))
                following = element_sums.time(partial(function, sample, draw))
                pipeline.notes("")
                element_sums.note(sample, following)
                if following is None:
                    break
                sample = following
                keeping[index + 1].note(sample)
            else:
                num_kept += 1
                num_tokens += len(sample.get("tokens", ()))
        except OperatorError as error:
            if not pipeline.most_skipped:
                raise DataError(f"{source.place(number)}: {error}") from error
    write_s, read_s = _rates(keeping)
    return InputProfile(
        num_profiled,
        len(source),
        reading.mean("source"),
        tuple(element_sums.mean(name_of(element)) for element_sums, element in zip(sums, elements, strict=True)),
        num_tokens / max(num_kept, 1) if len(pipeline.levels) > 1 else 0.0,
        (write_s, read_s),
        {position: timing.reason for position, timing in enumerate(keeping) if timing.reason},
        _thread_gain(pipeline, functions, num_profiled),
    )


class _Keeping:
    """Measures the time to encode and decode the samples at one position in the order."""

    def __init__(self) -> None:
        self.reason, self.write_s, self.read_s, self.num_bytes, self._num = "", 0.0, 0.0, 0, 0

    def note(self, sample: Any) -> None:
        self._num += 1
        if self.reason or self._num % 8 != 1:  # one sample in eight is enough
            return
        try:
            start_time = time.perf_counter()
            content = encoded(sample)
            middle = time.perf_counter()
            decoded(content)
            self.write_s += middle - start_time
            self.read_s += time.perf_counter() - middle
            self.num_bytes += len(content)
        except Unencodable as error:
            self.reason = str(error)


def _rates(keeping: list[_Keeping]) -> tuple[float, float]:
    total = max(sum(timing.num_bytes for timing in keeping), 1)
    return sum(timing.write_s for timing in keeping) / total, sum(timing.read_s for timing in keeping) / total


def _thread_gain(pipeline: Pipeline, functions: list[Any], num_records: int) -> float:
    """Measures the speedup from a second thread: two threads' records per second divided by one thread's."""

    def rate(together: threading.Barrier, ended: threading.Event) -> float:
        together.wait()
        start_time, waited, elapsed_s, num = time.perf_counter(), _waited_s(), 0.0, 0
        while not num or (not ended.is_set() and elapsed_s < _TRIED_S):
            _made(pipeline, functions, num % num_records)
            num += 1
            now = time.perf_counter() - start_time
            elapsed_s = now - (_waited_s() - waited)
            if now > _TRIED_AT_MOST_S:
                break
        ended.set()
        return num / max(elapsed_s, 1e-9)

    rates = dict[int, float]()
    for num in (1, _THREADS):
        with ThreadPoolExecutor(num) as pool:
            shared = threading.Barrier(num), threading.Event()
            rates[num] = sum(pool.map(lambda _, shared=shared: rate(*shared), range(num)))
    return max(1.0, min(float(_THREADS), rates[_THREADS] / rates[1]))


def _waited_s() -> float:
    """Returns the seconds for which this thread was runnable but had no core; 0 if the kernel does not report it."""
    try:
        schedstat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text()
        return int(schedstat.split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _made(pipeline: Pipeline, functions: list[Any], number: int) -> None:
    """Produces a sample and discards it; ignores errors of the operators."""
    sample: Any = pipeline.source[number]
    try:
        for function in functions:
            if sample is not None:
                sample = function(sample, draws(0, 0, number))
    except OperatorError:
        return
