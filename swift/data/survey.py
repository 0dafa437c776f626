"""A survey of a source: which records are kept, how many tokens each has, and, if the plan has a cache, their samples.

With filters, packing or skipped records, sample i can only be located once this is known. Every record is examined
once, by the threads and processes of the plan, which Grain runs (``in_order``).
"""

from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Protocol

import grain
import numpy as np
from absl import flags

from swift.data.encoding import Unencodable
from swift.data.operators import Element, Sample, draws
from swift.data.pipeline import InputPlan
from swift.data.remote_records import InputHosts, RecordRequest, fetch_remote_records
from swift.data.sample_checks import PartialSample, apply_operators, check_record, outcome
from swift.data.sources import DataError
from swift.errors import SettingError

_MOST_RESTARTS = 3
"""Maximum number of times that worker processes are restarted after one dies."""
_DIED = "terminated unexpectedly"
_Raised = tuple[type[Exception], tuple[Any, ...]]
"""An error as its class and arguments, which a pickled exception object would lose between processes."""


class Numbered(Protocol):
    """A sequence of samples, by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...


class CachedSamples(Protocol):
    """Cached samples, by position among the records that are kept."""

    def __getitem__(self, place: int) -> dict[str, Any]:
        """Returns a sample; the caller may write into its arrays."""
        ...


class Store(Protocol):
    """A cache that is filled while a source is surveyed."""

    @property
    def form(self) -> Callable[[Sample], Any]:
        """Function that converts a sample to its cached form; must be picklable, since worker processes call it."""
        ...

    def add(self, number: int, sample: Any) -> None:
        """Adds the next sample that is kept, in cached form; ``number`` is the number of its record."""
        ...

    def closed(self) -> CachedSamples:
        """Completes the cache and returns the cached samples."""
        ...


@dataclass(frozen=True, eq=False)
class Survey:
    """The results of a survey.

    Attributes:
        num_kept: number of records that are kept.
        numbers: numbers of the records that are kept, int64[num_kept]; None if all records are kept.
        lengths: number of tokens of each record that is kept, int64[num_kept]; None if nothing is packed.
        cache: cached samples, or None if the plan has no cache.
        skipped: for each record that an operator raised on, where the record comes from, and the reason.
    """

    num_kept: int
    numbers: np.ndarray | None = None
    lengths: np.ndarray | None = None
    cache: CachedSamples | None = field(default=None, repr=False)
    skipped: tuple[str, ...] = ()

    def number(self, place: int) -> int:
        """Returns a record's number in the source, given its position among the records that are kept."""
        return place if self.numbers is None else int(self.numbers[place])


@dataclass(frozen=True)
class _Examined:
    """The result of examining one record.

    Attributes:
        stays: whether the record passes all operators; it may still be a duplicate.
        error: which operator raised and why, or None if none did.
        digests: for each ``DropDuplicates`` that the record has reached, the operator's name and the field's digest.
        length: number of tokens; 0 if nothing is packed.
        cached_sample: the sample in cached form, or None if there is nothing to cache.
    """

    stays: bool
    error: str | None
    digests: tuple[tuple[str, bytes], ...]
    length: int = 0
    cached_sample: Any = None


