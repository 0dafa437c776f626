"""Strategies by name, and the conditions under which they can run."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from swift.errors import SettingError
from swift.simulate.job import Job, Periods
from swift.simulate.published import FEWEST_NODES, MOST_NODES, Bamboo, Oobleck, Published, Varuna
from swift.simulate.restarting import FullCheckpoints, InMemoryCheckpoints, PartialCheckpoints, Restarting
from swift.simulate.strategies import Adapting, Gaps, Ideal, Rerouting, Strategy
from swift.simulate.traces import Trace


class CannotRun(NamedTuple):
    """A strategy that cannot run in a simulation.

    Attributes:
        name: name of the strategy.
        reason: why it cannot run, as a phrase.
        out_of_memory: whether it cannot run because it is out of memory.
    """

    name: str
    reason: str
    out_of_memory: bool = False


def _bamboo(model: Published) -> Strategy | CannotRun:
    if model.bamboo is None:
        return CannotRun("bamboo", f"out of memory, says Oobleck's artifact of {model.name}", out_of_memory=True)
    return Bamboo(model)


_OF_JOB: Mapping[str, Callable[[Job, Periods, Trace], Strategy]] = {
    "ideal": lambda job, periods, trace: Ideal(job),  # noqa: ARG005
    "swift": lambda job, periods, trace: Rerouting(job, periods),  # noqa: ARG005
    "recycle": lambda job, periods, trace: Rerouting(job, periods, moves_roles=True),  # noqa: ARG005
    "memory": lambda job, periods, trace: Restarting(job, periods, InMemoryCheckpoints()),  # noqa: ARG005
    "moc": lambda job, periods, trace: Restarting(job, periods, PartialCheckpoints()),  # noqa: ARG005
    "full": lambda job, periods, trace: Restarting(job, periods, FullCheckpoints(trace.mean_time_between_failures_s)),
}
_ON_REQUEST: Mapping[str, Callable[[Job, Periods, Trace], Strategy]] = {
    "adapt": lambda job, periods, trace: Adapting(job, periods, Gaps.of(trace)),
}
_OF_MODEL: Mapping[str, Callable[[Published], Strategy | CannotRun]] = {
    "oobleck": Oobleck,
    "varuna": Varuna,
    "bamboo": _bamboo,
}
STRATEGIES = (*_OF_JOB, *_OF_MODEL)
ON_REQUEST = tuple(_ON_REQUEST)
"""Strategies that run only on request, since planning takes a second for each number of survivors."""


def strategies(
    job: Job, trace: Trace, model: Published | None = None, names: Sequence[str] = STRATEGIES
) -> list[Strategy | CannotRun]:
    """Creates the strategies with the given names, in order, without duplicates.

    Args:
        job: training job.
        trace: trace on which the strategies will be simulated.
        model: model whose published figures Oobleck, Varuna and Bamboo use; None to leave these strategies out.
        names: names from ``STRATEGIES`` and ``ON_REQUEST``.

    Raises:
        SettingError: a strategy does not exist.
    """
    periods = Periods(job.problem)
    chosen: list[Strategy | CannotRun] = []
    for name in dict.fromkeys(names):
        if name in _OF_JOB or name in _ON_REQUEST:
            chosen.append({**_OF_JOB, **_ON_REQUEST}[name](job, periods, trace))
        elif name not in _OF_MODEL:
            raise SettingError("strategy", name, f"must be one of {', '.join((*STRATEGIES, *ON_REQUEST))}")
        elif model is None:
            chosen.append(CannotRun(name, "uses published figures of a model, and none is given"))
        elif trace.most_nodes > MOST_NODES:
            known = f"figures are of {FEWEST_NODES} to {MOST_NODES} nodes, and the trace has up to {trace.most_nodes}"
            chosen.append(CannotRun(name, known))
        else:
            chosen.append(_OF_MODEL[name](model))
    return chosen
