"""Every deadline that a run of processes has can be set."""

from dataclasses import fields

from swift.cli.values import OF_PROCESSES, deadlines_of
from swift.deadlines import Deadlines


def test_every_deadline_can_be_set():
    names = [field.name for field in fields(Deadlines) if field.name != "max_quick_deaths"]
    assert sorted(OF_PROCESSES) == sorted(names)
    found = deadlines_of([f"{name}={nth + 1}" for nth, name in enumerate(names)], OF_PROCESSES)
    assert [getattr(found, name) for name in names] == list(range(1, len(names) + 1))