class _Examiner:
    """Examines records by number; a pickled copy, for another process, has no input hosts."""

    def __init__(self, plan: InputPlan, form: Callable[[Sample], Any] | None, hosts: InputHosts | None):
        self._plan, self._form, self._hosts = plan, form, hosts
        self._num_cached = None if form is None or plan.cache is None else plan.cache.num_elements
        self._planned = plan.elements(0)[: plan.num_surveyed]

    def __len__(self) -> int:
        return len(self._plan.pipeline.source)

    def __getitem__(self, number: int) -> _Examined:
        plan, planned = self._plan, self._planned
        record = self._examine(planned, number, self._num_cached, self._begun(number, len(planned)))
        if plan.check_every and number % plan.check_every == 0:
            draw = draws(0, 0, number)
            check_record(plan, number, draw, outcome(plan, plan.elements(0), number, draw))
        if record.error is not None:  # a moved operator may see samples that it would not see in the order as written
            written = [element for element in plan.pipeline.levels[0].elements if element in planned]
            record = self._examine(written, number, None, None)
        return record

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_hosts": None}

    def _begun(self, number: int, num_surveyed: int) -> PartialSample | None:
        """Lets an input host run the offloaded operators; returns None if this process must run them itself."""
        if self._hosts is None or self._plan.num_offloaded is None:
            return None
        end = min(self._plan.num_offloaded, num_surveyed if self._num_cached is None else self._num_cached)
        return fetch_remote_records(self._hosts, self._plan, RecordRequest(number, end))

    def _examine(
        self, elements: Sequence[Element], number: int, num_cached: int | None, begun: PartialSample | None
    ) -> _Examined:
        plan, draw, cached_sample = self._plan, draws(0, 0, number), None
        partial_sample = PartialSample(0, plan.pipeline.source[number]) if begun is None else begun
        if num_cached is not None:
            partial_sample = apply_operators(plan, partial_sample, elements[partial_sample.num_done : num_cached], draw)
            if partial_sample.sample is not None and self._form is not None:
                cached_sample = self._form(partial_sample.sample)
        partial_sample = apply_operators(plan, partial_sample, elements[partial_sample.num_done :], draw)
        if partial_sample.sample is None:
            return _Examined(False, partial_sample.error, partial_sample.digests)
        length = 0
        if plan.num_packed:
            if "tokens" not in partial_sample.sample:
                reason = f"there is no field 'tokens', there are {', '.join(partial_sample.sample)}: tokenize before"
                raise DataError(f"{plan.pipeline.source.place(number)}: operator pack: {reason}")
            length = len(partial_sample.sample["tokens"])
        return _Examined(True, None, partial_sample.digests, length, cached_sample)


def survey(
    plan: InputPlan,
    store: Store | None = None,
    report: Callable[[int, int], None] | None = None,
    hosts: InputHosts | None = None,
) -> Survey:
    """Examines all records of a source, or none if the plan needs no survey.

    Args:
        plan: plan of a pipeline.
        store: where to cache samples; None to ignore the plan's cache.
        report: called with the number of records examined and the total number of records.
        hosts: input hosts that run the plan's offloaded operators; None for no hosts.

    Raises:
        DataError: an operator raises on more records than ``Pipeline.most_skipped``, a field cannot be cached, or the
            source cannot be read.
    """
    source, num_records = plan.pipeline.source, len(plan.pipeline.source)
    form = None if store is None or plan.cache is None else store.form
    if not num_records or (not plan.num_surveyed and not plan.num_packed and form is None):
        return Survey(num_records)
    record_numbers, lengths, skipped, seen = array("q"), array("q"), list[str](), dict[str, set[bytes]]()
    for number, record in enumerate(_examined(plan, form, hosts)):
        if report is not None:
            report(number + 1, num_records)
        if _is_duplicate(record, seen):
            continue
        if record.error is not None:
            skipped.append(f"{source.place(number)}: {record.error}")
            if len(skipped) > plan.pipeline.most_skipped:
                raise DataError(_too_many(skipped))
        elif record.stays:
            record_numbers.append(number)
            lengths.append(record.length)
            if store is not None and record.cached_sample is not None:
                store.add(number, record.cached_sample)
    numbers = None if len(record_numbers) == num_records else np.array(record_numbers, np.int64)
    counted = np.array(lengths, np.int64) if plan.num_packed else None
    cache = None if store is None or form is None else store.closed()
    return Survey(len(record_numbers), numbers, counted, cache, tuple(skipped))


