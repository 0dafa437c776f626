"""Generated traces: failures at random times, or evenly spaced."""

import heapq
import math
import random
from collections.abc import Callable

from swift.errors import check_count, check_number, check_seed
from swift.tools.simulate.traces.trace import Event, Trace


def poisson(num_nodes: int, mtbf_s: float, repair_s: float, horizon_s: float, seed: int = 0) -> Trace:
    """Generates failures of nodes that do not age: a Poisson process.

    Args:
        num_nodes: number of nodes, named ``node1``, ..., all present at the start.
        mtbf_s: mean time between failures in the cluster with all nodes present; failed nodes do not fail again.
        repair_s: time after which a failed node returns.
        horizon_s: length of the trace.
        seed: 32-bit seed.
    """
    return _random(num_nodes, mtbf_s, repair_s, horizon_s, seed, lambda source: source.expovariate(1 / mtbf_s))


def weibull(num_nodes: int, mtbf_s: float, shape: float, repair_s: float, horizon_s: float, seed: int = 0) -> Trace:
    """Generates failures whose intervals have a Weibull distribution.

    Args:
        num_nodes: number of nodes, as for ``poisson``.
        mtbf_s: mean of the distribution.
        shape: shape of the distribution: below 1, failures come in bursts; at 1, it is that of ``poisson``; above 1,
            they are more even.
        repair_s: time after which a failed node returns.
        horizon_s: length of the trace.
        seed: 32-bit seed.
    """
    check_number("shape", shape, least=0.1)
    check_number("mtbf (s)", mtbf_s, above=0)
    scale = mtbf_s / math.gamma(1 + 1 / shape)
    return _random(num_nodes, mtbf_s, repair_s, horizon_s, seed, lambda source: source.weibullvariate(scale, shape))


def evenly_spaced(num_nodes: int, period_s: float, num_removals: int, seed: int = 0) -> Trace:
    """Removes one random node each period, without returns: the traces of Oobleck's artifact.

    The trace ends with the last removal, which therefore costs nothing.

    >>> trace = evenly_spaced(4, 60.0, 2)
    >>> trace.horizon_s, trace.num_failures, [change.time_s for change in trace.changes]
    (120.0, 2, [60.0, 120.0])
    """
    check_count("nodes", num_nodes, least=1)
    check_number("period (s)", period_s, above=0)
    check_count("removals", num_removals, least=1)
    check_seed("seed", seed)
    names = _names(num_nodes)
    victims = random.Random(seed).sample(names, min(num_removals, num_nodes))
    removals = [Event(period_s * index, "remove", node) for index, node in enumerate(victims, start=1)]
    return Trace((*_all_at_once(names), *removals), period_s * len(victims))


def _random(
    num_nodes: int,
    mtbf_s: float,
    repair_s: float,
    horizon_s: float,
    seed: int,
    draw_s: Callable[[random.Random], float],
) -> Trace:
    check_count("nodes", num_nodes, least=1)
    check_number("mtbf (s)", mtbf_s, above=0)
    check_number("repair (s)", repair_s, least=0)
    check_seed("seed", seed)
    source, names = random.Random(seed), _names(num_nodes)
    events, back, down, time_s = _all_at_once(names), list[tuple[float, str]](), set[str](), 0.0
    while (time_s := time_s + draw_s(source)) <= horizon_s:
        while back and back[0][0] <= time_s:
            back_s, node = heapq.heappop(back)
            events.append(Event(back_s, "add", node))
            down.remove(node)
        # Failed nodes are drawn as well, without effect, so that fewer nodes fail less often.
        node = names[source.randrange(num_nodes)]
        if node not in down:
            events.append(Event(time_s, "remove", node))
            down.add(node)
            heapq.heappush(back, (time_s + repair_s, node))
    events += [Event(back_s, "add", node) for back_s, node in sorted(back) if back_s <= horizon_s]
    return Trace(tuple(events), horizon_s)


def _names(num_nodes: int) -> list[str]:
    return [f"node{number}" for number in range(1, num_nodes + 1)]


def _all_at_once(names: list[str]) -> list[Event]:
    return [Event(0.0, "add", node) for node in names]
