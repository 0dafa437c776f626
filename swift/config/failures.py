"""Failures of workers that an experiment lists in advance.

The list of texts is parsed into a ``FailureList``, which determines which workers are down in which iterations. If a
stage has peers, a worker fails as a whole. With a single pipeline, individual expert ranks fail.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from swift.config.experiment import FAILURES_SETTING, Experiment
from swift.errors import SettingError
from swift.topology import Topology, Worker

StageRank = tuple[int, int]
"""An expert rank in a run of one pipeline: (stage, rank)."""

_FORM = re.compile(r"\s*step\s+([0-9]+)\s*:\s*([a-z]+)\s+([0-9]+):([0-9]+)\s*")
_WITH_RANK = re.compile(r"(.*\S)\s+rank\s+([0-9]+)\s*")
"""Patterns for the text of a failure: the event of a worker, and the optional rank at the end."""


class FailureSource(Protocol):
    """A source of failures that is queried before every window."""

    def failed(self, first_step: int, last_step: int) -> frozenset[Worker]:
        """Returns the workers that are down in the window from ``first_step`` to ``last_step``, counted from 1.

        A window runs as one program, which the survivors run again after a failure within it. A worker that fails in a
        window is therefore down from the window's first step. It rejoins in the first window that starts no earlier
        than its return.
        """

    def lost_ranks(self, first_step: int, last_step: int) -> frozenset[StageRank]:
        """Returns the expert ranks that are down in a window, by the rules of ``failed``."""


class FailureEvent(NamedTuple):
    """The failure or return of a worker or an expert rank.

    Attributes:
        step: first iteration without the worker or, after a return, with it again; counted from 1.
        kind: whether the worker fails or returns.
        worker: (pipeline, stage) of the worker.
        rank: expert rank of the worker, or None for the whole worker.
    """

    step: int
    kind: Literal["fail", "rejoin"]
    worker: Worker
    rank: int | None = None

    @property
    def who(self) -> str:
        """Name of the worker or rank, for messages."""
        name = "worker {}:{}".format(*self.worker)
        return name if self.rank is None else f"rank {self.rank} of {name}"


@dataclass(frozen=True)
class FailureList:
    """Failures known in advance; a ``FailureSource``.

    >>> events = parse_failures(["step 20: fail 1:2", "step 45: rejoin 1:2"], Topology(2, 3), num_steps=60)
    >>> [sorted(events.failed(step, step)) for step in (19, 20, 44, 45)]
    [[], [(1, 2)], [(1, 2)], []]
    >>> sorted(events.failed(18, 21)), sorted(events.failed(43, 46))
    ([(1, 2)], [(1, 2)])

    Attributes:
        events: events sorted by step; those of the same step are in the order of the experiment's list.
    """

    events: tuple[FailureEvent, ...] = ()

    def failed(self, first_step: int, last_step: int) -> frozenset[Worker]:
        """Returns the workers that are down in a window, see ``FailureSource``."""
        return frozenset(worker for worker, rank in self._down(first_step, last_step) if rank is None)

    def lost_ranks(self, first_step: int, last_step: int) -> frozenset[StageRank]:
        """Returns the ranks that are down in a window, see ``FailureSource``."""
        down = self._down(first_step, last_step)
        return frozenset((stage, rank) for (_, stage), rank in down if rank is not None)

    def is_over(self, step: int) -> bool:
        """Whether no worker fails or rejoins after this step."""
        return all(event.step <= step for event in self.events)

    def _down(self, first_step: int, last_step: int) -> set[tuple[Worker, int | None]]:
        down: set[tuple[Worker, int | None]] = set()
        for step, kind, worker, rank in self.events:
            if kind == "fail" and step <= last_step:
                down.add((worker, rank))
            elif kind == "rejoin" and step <= first_step:
                down.discard((worker, rank))
        return down


def failure_list(experiment: Experiment) -> FailureList:
    """Parses and checks the failures that an experiment lists."""
    return parse_failures(experiment.failures, experiment.topology, experiment.num_steps, experiment.window)


def parse_failures(texts: Sequence[str], topology: Topology, num_steps: int, window: int = 1) -> FailureList:
    """Parses the failure list of an experiment.

    Args:
        texts: texts such as ``step 20: fail 1:2`` and ``step 45: rejoin 1:2``, in any order; with a single pipeline
            also texts such as ``step 20: fail 0:0 rank 3``.
        topology: topology of the cluster.
        num_steps: number of iterations of the experiment.
        window: number of iterations that run as one program.

    Raises:
        SettingError: a text does not have this form, or names a step, worker or rank that does not exist; a worker
            or rank that is already down fails, or one that is live rejoins; or some window would leave a stage without
            a live worker, or the run without an expert rank.
    """
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise SettingError(FAILURES_SETTING, texts, "must be a list of texts, such as ['step 20: fail 1:2']")
    parsed = [(text, _parse(text, topology, num_steps)) for text in texts]
    parsed.sort(key=lambda pair: pair[1].step)
    down: dict[tuple[Worker, int | None], int] = {}
    for text, event in parsed:
        _check_turn(text, event, down, topology)
        if event.kind == "fail":
            down[event.worker, event.rank] = event.step
        else:
            del down[event.worker, event.rank]
    failures = FailureList(tuple(event for _, event in parsed))
    for text, event in parsed:
        _check_window(text, event, failures, topology, window)
    return failures


def parse_rank(text: str) -> tuple[str, int | None]:
    """Splits the text of a failure into the part before the rank and the rank, or None if it names no rank.

    >>> parse_rank("step 20: fail 0:0 rank 3"), parse_rank("step 20: fail 1:2")
    (('step 20: fail 0:0', 3), ('step 20: fail 1:2', None))
    """
    match = _WITH_RANK.fullmatch(text)
    return (match[1], int(match[2])) if match else (text, None)


def parse_event(
    setting: str, text: str, kinds: Sequence[str], topology: Topology, last_step: tuple[str, int]
) -> tuple[int, str, Worker]:
    """Parses one text such as ``step 20: fail 1:2`` into (step, kind, worker), independently of other events.

    Args:
        setting: name of the setting or option that contains the text, for errors.
        text: text to parse.
        kinds: allowed kinds of events, such as ``fail``.
        topology: topology of the cluster.
        last_step: last allowed step, as (name of the setting that determines it, value).

    Raises:
        SettingError: the text does not have this form, or names a step or a worker that does not exist.
    """
    match = _FORM.fullmatch(text)
    if match is None or match[2] not in kinds:
        first, *other_kinds = kinds
        allowed = f"must be 'step STEP: {first} PIPELINE:STAGE'"
        raise SettingError(setting, text, allowed + "".join(f" or 'step STEP: {other} ...'" for other in other_kinds))
    step, worker, (name, last) = int(match[1]), (int(match[3]), int(match[4])), last_step
    if not 1 <= step <= last:
        raise SettingError(setting, text, f"the step must be 1 to {name} = {last}")
    if worker not in topology.workers:
        shape = f"{topology.num_pipelines} pipelines x {topology.num_stages} stages"
        raise SettingError(setting, text, f"no such worker among {shape}, both counted from 0")
    return step, match[2], worker


def _parse(text: str, topology: Topology, num_steps: int) -> FailureEvent:
    worker_text, rank = parse_rank(text)
    last_step = ("Experiment.num_steps", num_steps)
    try:
        step, kind, worker = parse_event(FAILURES_SETTING, worker_text, ("fail", "rejoin"), topology, last_step)
    except SettingError as error:
        raise SettingError(FAILURES_SETTING, text, error.allowed) from None
    if rank is not None and topology.num_pipelines > 1:
        allowed = "may name a rank with one pipeline only: where a stage has peers, its worker fails as a whole"
        raise SettingError(FAILURES_SETTING, text, allowed)
    if rank is not None and rank >= topology.num_expert_ranks:
        raise SettingError(FAILURES_SETTING, text, f"no such rank among {topology.num_expert_ranks}, counted from 0")
    return FailureEvent(step, "fail" if kind == "fail" else "rejoin", worker, rank)


def _check_turn(
    text: str, event: FailureEvent, down: Mapping[tuple[Worker, int | None], int], topology: Topology
) -> None:
    """Raises SettingError if an event is impossible while ``down`` are down, each since its step."""
    (d, p), since = event.worker, down.get((event.worker, event.rank))
    if event.kind == "rejoin":
        if since is None:
            raise SettingError(FAILURES_SETTING, text, f"{event.who} is live at that time")
        if event.rank is not None and since == event.step:
            raise SettingError(FAILURES_SETTING, text, f"{event.who} fails in that iteration, and can rejoin after it")
    elif since is not None:
        raise SettingError(FAILURES_SETTING, text, f"{event.who} is down already at that time")
    elif event.rank is not None:
        if len({rank for _, rank in down} | {event.rank}) == topology.num_expert_ranks:
            raise SettingError(FAILURES_SETTING, text, f"leaves {_no_rank(topology)}")
    elif all(((peer, p), None) in down for peer in range(topology.num_pipelines) if peer != d):
        hint = f"; a rank of it can fail: '{text.strip()} rank 0'" if topology.num_pipelines == 1 else ""
        raise SettingError(FAILURES_SETTING, text, f"leaves stage {p} without a live worker{hint}")


def _no_rank(topology: Topology) -> str:
    """Describes what too many failures leave the run without; a rank lost in one stage is lost in all stages."""
    return "no live expert rank" + (" that all stages have" if topology.num_stages > 1 else "")


def _check_window(text: str, event: FailureEvent, failures: FailureList, topology: Topology, window: int) -> None:
    """Raises SettingError if a failure and others in the same window leave a stage without a live worker or rank.

    The check considers the window that ends with the failure, since any window may occur: evaluations, checkpoints and
    resumed runs shift where windows begin.
    """
    if event.kind == "rejoin":
        return
    first, last, stage = max(1, event.step - window + 1), event.step, event.worker[1]
    how = f"in a window of Experiment.window = {window} iterations, what fails is down from the start, and what "
    how += "rejoins is back after the end"
    down = failures.failed(first, last)
    if all((d, stage) in down for d in range(topology.num_pipelines)):
        raise SettingError(FAILURES_SETTING, text, f"may leave stage {stage} without a live worker: {how}")
    if len({rank for _, rank in failures.lost_ranks(first, last)}) == topology.num_expert_ranks:
        raise SettingError(FAILURES_SETTING, text, f"may leave {_no_rank(topology)}: {how}")
