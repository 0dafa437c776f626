"""Events of a run. Each distinct plan is written once, and later events refer to it by its identity.

A plan for many workers takes hundreds of kilobytes, and a run with a thousand failures uses only a few different ones.
"""

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from swift.runlog.json_lines import read_objects

EVENTS = "events.jsonl"


def with_plan_once(fields: Mapping[str, Any], written: set[str]) -> dict[str, Any]:
    """Adds ``plan_id`` to an event that has a ``plan``, and leaves out the plan itself if it was written before.

    Args:
        fields: fields of the event.
        written: identities of the plans written so far; a new one is added.
    """
    if "plan" not in fields:
        return dict(fields)
    identity = sha256(json.dumps(fields["plan"], sort_keys=True).encode()).hexdigest()[:16]
    others = {name: value for name, value in fields.items() if name != "plan" or identity not in written}
    written.add(identity)
    return others | {"plan_id": identity}


def read_events(path: Path) -> list[dict[str, Any]]:
    """Reads the events of a run, each with the plan that it names.

    Args:
        path: run directory.

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
