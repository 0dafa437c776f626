"""Lines for the terminal on the events of a run: short, and one for each event."""

from collections.abc import Mapping, Sequence
from typing import Any

from swift.elastic.membership.events import PHASES
from swift.elastic.membership.members import Process
from swift.elastic.reporting.recovery_timing import Transition
from swift.schedules.plans.holders import BlockHolders


def transition_text(
    transition: Transition, joined: Sequence[Process], cut: BlockHolders, fields: Mapping[str, Any]
) -> str:
    """Formats a line on a generation that has finished its first iteration.

    Args:
        transition: transition that led to it.
        joined: processes that were not in the generation before.
        cut: workers that hold each block there; False: as in the run.
        fields: fields of its note.
    """
    again = f", {count(fields['rerun_steps'], 'iteration')} again" if fields["rerun_steps"] else ""
    if transition.failed:
        several = len(transition.failed) > 1
        what = f"the first of {len(transition.failed)} failures" if several else "the failure"
    elif transition.is_move:
        what = "the decision"
    else:
        what = f"{names(joined)} {'was' if len(joined) == 1 else 'were'} admitted"
    timed = [(phase, fields.get(f"{phase}_s")) for phase in ("detection", "agreement", *PHASES)]
    phases = ", ".join(f"{phase.replace('_', ' ')} {s:.2f}" for phase, s in timed if s and s >= 0.005)
    whole_s = next(fields[name] for name in ("recovery_s", "join_s", "move_s") if name in fields)
    moved = f"blocks moved among the survivors, {cut.text}: " if cut else ""
    return (
        f"{moved}resumed after iteration {fields['after']} with {count(len(fields['members']), 'process')}{again}: "
        f"{whole_s:.2f} s after {what}" + (f" ({phases})" if phases else "")
    )


def rejoin_text(processes: Sequence[Process], after: int | None) -> str:
    """Formats a line on processes that rejoin, after an iteration or at once.

    >>> rejoin_text([Process((1, 1))], 9), rejoin_text([Process((0, 0)), Process((1, 1))], None)
    ('process 1:1 has rejoined, admitted after iteration 9', 'processes 0:0 and 1:1 have rejoined')
    """
    have = "has" if len(processes) == 1 else "have"
    return f"{names(processes)} {have} rejoined" + ("" if after is None else f", admitted after iteration {after}")


def stage_lost_text(stages: Sequence[int], *, is_one_cut: bool) -> str:
    """Formats a line on stages, or on layers where pipelines are cut differently, that no process serves any longer.

    >>> stage_lost_text([1], is_one_cut=True)
    'stage 1 has no process left: the others wait'
    >>> stage_lost_text([0, 1], is_one_cut=False)
    'layers of stages 0 and 1 have no process left: the others wait'
    """
    which = f"stage {stages[0]}" if len(stages) == 1 else f"stages {listed(list(map(str, stages)))}"
    if not is_one_cut:
        return f"layers of {which} have no process left: the others wait"
    return f"{which} {'has' if len(stages) == 1 else 'have'} no process left: the others wait"


def continue_text(num_left: int, num_processes: int) -> str:
    """Formats a clause on the number of processes that continue.

    >>> continue_text(3, 4), continue_text(1, 2)
    ('3 of 4 continue', '1 of 2 continues')
    """
    return f"{num_left} of {num_processes} {'continues' if num_left == 1 else 'continue'}"


def live_text(
    num_members: int, num_processes: int, after: int | None, *, is_first: bool, has_begun: bool = True
) -> str | None:
    """Formats a line on a generation that goes live; None if the line on its first iteration says more.

    Args:
        num_members: number of its members.
        num_processes: number of processes of the run.
        after: iteration after which it continues with a state of its members; None: they have none.
        is_first: whether it is the first one.
        has_begun: whether the run has done any iteration, or begun with a state that was loaded.

    >>> live_text(4, 4, None, is_first=True), live_text(3, 4, 20, is_first=True)
    ('running with 4 processes', 'running with 3 of 4 processes after iteration 20')
    >>> live_text(3, 4, None, is_first=False, has_begun=False)
    'no iteration was done yet: starting again with the first state'
    """
    if is_first:
        who = count(num_processes, "process")
        who = who if num_members == num_processes else f"{num_members} of {who}"
        return f"running with {who}" + ("" if after is None else f" after iteration {after}")
    if after is not None:
        return None
    if not has_begun:
        return "no iteration was done yet: starting again with the first state"
    return "no process has the state of some stage: going back to the newest checkpoint"


def reshard_text(num_ranks: int, num_before: int, after: int) -> str:
    """Formats a line on a state that was resharded.

    >>> reshard_text(3, 4, 17), reshard_text(4, 4, 17)
    ('resumed after iteration 17 on 3 ranks instead of 4', 'resumed after iteration 17 with 4 ranks')
    """
    if num_ranks == num_before:
        return f"resumed after iteration {after} with {count(num_ranks, 'rank')}"
    return f"resumed after iteration {after} on {count(num_ranks, 'rank')} instead of {num_before}"


def names(processes: Sequence[Process]) -> str:
    """Formats the names of processes.

    >>> names([Process((1, 1))]), names([Process((0, 0)), Process((0, 1)), Process((1, 1))])
    ('process 1:1', 'processes 0:0, 0:1 and 1:1')
    """
    return ("process " if len(processes) == 1 else "processes ") + listed(list(map(str, processes)))


def listed(texts: Sequence[str]) -> str:
    """Joins texts into an enumeration.

    >>> listed(["0", "1", "2"])
    '0, 1 and 2'
    """
    *head, last = texts
    return f"{', '.join(head)} and {last}" if head else last


def count(number: int, noun: str) -> str:
    """Formats a number with its noun.

    >>> count(1, "process"), count(3, "process"), count(2, "iteration")
    ('1 process', '3 processes', '2 iterations')
    """
    plural = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{plural}"
