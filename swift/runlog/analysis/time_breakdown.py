"""The time of a run by cause; every moment is counted once.

In a run of several processes the supervisor keeps the account, see ``swift.elastic.reporting.goodput``; for a run in
one process the breakdown is computed from the record.
"""

from collections.abc import Mapping
from itertools import groupby
from typing import Any

import numpy as np

from swift.errors import SettingError
from swift.runlog.analysis.history import BEGINNINGS, History, is_number, number_in
from swift.runlog.analysis.incidents import reconfigure_s
from swift.runlog.analysis.measures import scalars
from swift.runlog.reading import Run

CAUSES = ("startup", "useful", "saving", "detection", "reconfiguration", "rerun", "waiting", "other")
"""Causes of time spent.

- startup: until the first iteration, and that iteration's excess over the usual time.
- useful: iterations, each counted once.
- saving: training waits for a checkpoint.
- detection: a worker is dead or stuck, and nobody has noticed yet.
- reconfiguration: the change to other workers, and the excess of the first iteration after it.
- rerun: iterations that are run again.
- waiting: some stage has no process.
- other: evaluations, writing the record, and iterations that a later invocation ran again.
"""


def time_by_cause(run: Run, history: History) -> dict[str, float] | None:
    """Returns the seconds by cause, which sum to the time for which the run has been running; None if unknown.

    Raises:
        SettingError: the record is damaged.
    """
    accounts = _accounts(run)
    if accounts:
        spent = {cause: sum(one.get(f"{cause}_s", 0.0) for one in accounts) for cause in CAUSES}
        running_s = sum(one["total_s"] for one in accounts)
        if len(accounts) < sum(timed.name in BEGINNINGS for timed in history.events):
            running_s = max(running_s, history.end_s)  # a supervisor that was killed has left no account
        spent["other"] = max(0.0, running_s - sum(spent.values()))
        return spent
    is_launched = any(timed.name == "epoch" for timed in history.events)
    if is_launched or not history.spans or not np.isfinite(history.step_s_T).any():
        return None
    return _recorded(run, history)


def _accounts(run: Run) -> list[Mapping[str, float]]:
    """Returns the accounts of supervisors, one for each invocation; older records have the last one only."""
    ends = [event["goodput"] for event in run.events if event.get("goodput") is not None]
    if not ends and run.summary and run.summary.get("goodput") is not None:
        ends = [run.summary["goodput"]]
    for one in ends:
        if not _is_account(one):
            raise SettingError("goodput", one, f"must be seconds by cause, in {run.path}")
    return ends


def _is_account(one: object) -> bool:
    """Whether an object has the seconds in total and by cause."""
    if not isinstance(one, dict):
        return False
    return is_number(one.get("total_s")) and all(is_number(one.get(f"{cause}_s", 0.0)) for cause in CAUSES)


def _recorded(run: Run, history: History) -> dict[str, float]:
    """Computes the breakdown from when iterations end, and how long they, reconfigurations and saves took."""
    spent = dict.fromkeys(CAUSES, 0.0)
    took_T = np.nan_to_num(scalars(run, "step_ms")) / 1000
    usual_s = float(np.median(took_T)) if took_T.size else 0.0
    # At equal times an event sorts after the iteration, which was done before it.
    ends = zip(history.step_s_T.tolist(), took_T.tolist(), strict=True)
    moments: list[tuple[float, bool, Any]] = [(end_s, False, took_s) for end_s, took_s in ends if np.isfinite(end_s)]
    moments += [(timed.seconds, True, timed) for timed in history.events]
    moments.sort(key=_time_and_kind)
    changed_s, cause = 0.0, "startup"  # cost of the reconfiguration that the next iteration's time includes
    for (_, is_event), group in groupby(moments, key=_time_and_kind):
        items = [item for _, _, item in group]
        if not is_event:  # the iterations of a window end together, and each has its share of the time
            own_s = max(0.0, sum(items) - changed_s)
            useful_s = min(own_s, usual_s * len(items)) if cause else own_s
            spent["useful"] += useful_s
            spent[cause or "useful"] += own_s - useful_s
            changed_s, cause = 0.0, ""
            continue
        for timed in items:
            if timed.name in BEGINNINGS:
                changed_s, cause = 0.0, "startup"
            elif timed.name == "reconfigure":
                changed_s, cause = reconfigure_s(run, timed), "reconfiguration"
                spent[cause] += changed_s
            elif timed.name == "checkpoint":
                spent["saving"] += (number_in(run, timed.fields, "stall_ms") or 0.0) / 1000
    spent["other"] = max(0.0, history.end_s - sum(spent.values()))
    return spent


def _time_and_kind(moment: tuple[float, bool, Any]) -> tuple[float, bool]:
    return moment[:2]
