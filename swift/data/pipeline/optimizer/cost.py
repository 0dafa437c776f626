"""The predicted time of a plan, from a profile.

An operator's time grows in proportion to the bytes of the fields that it reads, as in cedar (section 4): moved behind
one that shrinks them, it takes less. A record that is left out costs nothing afterwards.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from swift.data.pipeline.operators import DropDuplicates, Element, Filter, name_of
from swift.data.pipeline.optimizer.profile import HostsProfile, InputProfile, OperatorProfile
from swift.data.pipeline.plan import CachePoint, InputPlan
from swift.errors import check_count, check_number

START_S = 3.0
"""Seconds until a process that makes samples has started."""
_DISK_S_PER_BYTE = 1e-9
"""Seconds to read a byte of a file that is kept, beside decoding it."""


@dataclass(frozen=True)
class Resources:
    """Limits of what a plan may use.

    Args:
        num_epochs: epochs that will be read; what is kept has to be worth it in these.
        num_cores: cores for making samples.
        memory_bytes: memory for samples that are kept, and for those ahead of their use.
        disk_bytes: room on the disk for samples that are kept.
        cache_directory: directory for them; None: none are kept on a disk.
        hosts: profile of other hosts that can make samples; None: there are none.
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
    """Predicted seconds of one thread for all records of a source.

    Attributes:
        once_s: before the first sample: what stays is found out, and kept.
        epoch_s: in each epoch.
        kept_bytes: bytes that are kept.
    """

    once_s: float
    epoch_s: float
    kept_bytes: float

    def total_s(self, num_epochs: float) -> float:
        """Returns the seconds of this many epochs."""
        return self.once_s + num_epochs * self.epoch_s


def predict(plan: InputPlan, profile: InputProfile) -> Cost:
    """Predicts the time of a plan."""
    elements = plan.elements(0)
    steps = list(steps_of(plan, elements, profile))
    read_s, num = profile.source.seconds, profile.num_records
    kept_num = num * (steps[-1].kept if steps else 1.0)
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
    return Cost(once_s, kept_num * visits(plan, profile) * (begin_s + makes_s), kept_bytes)


@dataclass(frozen=True)
class PlacedOperator:
    """An operator in its place.

    Attributes:
        element: operator.
        alone_s: seconds for one sample that reaches it.
        seconds: the same, times the share of records that reach it.
        kept: share of records that pass it and all before it.
        num_bytes: bytes of a sample after it.
    """

    element: Element
    alone_s: float
    seconds: float
    kept: float
    num_bytes: float


def steps_of(plan: InputPlan, elements: Sequence[Element], profile: InputProfile) -> Iterator[PlacedOperator]:
    """Yields the operators of records in an order, each with its predicted time and bytes."""
    written = [name_of(one) for one in plan.pipeline.levels[0].elements]
    means = dict(zip(written, profile.operators, strict=True))
    by_name = {name_of(one): one for one in elements}
    before, kept = list[str](), 1.0
    size = profile.source.bytes_out
    grown = _growth(written, means, profile.source.bytes_out)
    for element in elements:
        name = name_of(element)
        own, usual = means[name], written[: written.index(name)]
        ratio = 1.0
        for other in set(before) ^ set(usual):
            if _writes_what(by_name[other], element):
                ratio *= means[other].writes_ratio if other in before else 1 / means[other].writes_ratio
        seconds = own.seconds * ratio
        size = max(0.0, size + grown[name] * ratio)
        reach, kept = kept, kept * own.kept_share
        before.append(name)
        yield PlacedOperator(element, seconds, reach * seconds, kept, size)


def _growth(written: Sequence[str], means: dict[str, OperatorProfile], size: float) -> dict[str, float]:
    """Returns how many bytes each operator adds to a sample, in the order in which they are written."""
    added = {}
    for name in written:
        after = means[name].bytes_out or size  # 0 where no sample has come so far
        added[name], size = (0.0, size) if after == size else (after - size, after)
    return added


def _writes_what(other: Element, element: Element) -> bool:
    """Whether an operator changes the size of what another reads."""
    if other.writes is None or element.reads is None:
        return other.writes != ()
    return bool(set(other.writes) & set(element.reads))


def visits(plan: InputPlan, profile: InputProfile) -> float:
    """Returns the times that a record is made in an epoch: shuffled rows make a document once for each row of it."""
    rows = next((level for level in plan.pipeline.levels[1:] if hasattr(level.group, "length")), None)
    if rows is None or not rows.is_shuffled:
        return 1.0
    return 1.0 + profile.tokens / plan.num_packed


def cache_choices(plan: InputPlan, profile: InputProfile, resources: Resources) -> Iterator[InputPlan]:
    """Yields a plan with each cache that fits: before the first random operator, and where fields can be kept."""
    yield replace(plan, cache=None)
    elements = plan.elements(0)
    for place in range(len(elements) + 1):
        if place in profile.unkept or any(one.is_random for one in elements[:place]):
            continue
        memory, disk = (replace(plan, cache=CachePoint(place, kind)) for kind in ("memory", "disk"))
        size = predict(memory, profile).kept_bytes
        if size <= resources.memory_bytes:
            yield memory
        if resources.cache_directory is not None and size <= resources.disk_bytes:
            yield disk


def cheapest_cache(plan: InputPlan, profile: InputProfile, resources: Resources) -> tuple[InputPlan, float]:
    """Returns the plan with the cache that costs least, and its seconds."""
    costs = [
        (predict(one, profile).total_s(resources.num_epochs), number, one)
        for number, one in enumerate(cache_choices(plan, profile, resources))
    ]
    seconds, _, chosen = min(costs, key=lambda cost: cost[:2])
    return chosen, seconds
