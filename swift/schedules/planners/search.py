"""Search for a good ``Policy``: first some that suit the problem, then small random changes to the best ones.

The main unknown is how many micro-batches the most loaded stages should hold between F and B. Early stages need many,
so that they have work while their first B is on its way. Late stages need few, so that the last B leaves early.

The other unknown is re-routing (ReCycle): which peer runs each of a failed worker's micro-batches, and when. Peers hold
the same weights, those of the same stage in other pipelines, so any of them can. ``reroute`` picks the least loaded
peer, the search tries other assignments, and the plan passes the choice on to the training step.
"""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from swift.schedules.bounds import max_in_flight, tight_bound
from swift.schedules.planners.list_scheduling import Listing, Policy, list_schedule, microbatch_ids
from swift.schedules.problem import Kind, Problem

_PATIENCE = (0.3, 0.6, 0.0)
_CALM_PATIENCE = (1.0, 0.3, 0.6)
_HURRIED_PER_CALM = 8
"""Number of unpaced policies (``_hurried``) per paced one (``_calm``).

Unpaced ones come first, unless memory turns over."""
_PLACES = (None, 0.25, 0.0, 0.5, 0.75, 1.0)
_SHARE_OF_FIRST_POLICIES = 0.3
_MANY_TRIALS = 1_000
_FIRST_OF_MANY_TRIALS = 50
LEAST_TRIALS = 5
_NUM_LEADERS = 3
_MOST_IN_VAIN, _NEAR = 400, 1.03
"""Number of policies without improvement after which the search ends, and how close to the target the best one has to
be, as a factor. If workers hold several chunks, the target is too loose, and the second condition does not apply."""


def reroute(problem: Problem) -> list[int]:
    """Assigns micro-batches to pipelines: live workers keep theirs, failed workers' go to the least loaded peer.

    Returns:
        Pipeline that runs each micro-batch at each chunk, as in ``Policy.executor``.
    """
    D, C = problem.num_pipelines, problem.num_chunks
    names = microbatch_ids(problem)
    executor = [d for d, _ in names for _ in range(C)]
    number = {name: j for j, name in enumerate(names)}
    # Uniform pipelines start with equal loads, and all micro-batches cost the same, so it suffices to count re-routed
    # micro-batches.
    work = [1.0] * C if problem.is_uniform else problem.time_4P[:3].sum(axis=0).tolist()
    load_of = [0.0] * (D * problem.num_stages)
    if not problem.is_uniform:
        for d, _ in names:
            for k, w in enumerate(problem.worker_DP[d].tolist()):
                load_of[w] += work[k]
    for k, peers in enumerate(problem.survivors):
        workers = problem.worker_DP[:, k].tolist()
        load = dict.fromkeys(workers, 0.0) if problem.is_uniform else load_of
        down = [d for d in range(D) if d not in peers]
        for m in range(problem.most_microbatches):
            for d in down:
                if (d, m) in number:
                    peer = min(peers, key=lambda peer: (load[workers[peer]], (peer - d) % D))
                    load[workers[peer]] += work[k]
                    executor[number[d, m] * C + k] = peer
    return executor


def order_rerouted(problem: Problem, executor: Sequence[int], place: float | None) -> list[float]:
    """Ranks micro-batches by index, and re-routed ones by a position among those of their host.

    Args:
        problem: problem whose micro-batches are ranked, in the order of ``microbatch_ids``.
        executor: pipeline that runs each micro-batch at each chunk, as in ``Policy.executor``.
        place: position among the host's own micro-batches, from 0 (early) to 1 (late); None to rank re-routed
            micro-batches by index, too.
    """
    D, M, C, names = problem.num_pipelines, problem.most_microbatches, problem.num_chunks, microbatch_ids(problem)
    # Pipelines with fewer micro-batches spread them over the same range of ranks.
    rank = [m * (M / problem.microbatches[d]) + d / D for d, m in names]
    if place is None:
        return rank
    by_index = sorted(range(len(names)), key=lambda j: names[j][1])
    for k, peers in enumerate(problem.survivors):
        guests: dict[int, list[int]] = {}
        for j in by_index:
            if names[j][0] not in peers:
                guests.setdefault(executor[j * C + k], []).append(j)
        for group in guests.values():
            for index, number in enumerate(group):
                rank[number] = (index + place) * M / len(group) + names[number][0] / D - 1.0 / D
    return rank


def _swap_hosts(problem: Problem, executor: Sequence[int], chunk: int, source: random.Random) -> list[int]:
    """Exchanges the hosts of two random re-routed micro-batches at a chunk."""
    C, peers = problem.num_chunks, problem.survivors[chunk]
    guests = [j * C + chunk for j, (d, _) in enumerate(microbatch_ids(problem)) if d not in peers]
    if not guests:
        return list(executor)
    changed, (first, second) = list(executor), (source.choice(guests), source.choice(guests))
    changed[first], changed[second] = changed[second], changed[first]
    return changed


