"""Where the time of a run went: every moment of it is counted once.

What processes were launched for is counted by their supervisor while it happens, see ``swift.elastic.events.goodput``;
of a run in one process it follows from its record.
"""

from collections.abc import Mapping
from itertools import groupby

import numpy as np

from swift.errors import SettingError
from swift.runlog.analysis.history import BEGINNINGS, History, Timed, is_number, number_in
from swift.runlog.analysis.incidents import reconfigure_s
from swift.runlog.analysis.measures import scalars
from swift.runlog.reading import Run

CAUSES = ("startup", "useful", "saving", "detection", "reconfiguration", "rerun", "waiting", "other")
"""What time is spent on.

startup: until the first iteration, and what that takes longer than usual. useful: iterations, each of them once.
saving: training waits for a checkpoint. detection: someone is dead or stuck, and nobody knows. reconfiguration: to go
on with others, and what the first iteration then takes longer than usual. rerun: iterations that are run again.
waiting: some stage has no process. other: evaluations, the record, and iterations that a later invocation ran again.
"""


def spending_of(run: Run, history: History) -> dict[str, float] | None:
    """The seconds for each of ``CAUSES``, which sum to the time for which the run has been running, if that is known.

    Raises:
        SettingError: the record is damaged.
    """
    told = _told(run)
    if told:
        spent = {cause: sum(one.get(f"{cause}_s", 0.0) for one in told) for cause in CAUSES}
        running_s = sum(one["total_s"] for one in told)
        if len(told) < sum(timed.name in BEGINNINGS for timed in history.events):
            running_s = max(running_s, history.end_s)  # a supervisor that was killed has told nothing of its time
        spent["other"] = max(0.0, running_s - sum(spent.values()))
        return spent
    is_launched = any(timed.name == "epoch" for timed in history.events)
    if is_launched or not history.spans or not np.isfinite(history.step_s_T).any():
        return None
    return _recorded(run, history)


def _told(run: Run) -> list[Mapping[str, float]]:
    """What supervisors have counted, one for each invocation; older records have that of the last one only."""
    ends = [event["goodput"] for event in run.events if event.get("goodput") is not None]
    if not ends and run.summary and run.summary.get("goodput") is not None:
        ends = [run.summary["goodput"]]
    for one in ends:
        if not _is_told(one):
            raise SettingError("goodput", one, f"must be seconds by cause, in {run.path}")
    return ends


def _is_told(one: object) -> bool:
    """Seconds in all and by cause; a supervisor tells other things beside them."""
    if not isinstance(one, dict):
        return False
    return is_number(one.get("total_s")) and all(is_number(one.get(f"{cause}_s", 0.0)) for cause in CAUSES)


def _recorded(run: Run, history: History) -> dict[str, float]:
    """From when iterations ended, and how long they, changes and saves took."""
    spent = dict.fromkeys(CAUSES, 0.0)
    took_T = np.nan_to_num(scalars(run, "step_ms")) / 1000
    usual_s = float(np.median(took_T)) if took_T.size else 0.0
    steps = [(float(s), took) for s, took in zip(history.step_s_T, took_T.tolist(), strict=True) if np.isfinite(s)]
    # An event that bears the time of an iteration has come after it.
    told = [(seconds, 0, took) for seconds, took in steps] + [(timed.seconds, 1, timed) for timed in history.events]
    changed_s, cause = 0.0, "startup"  # what a change cost that the iterations after it have in their time
    # The iterations of a window end together, and each has its share of the time.
    for _, same in groupby(sorted(told, key=lambda one: one[:2]), key=lambda one: one[:2]):
        for_event = [item for _, _, item in same]
        own = [item for item in for_event if not isinstance(item, Timed)]
        if own:
            own_s = max(0.0, sum(own) - changed_s)
            useful_s = min(own_s, usual_s * len(own)) if cause else own_s
            spent["useful"] += useful_s
            spent[cause or "useful"] += own_s - useful_s
            changed_s, cause = 0.0, ""
        for timed in for_event:
            if not isinstance(timed, Timed):
                continue
            if timed.name in BEGINNINGS:
                changed_s, cause = 0.0, "startup"
            elif timed.name == "reconfigure":
                changed_s, cause = reconfigure_s(run, timed), "reconfiguration"
                spent[cause] += changed_s
            elif timed.name == "checkpoint":
                spent["saving"] += (number_in(run, timed.fields, "stall_ms") or 0.0) / 1000
    spent["other"] = max(0.0, history.end_s - sum(spent.values()))
    return spent
