"""Random access to the samples of a pipeline: a sample depends only on the pipeline, the seed and its number."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Protocol

import grain
import numpy as np

from swift.data.operators import (
    Apply,
    Draw,
    DropDuplicates,
    Filter,
    OperatorError,
    Pack,
    Sample,
    Stack,
    chained,
    draws,
    name_of,
)
from swift.data.pipeline import InputPlan
from swift.data.remote_records import InputHosts, RecordRequest, fetch_remote_records
from swift.data.sample_checks import check_record, outcome
from swift.data.sources import DataError
from swift.data.survey import Survey, survey
from swift.errors import SettingError, check_seed

_ENDLESS = 2**60
_KEPT_DOCUMENTS = 16


class _Reader(Protocol):
    """Reads one level's samples, of which an epoch has ``size``; ``read`` returns (number, sample)."""

    size: int

    def read(self, index: int) -> tuple[int, Any]: ...


class Samples:
    """The endless sequence of a plan's samples, by number; a Grain source, which Grain pickles for its processes.

    Args:
        plan: plan of a pipeline.
        seed: seed of shuffles and random operators.
        findings: survey of the source for this plan; None to survey the source here.
        hosts: input hosts that run the plan's offloaded operators; None for no hosts. A pickled copy has none.

    Raises:
        SettingError: the source has no records, all records are dropped, or the rest have too few tokens for a row.
        DataError: an operator raises on a record; the message names the record.
    """

    def __init__(self, plan: InputPlan, seed: int, findings: Survey | None = None, hosts: InputHosts | None = None):
        check_seed("seed", seed)
        self._plan, self._seed, self._hosts = plan, seed, hosts
        self._survey = survey(plan, hosts=hosts) if findings is None else findings
        self._reader = self._open()

    @property
    def num_per_epoch(self) -> int | None:
        """Number of samples per epoch; None for batches, since a batch may span two epochs."""
        return None if self._reader.size == _ENDLESS else self._reader.size

    @property
    def found(self) -> Survey:
        """The survey of the source."""
        return self._survey

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, index: int) -> Any:
        """Produces a sample.

        Raises:
            DataError: an operator raises, or the source cannot be read.
        """
        return self._reader.read(int(index))[1]

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(_ENDLESS))

    def __getstate__(self) -> tuple[InputPlan, int, Survey]:
        return self._plan, self._seed, self._survey

    def __setstate__(self, state: tuple[InputPlan, int, Survey]) -> None:
        self._plan, self._seed, self._survey = state
        self._hosts = None
        self._reader = self._open()

    def _open(self) -> _Reader:
        reader: _Reader = _Records(self._plan, self._survey, self._seed, self._hosts)
        for level in range(1, len(self._plan.pipeline.levels)):
            group = self._plan.pipeline.levels[level].group
            if isinstance(group, Pack):
                assert isinstance(reader, _Records)
                reader = _Rows(self._plan, level, group, reader, self._seed)
            else:
                assert isinstance(group, Stack)
                reader = _Batches(self._plan, level, group, reader, self._seed)
        return reader


class _Records:
    """The records that are kept, in the order of each epoch, with all record operators applied."""

    def __init__(self, plan: InputPlan, findings: Survey, seed: int, hosts: InputHosts | None):
        self._plan, self._source, self._survey, self._seed = plan, plan.pipeline.source, findings, seed
        self.size = findings.num_kept
        if not self.size:
            reason = "no record stays" if len(self._source) else "has no records"
            raise SettingError("Pipeline.source", self._source, f"{reason}: there is nothing to read")
        self._written = plan.pipeline.levels[0].elements
        self._order = _order(plan, 0, self.size, seed)
        num_cached = 0 if findings.cache is None or plan.cache is None else plan.cache.num_elements
        self._apply = _elements(plan, 0, num_cached)
        self._hosts = hosts if findings.cache is None and plan.num_offloaded is not None else None
        self._rest = _elements(plan, 0, plan.num_offloaded or 0)

    def read(self, index: int) -> tuple[int, Any]:
        position, epoch = self._order(index), index // self.size
        number, draw = self._survey.number(position), draws(self._seed, epoch, self._survey.number(position))
        try:
            sample = self._make(position, number, epoch, draw)
        except OperatorError:  # a moved operator may see samples that it would not see in the order as written
            sample = outcome(self._plan, self._written, number, draw)
            if isinstance(sample, OperatorError):
                raise DataError(f"{self._source.place(number)}: {sample}") from sample
        if self._plan.check_every and index % self._plan.check_every == 0:
            check_record(self._plan, number, draw, sample)
        return number, sample

    def _make(self, place: int, number: int, epoch: int, draw: Draw) -> Sample | None:
        if self._hosts is not None and self._plan.num_offloaded is not None:
            request = RecordRequest(number, self._plan.num_offloaded, (self._seed, epoch))
            begun = fetch_remote_records(self._hosts, self._plan, request)
            if begun is not None and begun.sample is not None:
                return self._rest(begun.sample, draw)
        cached = self._survey.cache
        return self._apply(self._source[number] if cached is None else cached[place], draw)

    def place_of(self, index: int) -> int:
        return self._order(index)


