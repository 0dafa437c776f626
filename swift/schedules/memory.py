"""Memory of a schedule: stashes and inboxes of every worker.

F allocates the F-stash, B turns it into the W-stash (while B runs, the larger of the two is held), and W frees it. A
message occupies the inbox of its reader from the end of the op that sends it to the end of the op that reads it; what
passes from one chunk to the next on the same worker is not a message.
"""

import numpy as np

from swift.schedules.ops import Kind
from swift.schedules.problem import Problem
from swift.schedules.schedule import Round, Schedule


def peak_memory(schedule: Schedule) -> np.ndarray:
    """Computes the peak memory of every worker.

    Returns:
        float64[D * P], in the unit of the costs' stashes; 0 for a worker that runs nothing.
    """
    problem, kind = schedule.problem, schedule.kind
    f_stash_n, w_stash_n = problem.stash_2P[:, schedule.chunk]
    grown_n, shrunk_n = np.maximum(0.0, w_stash_n - f_stash_n), np.maximum(0.0, f_stash_n - w_stash_n)
    is_f, is_b, is_w = (np.flatnonzero(kind == each) for each in (Kind.F, Kind.B, Kind.W))
    events = [
        (schedule.worker[is_f], schedule.start[is_f], f_stash_n[is_f]),
        (schedule.worker[is_b], schedule.start[is_b], grown_n[is_b]),
        (schedule.worker[is_b], schedule.end[is_b], -shrunk_n[is_b]),
        (schedule.worker[is_w], schedule.end[is_w], -w_stash_n[is_w]),
    ]
    if problem.costs.inbox:
        events += _inbox_events(schedule)
    worker = np.concatenate([event[0] for event in events])
    # Rounded, so that memory freed by one op is available to the next one, which starts at the same time.
    time = np.round(np.concatenate([event[1] for event in events]) / time_tolerance(schedule))
    delta = np.concatenate([event[2] for event in events])
    order = np.lexsort((delta, time, worker))
    worker, delta = worker[order], delta[order]
    held = np.cumsum(delta)
    peaks = np.zeros(schedule.problem.num_pipelines * schedule.problem.num_stages)
    # The sum carried over from previous workers is memory that they never freed: zero in a valid schedule.
    before = np.concatenate([[0.0], held])[np.searchsorted(worker, worker)]
    np.maximum.at(peaks, worker, held - before)
    return peaks


def fits(problem: Problem, one: Round) -> bool:
    """Checks that a repeating iteration stays within the memory limit of its problem, including messages."""
    if problem.memory_limit is None:
        return True
    return float(peak_memory(Schedule.from_round(problem, "", one)).max()) <= problem.memory_limit * (1 + 1e-9)


def time_tolerance(schedule: Schedule) -> float:
    """Tolerance within which times are equal, since floating-point sums depend on their order."""
    return 1e-9 * max(1e-300, float(schedule.end.max(initial=0.0)))


def _inbox_events(schedule: Schedule) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    inbox, (f_KDMP, b_KDMP, w_KDMP) = schedule.problem.costs.inbox, schedule.row_3KDMP
    sent_back_KDMP = b_KDMP if schedule.problem.decoupled else w_KDMP
    events = []
    for senders, readers in ((f_KDMP[..., :-1], f_KDMP[..., 1:]), (sent_back_KDMP[..., 1:], b_KDMP[..., :-1])):
        # What stays on a worker takes no room but that of the stash.
        both = (senders >= 0) & (readers >= 0) & (schedule.worker[senders] != schedule.worker[readers])
        sender, reader = senders[both], readers[both]
        worker, size = schedule.worker[reader], np.full(len(reader), inbox)
        events += [(worker, schedule.end[sender], size), (worker, schedule.end[reader], -size)]
    return events
