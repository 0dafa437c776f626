"""Who is down, and when: the failure list of an experiment, and what a run asks of it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from swift.errors import SettingError
from swift.topology import Topology, Worker

SETTING = "Experiment.failures"
_FORM = re.compile(r"\s*step\s+([0-9]+)\s*:\s*([a-z]+)\s+([0-9]+):([0-9]+)\s*")


class FailureSource(Protocol):
    """Says which workers are down. A run asks before every window of iterations that it runs as one program."""

    def failed(self, first_step: int, last_step: int) -> frozenset[Worker]:
        """The workers without which the iterations from ``first_step`` to ``last_step``, from 1, are run.

        A failure costs the window that it falls into, which the survivors run again: so who fails in a window is down
        from its first step. Who comes back does so at the first window that starts no earlier.
        """


class FailureEvent(NamedTuple):
    """A worker fails, or joins again.

    Attributes:
        step: the first iteration without the worker, or with it again; from 1.
        kind: which of the two.
        worker: (pipeline, stage).
    """

    step: int
    kind: Literal["fail", "rejoin"]
    worker: Worker


@dataclass(frozen=True)
class FailureList:
    """Failures that are known beforehand; a ``FailureSource``.

    >>> events = parse_failures(["step 20: fail 1:2", "step 45: rejoin 1:2"], Topology(2, 3), num_steps=60)
    >>> [sorted(events.failed(step, step)) for step in (19, 20, 44, 45)]
    [[], [(1, 2)], [(1, 2)], []]
    >>> sorted(events.failed(18, 21)), sorted(events.failed(43, 46))
    ([(1, 2)], [(1, 2)])

    Attributes:
        events: by step; those of a step in the order of the list.
    """

    events: tuple[FailureEvent, ...] = ()

    def failed(self, first_step: int, last_step: int) -> frozenset[Worker]:
        """The workers that are down in a window, see ``FailureSource``."""
        down: set[Worker] = set()
        for step, kind, worker in self.events:
            if kind == "fail" and step <= last_step:
                down.add(worker)
            elif kind == "rejoin" and step <= first_step:
                down.discard(worker)
        return frozenset(down)


def parse_failures(texts: Sequence[str], topology: Topology, num_steps: int, window: int = 1) -> FailureList:
    """The failure list of an experiment.

    Args:
        texts: such as ``step 20: fail 1:2`` and ``step 45: rejoin 1:2``, in any order of steps.
        topology: whose workers fail, pipeline:stage.
        num_steps: of the experiment.
        window: iterations that are run as one program.

    Raises:
        SettingError: a text is not of that form, names a step or a worker that is not there, fails a worker that is
            down, re-joins one that is up, or leaves a stage without a live worker in
            some window.
    """
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise SettingError(SETTING, texts, "must be a list of texts, such as ['step 20: fail 1:2']")
    told = [(text, _parse(text, topology, num_steps)) for text in texts]
    told.sort(key=lambda pair: pair[1].step)
    down: set[Worker] = set()
    for text, event in told:
        _check_turn(text, event, down, topology)
        (down.add if event.kind == "fail" else down.remove)(event.worker)
    failures = FailureList(tuple(event for _, event in told))
    for text, event in told:
        _check_window(text, event, failures, topology, window)
    return failures


def parse_event(
    setting: str, text: str, kinds: Sequence[str], topology: Topology, last_step: tuple[str, int]
) -> tuple[int, str, Worker]:
    """(step, kind, worker) of one text such as ``step 20: fail 1:2``, without a look at others.

    Args:
        setting: what the text was given for.
        text: what was given.
        kinds: what can happen to a worker.
        topology: whose workers there are.
        last_step: the last step that is allowed, and what a user knows it as.

    Raises:
        SettingError: the text is not of that form, or names a step or a worker that is not there.
    """
    found = _FORM.fullmatch(text)
    if found is None or found[2] not in kinds:
        first, *others = kinds
        allowed = f"must be 'step STEP: {first} PIPELINE:STAGE'"
        raise SettingError(setting, text, allowed + "".join(f" or 'step STEP: {other} ...'" for other in others))
    step, worker, (name, last) = int(found[1]), (int(found[3]), int(found[4])), last_step
    if not 1 <= step <= last:
        raise SettingError(setting, text, f"the step must be 1 to {name} = {last}")
    if worker not in topology.workers:
        shape = f"{topology.num_pipelines} pipelines x {topology.num_stages} stages"
        raise SettingError(setting, text, f"no such worker among {shape}, both counted from 0")
    return step, found[2], worker


def _parse(text: str, topology: Topology, num_steps: int) -> FailureEvent:
    last_step = ("Experiment.num_steps", num_steps)
    step, kind, worker = parse_event(SETTING, text, ("fail", "rejoin"), topology, last_step)
    return FailureEvent(step, "fail" if kind == "fail" else "rejoin", worker)


def _check_turn(text: str, event: FailureEvent, down: set[Worker], topology: Topology) -> None:
    """Raises SettingError unless the event can follow those after which ``down`` are down."""
    (d, p), is_down = event.worker, event.worker in down
    if event.kind == "rejoin":
        if not is_down:
            raise SettingError(SETTING, text, f"worker {d}:{p} is live at that time")
    elif is_down:
        raise SettingError(SETTING, text, f"worker {d}:{p} is down already at that time")
    elif all((peer, p) in down for peer in range(topology.num_pipelines) if peer != d):
        raise SettingError(SETTING, text, f"leaves stage {p} without a live worker")


def _check_window(text: str, event: FailureEvent, failures: FailureList, topology: Topology, window: int) -> None:
    """Raises SettingError where a failure and others in a window before it leave a stage without a live worker.

    Any window that ends with the failure counts: evaluations, checkpoints and a resumed run shift where windows begin.
    """
    step, kind, (_, p) = event
    down = failures.failed(max(1, step - window + 1), step)
    if kind == "fail" and all((d, p) in down for d in range(topology.num_pipelines)):
        allowed = f"may leave stage {p} without a live worker: in a window of Experiment.window = {window} iterations "
        allowed += "who fails is down from its start, and who re-joins is back after its end"
        raise SettingError(SETTING, text, allowed)