class _Rows:
    """Rows of packed tokens: row r starts at the epoch's token r * T, and overlaps the next row by one token."""

    def __init__(self, plan: InputPlan, level: int, pack: Pack, records: _Records, seed: int):
        lengths = records._survey.lengths
        assert lengths is not None
        self._records, self._lengths, self._length, self._seed = records, lengths, pack.length, seed
        num_tokens = int(lengths.sum())
        self.size = max(0, -(-(num_tokens - 1) // pack.length))  # every token but the first is a label exactly once
        if num_tokens < 2:
            raise SettingError("Pipeline.source", records._source, f"holds {num_tokens} tokens: too few for a row")
        self._is_shuffled = plan.pipeline.levels[0].is_shuffled
        self._order = _order(plan, level, self.size, seed)
        self._apply = _elements(plan, level)
        self._ends = lru_cache(2)(self._ends_in)
        self._tokens = lru_cache(_KEPT_DOCUMENTS)(self._tokens_of)

    def read(self, index: int) -> tuple[int, Any]:
        epoch, row = index // self.size, self._order(index)
        try:
            return row, self._apply(self._row(epoch, row), draws(self._seed, epoch, row))
        except OperatorError as error:
            raise DataError(f"row {row} of epoch {epoch}: {error}") from error

    def _row(self, epoch: int, row: int) -> dict[str, np.ndarray]:
        tokens, segments = np.zeros((2, self._length + 1), np.int32)
        # Without shuffling, all epochs have the same ends.
        ends, start, filled, segment = self._ends(epoch if self._is_shuffled else 0), row * self._length, 0, 0
        place = int(np.searchsorted(ends, start, side="right"))
        while filled <= self._length and place < len(ends):
            record_tokens = self._tokens(epoch * self._records.size + place)
            begin = max(0, start - int(ends[place]) + len(record_tokens))
            part = record_tokens[begin : begin + self._length + 1 - filled]
            segment += 1 if len(part) else 0
            tokens[filled : filled + len(part)], segments[filled : filled + len(part)] = part, segment
            filled, place = filled + len(part), place + 1
        return {"tokens": tokens, "segments": segments}

    def _ends_in(self, epoch: int) -> np.ndarray:
        """Returns where each document ends in the tokens of an epoch, int64[num_documents]."""
        size = self._records.size
        places = [self._records.place_of(epoch * size + place) for place in range(size)] if self._is_shuffled else None
        return np.cumsum(self._lengths if places is None else self._lengths[places])

    def _tokens_of(self, index: int) -> np.ndarray:
        return self._records.read(index)[1]["tokens"]


class _Batches:
    """Batches: stacked samples of the previous level."""

    def __init__(self, plan: InputPlan, level: int, stack: Stack, samples: _Reader, seed: int):
        self._samples, self._num, self._seed, self.size = samples, stack.size, seed, _ENDLESS
        self._apply, self._name = _elements(plan, level), name_of(stack)

    def read(self, index: int) -> tuple[int, Any]:
        samples = [self._samples.read(index * self._num + place)[1] for place in range(self._num)]
        try:
            stacked = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
        except (ValueError, KeyError) as error:
            shapes = sorted({str({name: np.shape(value) for name, value in sample.items()}) for sample in samples})
            raise DataError(f"operator {self._name}: samples of a batch differ: {' and '.join(shapes[:2])}") from error
        try:
            # Epoch 0 for all batches: their numbers run on across epochs.
            return index, self._apply(stacked, draws(self._seed, 0, index))
        except OperatorError as error:
            raise DataError(f"batch {index}: {error}") from error


def _order(plan: InputPlan, level: int, size: int, seed: int) -> Any:
    """Returns a function from a sample's number, counted over all epochs, to its position in the unshuffled order."""
    if not plan.pipeline.levels[level].is_shuffled:
        return lambda index: index % size
    spread = int(np.random.SeedSequence((seed, level)).generate_state(1)[0])  # Grain adds the epoch to the seed
    return grain.MapDataset.range(size).shuffle(seed=spread).__getitem__


def _elements(plan: InputPlan, level: int, num_done: int = 0) -> Apply:
    """Composes a level's operators after the first ``num_done``, without filters, which the survey has already run."""
    operators = [e for e in plan.elements(level)[num_done:] if not isinstance(e, Filter | DropDuplicates)]
    return chained([plan.pipeline.applied(operator) for operator in operators])
