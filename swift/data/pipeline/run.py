"""Samples made ahead of their use, by the threads and processes of a plan: Grain runs them."""

from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any, Protocol

import grain
from absl import flags

from swift.data.files import DataError
from swift.data.pipeline.elsewhere import InputHosts
from swift.data.pipeline.plan import InputPlan
from swift.errors import SettingError

MOST_RESTARTS = 3
"""Times that the processes of an iteration may be started again after one of them has died."""
_DIED = "terminated unexpectedly"
_Raised = tuple[type[Exception], tuple[Any, ...]]
"""An error as its class and arguments: as an object it would lose them on its way from another process."""


class Numbered(Protocol):
    """Samples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...


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
        DataError: a sample cannot be made, or processes have died more than ``MOST_RESTARTS`` times.
    """
    num_restarts = 0
    while True:
        try:
            with closing(_read(_Wrapped(samples, first), plan)) as made:
                for one in made:
                    yield _sample_of(one)
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
            if num_restarts > MOST_RESTARTS:
                raise DataError(f"processes that make samples have died {num_restarts} times") from error


def _sample_of(made: tuple[Any, _Raised | None]) -> Any:
    sample, error = made
    if error is not None:
        kind, said = error
        raise kind(*said)
    return sample


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