def _examined(plan: InputPlan, form: Callable[[Sample], Any] | None, hosts: InputHosts | None) -> Iterator[_Examined]:
    try:
        yield from in_order(_Examiner(plan, form, hosts), plan, hosts=hosts)
    except Unencodable as error:
        raise DataError(f"samples cannot be kept: {error}") from error


def _is_duplicate(record: _Examined, seen: dict[str, set[bytes]]) -> bool:
    """Whether a record is a duplicate; adds its digests to ``seen``, up to the first that is already there."""
    for name, digest in record.digests:
        if digest in seen.setdefault(name, set()):
            return True
        seen[name].add(digest)
    return False


def _too_many(skipped: list[str]) -> str:
    if len(skipped) == 1:
        return skipped[0]
    return f"{skipped[-1]}; Pipeline.most_skipped = {len(skipped) - 1} records were skipped before"


def in_order(samples: Numbered, plan: InputPlan, first: int = 0, hosts: InputHosts | None = None) -> Iterator[Any]:
    """Yields samples in order, prefetched by the threads and processes of the plan.

    After a worker process dies, the workers restart at the next sample to be yielded, so no sample is lost or repeated.
    Once all input hosts are lost, the threads that sent them requests are replaced by the threads and processes of
    ``InputPlan.alone``.

    Args:
        samples: samples by number; must be picklable if the plan has processes.
        plan: plan with the numbers of threads, processes and prefetched samples.
        first: number of the first sample.
        hosts: input hosts that the samples use; None for no hosts.

    Raises:
        DataError: a sample cannot be produced, or workers have died more than ``_MOST_RESTARTS`` times.
    """
    num_restarts = 0
    while True:
        try:
            with closing(_read(_Wrapped(samples, first), plan)) as results:
                for result in results:
                    yield _sample_of(result)
                    first += 1
                    if plan.num_offloaded is not None and hosts is not None and not hosts.num_workers:
                        break
                else:
                    return
            plan = plan.without_hosts()
        except RuntimeError as error:
            if isinstance(error, DataError) or _DIED not in str(error):
                raise
            num_restarts += 1
            if num_restarts > _MOST_RESTARTS:
                raise DataError(f"processes that make samples have died {num_restarts} times") from error


def _sample_of(result: tuple[Any, _Raised | None]) -> Any:
    sample, error = result
    if error is not None:
        kind, args = error
        raise kind(*args)
    return sample


class _Wrapped:
    """Samples as pairs (sample, None) or (None, error).

    Without the pair, Grain would split up a sample, and an error in one of its processes would lose its arguments.
    """

    def __init__(self, samples: Numbered, first: int):
        self._samples, self._first = samples, first

    def __len__(self) -> int:
        return len(self._samples) - self._first

    def __getitem__(self, number: int) -> tuple[Any, _Raised | None]:
        try:
            return self._samples[int(number) + self._first], None
        except DataError as error:
            return None, (type(error), (str(error),))
        except SettingError as error:
            return None, (SettingError, (error.setting, error.value, error.allowed))


def _read(wrapped: _Wrapped, plan: InputPlan) -> Generator[tuple[Any, _Raised | None], None, None]:
    if not plan.num_threads and not plan.num_processes:
        yield from (wrapped[number] for number in range(len(wrapped)))
        return
    ahead = max(plan.num_ahead, 1)
    options = grain.ReadOptions(num_threads=max(plan.num_threads, 1), prefetch_buffer_size=max(ahead, plan.num_threads))
    samples = grain.MapDataset.source(wrapped).to_iter_dataset(options)
    if plan.num_processes:
        if not flags.FLAGS.is_parsed():  # Grain reads absl's flags, which a program without absl.app never parses
            flags.FLAGS.mark_as_parsed()
        each = grain.MultiprocessingOptions(plan.num_processes, per_worker_buffer_size=-(-ahead // plan.num_processes))
        samples = samples.mp_prefetch(each)
    iterator = iter(samples)
    try:
        yield from iterator
    finally:
        iterator.close()
