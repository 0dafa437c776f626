"""Events of a run, in which a plan that was told before is named and not told again.

A plan of many workers has some hundred kilobytes, and a run that fails a thousand times has a few different ones.
"""

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from swift.runlog.json_lines import read_objects

EVENTS = "events.jsonl"


def with_plan_once(fields: Mapping[str, Any], told: set[str]) -> dict[str, Any]:
    """The fields of an event as they are written: a ``plan`` gets a ``plan_id``, and is left out where it was told.

    Args:
        fields: of the event.
        told: the identities of the plans that were told so far; a new one is added.
    """
    if "plan" not in fields:
        return dict(fields)
    identity = sha256(json.dumps(fields["plan"], sort_keys=True).encode()).hexdigest()[:16]
    others = {name: value for name, value in fields.items() if name != "plan" or identity not in told}
    told.add(identity)
    return others | {"plan_id": identity}


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a run, each with the plan that it names.

    Args:
        path: the run directory.

    Raises:
        SettingError: a line is damaged.
    """
    events, plans = [], dict[str, Any]()
    for event in read_objects(path / EVENTS):
        if "plan_id" in event:
            identity = str(event.pop("plan_id"))
            event["plan"] = plans[identity] = plans.get(identity) or event.get("plan")
        events.append(event)
    return events
