"""A survey of a source: which records stay, how many tokens they have, and, if the plan says so, what is kept of them.

All that a filter, a packed row or a skipped record needs to know before sample i can be found by its number. Every
record is examined once, by as many threads and processes as the plan has: Grain runs them, ahead of the samples' use
(``in_order``).
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
"""Times that the processes of an iteration may be started again after one of them has died."""
_DIED = "terminated unexpectedly"
_Raised = tuple[type[Exception], tuple[Any, ...]]
"""An error as its class and arguments: as an object it would lose them on its way from another process."""


class Numbered(Protocol):
    """Samples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...


class CachedSamples(Protocol):
    """Samples that are kept, by their place among the records that stay."""

    def __getitem__(self, place: int) -> dict[str, Any]:
        """Returns a sample, whose arrays are the caller's own."""
        ...


class Store(Protocol):
    """A place to keep samples while a source is surveyed."""

    @property
    def form(self) -> Callable[[Sample], Any]:
        """Makes of a sample what is kept, where the sample is made: another process may get this function."""
        ...

    def add(self, number: int, sample: Any) -> None:
        """Adds the next sample that stays, in its form; ``number`` is that of its record."""
        ...

    def closed(self) -> CachedSamples:
        """Returns all of them."""
        ...


@dataclass(frozen=True, eq=False)
class Survey:
    """Findings of a survey.

    Attributes:
        num_kept: number of records that stay.
        numbers: numbers of the records that stay, int64[num_kept]; None: all of them.
        lengths: tokens of each, int64[num_kept]; None: nothing is packed.
        cache: samples that are kept; None: none.
        skipped: for each record that an operator raised on, its place and why.
    """

    num_kept: int
    numbers: np.ndarray | None = None
    lengths: np.ndarray | None = None
    cache: CachedSamples | None = field(default=None, repr=False)
    skipped: tuple[str, ...] = ()

    def number(self, place: int) -> int:
        """Returns the number of a record that stays, by its place among them."""
        return place if self.numbers is None else int(self.numbers[place])


@dataclass(frozen=True)
class _Examined:
    """Findings about one record.

    Attributes:
        stays: whether it passes all operators, if it is not a duplicate.
        error: why an operator raised, and which; None: none did.
        digests: for each ``DropDuplicates`` that it has reached, its name and the digest of the field.
        length: number of its tokens.
        cached_sample: what is kept of it; None: nothing.
    """

    stays: bool
    error: str | None
    digests: tuple[tuple[str, bytes], ...]
    length: int = 0
    cached_sample: Any = None


class _Examiner:
    """Examined records by number; another process gets it as a pickle, without the hosts."""

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
        if record.error is not None:  # out of its place an operator may see what it would not have seen
            written = [element for element in plan.pipeline.levels[0].elements if element in planned]
            record = self._examine(written, number, None, None)
        return record

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_hosts": None}

    def _begun(self, number: int, num_surveyed: int) -> PartialSample | None:
        """Returns a record that another host has begun; None: this one does."""
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
    """Examines all records of a source; none if nothing needs to be known of them.

    Args:
        plan: plan of a pipeline.
        store: where the samples at the plan's cache are kept; None: the plan's cache is left out.
        report: called with the number of records examined, and that of all.
        hosts: other hosts, which begin the records if the plan says so; None: none.

    Raises:
        DataError: an operator raises on more records than ``Pipeline.most_skipped``, a field cannot be kept, or the
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
    """Whether a record is dropped as a duplicate; notes its digests up to there."""
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
    """Yields samples in their order, made ahead as the plan says.

    A process that dies is restarted at the sample that is due, so the samples stay the same. Once all other hosts are
    lost, the threads that asked them make room for the threads and processes with which this host goes on alone.

    Args:
        samples: samples by number, which another process gets as a pickle if the plan has processes.
        plan: threads, processes and samples ahead.
        first: number of the first sample.
        hosts: other hosts that the samples ask; None: none.

    Raises:
        DataError: a sample cannot be made, or processes have died more than ``_MOST_RESTARTS`` times.
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
    """Samples, each in a list of one or with the error that making it has raised.

    Grain takes a sample apart otherwise, and an error of its process apart from what it says.
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
        if not flags.FLAGS.is_parsed():  # Grain reads them, and a program without absl never parses them
            flags.FLAGS.mark_as_parsed()
        each = grain.MultiprocessingOptions(plan.num_processes, per_worker_buffer_size=-(-ahead // plan.num_processes))
        samples = samples.mp_prefetch(each)
    iterator = iter(samples)
    try:
        yield from iterator
    finally:
        iterator.close()
