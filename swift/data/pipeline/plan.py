"""The plan of a pipeline: the order of the operators, what is kept, and how many threads and processes run them."""

from dataclasses import dataclass, replace
from typing import Literal

from swift.data.pipeline.operators import DropDuplicates, Element, Filter, Pack, name_of
from swift.data.pipeline.pipeline import Pipeline


@dataclass(frozen=True)
class CachePoint:
    """A place in the order where samples are kept.

    Attributes:
        num_elements: elements of records that run before, in the order of the plan.
        kind: where they are kept.
    """

    num_elements: int
    kind: Literal["memory", "disk"]


@dataclass(frozen=True)
class InputPlan:
    """A way to run a pipeline; what its samples are is the same for every plan.

    Attributes:
        pipeline: pipeline as the user wrote it.
        orders: for each level, the names of its elements in the order in which they run.
        cache: samples that are kept; None: each is made again in every epoch.
        num_threads: threads of each process that make samples; 0: none, the caller makes them.
        num_processes: processes that make samples; 0: none but the caller's.
        num_ahead: samples that are ready before they are asked for.
        num_offloaded: elements of records that other hosts run once they have read the record, in the order of the
            plan, at most those before the cache; None: they do not even read it. Only threads ask them.
        alone: threads and processes with which this host goes on once no other is left.
        check_every: one sample in so many is made in the order of the pipeline, too, and compared; 0: none.
        reasons: for each pass, a line that says what it chose and why.
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
        """Returns the elements of a level in the order in which they run."""
        by_name = {name_of(element): element for element in self.pipeline.levels[level].elements}
        return tuple(by_name[name] for name in self.orders[level])

    def without_hosts(self) -> "InputPlan":
        """Returns the plan for when no other host is left."""
        num_threads, num_processes = self.alone
        return replace(self, num_offloaded=None, num_threads=num_threads, num_processes=num_processes)

    @property
    def num_surveyed(self) -> int:
        """Elements of records that run once on the whole source before the first sample: to know what stays."""
        elements = self.elements(0)
        first_random = next((place for place, one in enumerate(elements) if one.is_random), len(elements))
        if self.pipeline.most_skipped or self.num_packed:
            return first_random
        chosen = [place + 1 for place, one in enumerate(elements) if isinstance(one, Filter | DropDuplicates)]
        kept = self.cache.num_elements if self.cache is not None else 0
        return max([kept, *chosen])

    @property
    def num_packed(self) -> int:
        """Positions of a packed row; 0: nothing is packed."""
        groups = (level.group for level in self.pipeline.levels)
        return next((group.length for group in groups if isinstance(group, Pack)), 0)


def plain_plan(pipeline: Pipeline) -> InputPlan:
    """Returns the plan that runs every operator where it is written, for every sample anew."""
    return InputPlan(pipeline, tuple(tuple(map(name_of, level.elements)) for level in pipeline.levels))
