"""Input pipelines, which define the samples, and input plans, which define how samples are produced.

A pipeline is a source and a sequence of operators. A plan chooses the order in which the operators run, what is
cached, and the numbers of threads and processes; no plan changes a sample. A ``TracedPipeline`` also records which
operator is running.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from swift.data.operators import (
    Apply,
    Draw,
    DropDuplicates,
    Element,
    Filter,
    Map,
    Operator,
    Pack,
    Sample,
    Shuffle,
    Stack,
    Tokenize,
    applied,
    name_of,
)
from swift.data.records import RecordSource
from swift.data.tokenizer import Tokenizer
from swift.errors import SettingError, check_count


@dataclass(frozen=True)
class Level:
    """The operators that process one kind of sample: records, packed rows, or batches.

    Attributes:
        group: operator that groups samples of the previous level into samples of this one; None for records.
        elements: operators on single samples, in order.
        is_shuffled: whether the samples are shuffled; the shuffle's position among the elements makes no difference.
    """

    group: Pack | Stack | None
    elements: tuple[Element, ...] = ()
    is_shuffled: bool = False


@dataclass(frozen=True)
class Pipeline:
    """A source of records and the operators that turn them into samples, epoch after epoch without end.

    Sample i is a function of the source, the operators, the seed and i. Write each operator where it is easiest to
    understand: the plan decides where it runs, see ``plan_input``.

    >>> from swift.data import ByteTokenizer, Pipeline, Rows, Samples, plain_plan
    >>> texts = Pipeline(Rows([{"text": "to be"}, {"text": ""}, {"text": "or not to be"}]))
    >>> kept = texts.filter(lambda sample: len(sample["text"]) > 0)
    >>> packed = kept.tokenize(ByteTokenizer()).pack(8).shuffle().batch(2)
    >>> Samples(plain_plan(packed), seed=0)[0]["tokens"].shape
    (2, 9)

    Args:
        source: source of the records.
        operators: operators, in the order that defines the samples.
        most_skipped: number of records that may be skipped because an operator raises on them. If above 0, all
            operators before the first random one run once on the whole source before the first sample.

    Raises:
        SettingError: the operators cannot follow each other in this order.
    """

    source: RecordSource
    operators: tuple[Operator, ...] = ()
    most_skipped: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.operators, list):  # gin may pass a list
            object.__setattr__(self, "operators", tuple(self.operators))
        if not isinstance(self.operators, tuple):
            raise SettingError(
                "Pipeline.operators", self.operators, "must be a tuple of operators, such as (@Shuffle(),)"
            )
        check_count("Pipeline.most_skipped", self.most_skipped, least=0)
        for operator in self.operators:
            if not isinstance(operator, Operator):
                raise SettingError("Pipeline.operators", operator, "is not an operator, such as @Map() or @Shuffle()")
        _check_names(self.operators)
        self._check_order()

    def map(
        self,
        function: Callable[..., Sample],
        *,
        reads: tuple[str, ...] | None = None,
        writes: tuple[str, ...] | None = None,
        depends_on: tuple[str, ...] | None = None,
        is_random: bool = False,
        is_fixed: bool = False,
        name: str = "",
    ) -> "Pipeline":
        """Adds a function that is applied to each sample, see ``Map``."""
        return self.then(Map(function, reads, writes, depends_on, is_random, is_fixed, name))

    def filter(
        self,
        function: Callable[[Sample], bool],
        *,
        reads: tuple[str, ...] | None = None,
        depends_on: tuple[str, ...] | None = None,
        is_fixed: bool = False,
        name: str = "",
    ) -> "Pipeline":
        """Drops the samples for which a function returns false, see ``Filter``."""
        return self.then(Filter(function, reads, depends_on, is_fixed, name))

    def drop_duplicates(self, field: str = "text") -> "Pipeline":
        """Drops the samples whose field equals the field of an earlier one, see ``DropDuplicates``."""
        return self.then(DropDuplicates(field))

    def tokenize(self, tokenizer: Tokenizer, field: str = "text") -> "Pipeline":
        """Adds the tokens of a text as the field ``tokens``."""
        return self.then(Tokenize(tokenizer, field))

    def pack(self, length: int) -> "Pipeline":
        """Cuts the tokens of all samples into rows with segment numbers, see ``Pack``."""
        return self.then(Pack(length))

    def shuffle(self) -> "Pipeline":
        """Shuffles the samples, differently in every epoch."""
        return self.then(Shuffle())

    def batch(self, size: int) -> "Pipeline":
        """Stacks samples into batches."""
        return self.then(Stack(size))

    def then(self, operator: Operator) -> "Pipeline":
        """Adds an operator; if its name is taken, a number is appended to it."""
        names = {name_of(previous) for previous in self.operators}
        name, number = name_of(operator), 2
        while name in names:
            name, number = f"{name_of(operator)}-{number}", number + 1
        return replace(self, operators=(*self.operators, replace(operator, name=name)))

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """The operators grouped by the kind of sample that they process, from records to batches."""
        levels = [Level(None)]
        for operator in self.operators:
            last = levels[-1]
            if isinstance(operator, Pack | Stack):
                levels.append(Level(operator))
            elif isinstance(operator, Shuffle):
                levels[-1] = replace(last, is_shuffled=True)
            else:
                levels[-1] = replace(last, elements=(*last.elements, operator))
        return tuple(levels)

    def applied(self, element: Element) -> Apply:
        """Returns the function that applies one of the operators to a sample, see ``swift.data.operators``."""
        return self.untraced(element)

    def untraced(self, element: Element) -> Apply:
        """Returns the function of ``applied`` without tracing, also in a ``TracedPipeline``."""
        return applied(element, self._numbers[name_of(element)])

    def notes(self, name: str) -> None:
        """Records which operator this thread runs from now on; does nothing unless the pipeline is traced."""

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """Position of each operator as written, by name: it seeds random numbers, so no plan may change it."""
        return {name_of(operator): number for number, operator in enumerate(self.operators)}

    def _check_order(self) -> None:
        """Rejects orders in which the number of samples or tokens would depend on the epoch."""
        random, levels, shuffled = "", 0, set[int]()
        for operator in self.operators:
            name = name_of(operator)
            if isinstance(operator, Filter | DropDuplicates) and (random or levels):
                reason = f"must stand before {random}: what stays is decided once, not in every epoch"
                raise SettingError("Pipeline.operators", name, reason)
            if isinstance(operator, Pack):
                is_unsure = any(isinstance(element, Map) and element.is_random for element in self.levels[0].elements)
                if levels or is_unsure:
                    reason = "must stand before every batch and random operator but a shuffle, and once"
                    raise SettingError("Pipeline.operators", name, reason)
            if isinstance(operator, Shuffle):
                is_batched = any(isinstance(level.group, Stack) for level in self.levels[: levels + 1])
                if is_batched or levels in shuffled:
                    raise SettingError(
                        "Pipeline.operators", name, "must stand before the batch, and once for its samples"
                    )
                shuffled.add(levels)
            levels += isinstance(operator, Pack | Stack)
            if not random and (isinstance(operator, Pack | Stack | Shuffle) or getattr(operator, "is_random", False)):
                random = name


def _check_names(operators: tuple[Operator, ...]) -> None:
    counts = Counter(map(name_of, operators))
    before = set[str]()
    for operator in operators:
        name = name_of(operator)
        if counts[name] > 1:
            raise SettingError("Pipeline.operators", name, "is the name of two operators: give one of them a name")
        for other in getattr(operator, "depends_on", None) or ():
            if other not in before:
                raise SettingError(f"{name}.depends_on", other, "is not an operator before it")
        before.add(name)


@dataclass(frozen=True)
class TracedPipeline(Pipeline):
    """A pipeline that reports which operator is running; pickled for another process, it is a plain ``Pipeline``.

    Args:
        note: called in the operator's thread: with its name before it runs, with "" afterwards.
    """

    note: Callable[[str], None] = field(kw_only=True)

    @classmethod
    def of(cls, pipeline: Pipeline, note: Callable[[str], None]) -> "TracedPipeline":
        """Returns a traced copy of a pipeline."""
        return cls(pipeline.source, pipeline.operators, pipeline.most_skipped, note=note)

    def applied(self, element: Element) -> Apply:
        """Returns the function that reports one of the operators and applies it to a sample."""
        function, name, note = self.untraced(element), name_of(element), self.note

        def noted(sample: Sample, draw: Draw) -> Sample | None:
            note(name)
            try:
                return function(sample, draw)
            finally:
                note("")

        return noted

    def notes(self, name: str) -> None:
        """Reports the operator that this thread runs from now on."""
        self.note(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return Pipeline, (self.source, self.operators, self.most_skipped)


@dataclass(frozen=True)
class CachePoint:
    """The place in a plan's order where samples are cached.

    Attributes:
        num_elements: number of record operators that run before the cache, in the order of the plan.
        kind: where the samples are cached.
    """

    num_elements: int
    kind: Literal["memory", "disk"]


@dataclass(frozen=True)
class InputPlan:
    """A way to run a pipeline; every plan produces the same samples.

    Attributes:
        pipeline: pipeline as the user wrote it.
        orders: for each level, the names of its elements in the order in which they run.
        cache: where samples are cached; None to produce them again in every epoch.
        num_threads: threads per process that produce samples; 0 to produce them in the caller's thread.
        num_processes: processes that produce samples; 0 to use only the caller's process.
        num_ahead: number of samples to prefetch.
        num_offloaded: number of record operators that input hosts run after reading the record, in the order of the
            plan, at most up to the cache; None if hosts do not even read records. Only threads can send requests to
            hosts, not processes.
        alone: threads and processes with which this machine continues once no input host is left.
        check_every: one sample in this many is also produced in the order as written, and compared; 0 for none.
        reasons: one line per pass of the optimizer: what it chose and why.
    """

    pipeline: Pipeline
    orders: tuple[tuple[str, ...], ...]
    cache: CachePoint | None = None
    num_threads: int = 0
    num_processes: int = 0
    num_ahead: int = 0
    num_offloaded: int | None = None
    alone: tuple[int, int] = (0, 0)
    check_every: int = 0
    reasons: tuple[str, ...] = ()

    def elements(self, level: int) -> tuple[Element, ...]:
        """Returns a level's elements in the order in which they run."""
        by_name = {name_of(element): element for element in self.pipeline.levels[level].elements}
        return tuple(by_name[name] for name in self.orders[level])

    def without_hosts(self) -> "InputPlan":
        """Returns the plan with which this machine continues once no input host is left."""
        num_threads, num_processes = self.alone
        return replace(self, num_offloaded=None, num_threads=num_threads, num_processes=num_processes)

    @property
    def num_surveyed(self) -> int:
        """Number of record operators that the survey runs on the whole source, to determine which records are kept."""
        elements = self.elements(0)
        first_random = next((index for index, element in enumerate(elements) if element.is_random), len(elements))
        if self.pipeline.most_skipped or self.num_packed:
            return first_random
        chosen = [index + 1 for index, element in enumerate(elements) if isinstance(element, Filter | DropDuplicates)]
        num_cached = self.cache.num_elements if self.cache is not None else 0
        return max([num_cached, *chosen])

    @property
    def num_packed(self) -> int:
        """Number of positions in a packed row; 0 if nothing is packed."""
        groups = (level.group for level in self.pipeline.levels)
        return next((group.length for group in groups if isinstance(group, Pack)), 0)


def plain_plan(pipeline: Pipeline) -> InputPlan:
    """Returns the plan without optimization: every operator runs where it is written, without cache or workers."""
    return InputPlan(pipeline, tuple(tuple(map(name_of, level.elements)) for level in pipeline.levels))