@dataclass(frozen=True)
class Candidate:
    """A policy with its listing.

    Attributes:
        cost: period and, to break ties, the sum of the times by which stages exceed the target.
        policy: policy that was tried.
        listing: result of ``list_schedule`` with that policy.
    """

    cost: tuple[float, float]
    policy: Policy
    listing: Listing


def best_listing(problem: Problem, target: float, max_ops: int) -> Candidate:
    """Finds the best policy within a number of trials.

    Args:
        problem: problem to plan, for one iteration.
        target: lower bound on the period; the search stops when the period reaches it.
        max_ops: number of ops that all trials together may schedule; at least ``LEAST_TRIALS`` policies are tried.
    """
    num_trials = max(LEAST_TRIALS, max_ops // problem.num_ops + 4)
    goal = target * (1 + 1e-9)
    leaders: list[Candidate] = []
    num_in_vain, climbs_twice = 0, _climbs_twice(problem, num_trials)
    # Searching for a single pipeline is cheap, and its best policy suits the stages without failures.
    lone = problem.single_pipeline()
    is_reduced = problem.failed and problem.is_uniform
    pilot = best_listing(lone, tight_bound(lone), max_ops // 8).policy if is_reduced else None
    for policy in itertools.islice(_policies(problem, pilot, leaders, num_trials), num_trials):
        listing = list_schedule(problem, policy)
        cost = listing.period, sum(max(0.0, span - goal) for span in listing.spans)
        leaders.insert(0, Candidate(cost, policy, listing))  # ahead of its equals: drifting on a plateau helps
        num_in_vain = 0 if cost < min((leader.cost for leader in leaders[1:]), default=(math.inf,)) else num_in_vain + 1
        leaders.sort(key=lambda candidate: candidate.cost)
        shortest = leaders[0].cost[0]
        is_enough = shortest <= _NEAR * target or not problem.is_plain
        if shortest <= goal or (num_in_vain >= _MOST_IN_VAIN and is_enough):
            break
        leaders[:] = _best_of_each_kind(leaders) if climbs_twice else leaders[:_NUM_LEADERS]
    return leaders[0]


def _best_of_each_kind(leaders: Sequence[Candidate]) -> list[Candidate]:
    """Keeps the best unpaced and the best paced policy, since small changes rarely turn one kind into the other."""
    firsts = (next((leader for leader in leaders if bool(leader.policy.pace) == calm), None) for calm in (False, True))
    return sorted((candidate for candidate in firsts if candidate is not None), key=lambda candidate: candidate.cost)


def _policies(problem: Problem, pilot: Policy | None, leaders: list[Candidate], num_trials: int) -> Iterator[Policy]:
    """Yields initial policies, then random changes to the current leaders, endlessly."""
    num_first = max(LEAST_TRIALS - 1, int(num_trials * _SHARE_OF_FIRST_POLICIES))
    climbs_twice = _climbs_twice(problem, num_trials)
    if climbs_twice:
        num_first = _FIRST_OF_MANY_TRIALS
    yield from itertools.islice(first_policies(problem, pilot), num_first)
    # A fixed seed, and a budget of ops instead of seconds: a problem gets the same plan on every machine.
    source = random.Random(0)
    while True:
        policy = leaders[source.randrange(len(leaders))].policy
        for _ in range(source.choice((1, 1, 2, 3))):
            policy = _change(problem, policy, source)
        if climbs_twice and policy.pace and source.random() < 0.1:
            policy = replace(policy, pace=policy.pace * source.uniform(0.7, 1.3))
        yield policy


def _climbs_twice(problem: Problem, num_trials: int) -> bool:
    """Returns whether to improve an unpaced and a paced policy side by side, which pays off for small problems."""
    return num_trials >= _MANY_TRIALS and problem.is_plain and _memory_turns_over(problem)


def first_policies(problem: Problem, pilot: Policy | None = None) -> Iterator[Policy]:
    """Yields policies worth trying on any problem, the most promising first.

    Args:
        problem: problem to plan.
        pilot: good policy for a single pipeline without failures; None if unknown.
    """
    executor = reroute(problem)
    hurried, calm = _hurried(problem, executor, pilot), _calm(problem, executor)
    if _memory_turns_over(problem):
        yield from itertools.islice(calm, 1)
    while True:
        some = [*itertools.islice(hurried, _HURRIED_PER_CALM), *itertools.islice(calm, 1)]
        if not some:
            return
        yield from some


def _memory_turns_over(problem: Problem) -> bool:
    """Returns whether some worker runs more micro-batches than fit in its memory at once."""
    num_loaded = problem.most_loaded(min(map(len, problem.survivors)))
    return num_loaded > max_in_flight(problem, float(problem.stash_2P[0].max()))


def _calm(problem: Problem, executor: list[int]) -> Iterator[Policy]:
    """Yields policies paced so that a worker has room for the next F whenever a B returns.

    At this pace one B returns for each F that leaves: between the Bs of two micro-batches a worker has time for one F
    and the round trip of its message. A worker that runs Fs faster waits for memory later, which delays the last Fs on
    every worker.
    """
    if not problem.is_plain:
        return
    P, comm, (f_P, b_P, w_P) = problem.num_stages, problem.costs.t_comm, problem.time_4P[: Kind.U]
    cycle = float((f_P + b_P + (0.0 if problem.decoupled else w_P)).max())
    paces = tuple(dict.fromkeys((cycle + 2 * comm, cycle)))
    depths = [math.inf] * P, [float(P - p) for p in range(P)]
    choices = paces, _CALM_PATIENCE, depths, (None, 0.0, 0.5) if problem.failed else (None,)
    for i, j, k, r in sorted(itertools.product(*(range(len(kind)) for kind in choices)), key=sum):
        rank, in_flight = order_rerouted(problem, executor, choices[3][r]), depths[k] * problem.num_pipelines
        yield Policy(executor, rank, in_flight, _CALM_PATIENCE[j], pace=paces[i])


def _hurried(problem: Problem, executor: list[int], pilot: Policy | None) -> Iterator[Policy]:
    """Yields policies that start every op as early as possible."""
    depths, patience = list(_in_flight_by_stage(problem)), list(_PATIENCE if _is_uneven(problem) else (0.0,))
    if pilot is not None:
        depths.insert(2, list(pilot.in_flight))
        patience.sort(key=lambda share: share != pilot.patience)
    reserves = (True,) if problem.is_plain else (False, True)
    choices = depths, patience, _PLACES if problem.failed else (None,), reserves
    for i, j, k, r in sorted(itertools.product(*(range(len(kind)) for kind in choices)), key=sum):
        rank, in_flight = order_rerouted(problem, executor, choices[2][k]), depths[i] * problem.num_pipelines
        yield Policy(executor, rank, in_flight, patience[j], reserves[r])


def _in_flight_by_stage(problem: Problem) -> Iterator[list[float]]:
    """Yields in-flight targets by stage: the minimum, those of 1F1B, then others."""
    P = problem.num_stages
    live = [sum(stage == p for _, stage in problem.live_workers) for p in range(P)]
    loads = [problem.most_loaded(number) if number else 0 for number in live]
    most = max(loads)
    busiest = {p for p in range(P) if loads[p] == most}
    room = min(2.0 * P, most, max_in_flight(problem, problem.costs.f_stash))
    depths = sorted({*range(1, 5), *range(6, 2 * P + 1, 2)} - {round(0.75 * room)}, reverse=True)
    yield [0.0] * P
    yield [float(P - p) for p in range(P)]
    if len(busiest) == P:
        yield from ([math.inf] * j + [0.0] * (P - j) for j in range(1, P + 1))
        yield from ([float(depth)] * P for depth in depths if depth < room)
    else:
        for depth in (math.inf, round(0.75 * room), *(depth for depth in depths if depth < room)):
            yield [float(depth) if p in busiest else 0.0 for p in range(P)]
    yield from ([share * (P - p) for p in range(P)] for share in (1.5, 2.0, 0.5))


def _is_uneven(problem: Problem) -> bool:
    costs = problem.costs
    return bool(problem.chunks) or len({costs.t_f, costs.t_b, costs.t_w, costs.t_comm or costs.t_f}) > 1


def _change(problem: Problem, policy: Policy, source: random.Random) -> Policy:
    D, P = problem.num_pipelines, problem.num_stages
    wounded = [k for k, peers in enumerate(problem.survivors) if len(peers) < D]
    stage = (
        int(problem.stage_DP[0, source.choice(wounded)]) if wounded and source.random() < 0.7 else source.randrange(P)
    )
    way = source.random()
    if way < 0.4:
        return replace(policy, in_flight=_changed_at(policy.in_flight, [source.randrange(D) * P + stage], P, source))
    if way < 0.5:
        workers = [d * P + stage for d in range(D)]
        return replace(policy, in_flight=_changed_at(policy.in_flight, workers, P, source))
    if way < 0.8 or not wounded:
        rank = list(policy.rank)
        rank[source.randrange(len(rank))] += source.choice((-2.0, -1.0, -0.5, 0.5, 1.0, 2.0))
        return replace(policy, rank=rank)
    if way < 0.95:
        return replace(policy, executor=_swap_hosts(problem, policy.executor, source.choice(wounded), source))
    return replace(policy, patience=source.choice(_PATIENCE)) if _is_uneven(problem) else policy


def _changed_at(in_flight: Sequence[float], workers: list[int], P: int, source: random.Random) -> list[float]:
    changed, old = list(in_flight), in_flight[workers[0]]
    near = old + source.choice((-2.0, -1.0, 1.0, 2.0))
    new = source.choice((0.0, math.inf, float(source.randrange(2 * P + 1)))) if math.isinf(old) else max(0.0, near)
    for w in workers:
        changed[w] = new
    return changed
