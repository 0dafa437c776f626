"""Groups of runs that differ in their seed alone; charts and a table show the mean and the range of each group."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from swift.errors import printable
from swift.runlog.reading import Run, settings_in
from swift.tools.report.compare import COLUMNS, comparison_rows
from swift.tools.report.sections.parts import Table
from swift.tools.report.sections.series import mean_and_range

SEED = "Experiment.seed"
HISTORY = ("init_from", "settings_changed")
"""Events that make a run another than its settings say: they have to be the same in all runs of a group."""
NOTE = (
    "n runs that differ in their seed alone: their mean, and in brackets the smallest and the largest value. In the "
    "charts the mean is a line or a ring, and its band or bar extends from the smallest to the largest; lines are "
    "smoothed before they are compared."
)


@dataclass(frozen=True)
class SeedGroup:
    """Several runs with equal settings but for the seed, as many iterations, and different seeds.

    Attributes:
        name: name by those of the first and the last run; unique among the groups of a report.
        members: index of each run in the report.
        seeds: seed of each run.
    """

    name: str
    members: tuple[int, ...]
    seeds: tuple[str, ...]


def seed_groups(runs: Sequence[Run]) -> list[SeedGroup]:
    """Finds the groups of seeds among the runs of a report.

    A run that repeats a seed of its group is in none, nor is one that has no record, or one that has got less far than
    the others: a mean over different numbers of runs would jump where one of them ends.
    """
    found: dict[object, dict[str, int]] = {}
    for index, run in enumerate(runs):
        settings = settings_in(run.config_text)
        seed = settings.pop(SEED, "").partition("=")[2].strip()
        if seed and len(run.metrics):
            history = [{**event, "time": None} for event in run.events if event.get("event") in HISTORY]
            key = (frozenset(settings.values()), run.metrics.last_step, repr(history))
            found.setdefault(key, {}).setdefault(seed, index)
    groups = [of_seed for of_seed in found.values() if len(of_seed) > 1]
    names = [_name([runs[index] for index in of_seed.values()]) for of_seed in groups]
    return [
        SeedGroup(
            printable(name if names.count(name) == 1 else f"{name} ({runs[next(iter(of_seed.values()))].path})"),
            tuple(of_seed.values()),
            tuple(of_seed),
        )
        for name, of_seed in zip(names, groups, strict=True)
    ]


def _name(runs: Sequence[Run]) -> str:
    first, last = runs[0].name, runs[-1].name
    return first if first == last else f"{first} \N{HORIZONTAL ELLIPSIS} {last}"


def seeds_table(runs: Sequence[Run], groups: Sequence[SeedGroup]) -> Table:
    """Makes a row for each group: its number of runs, their seeds, and mean and range of each measure.

    Raises:
        SettingError: the metrics of a run are damaged.
    """
    measures = [key for key in COLUMNS if key not in ("name", "placement")]
    measured, rows = comparison_rows(runs), []
    for group in groups:
        numbers = [[measured[index][key] for index in group.members] for key in measures]
        cells = [_cell(key, values) for key, values in zip(measures, numbers, strict=True)]
        rows.append([group.name, str(len(group.members)), ", ".join(group.seeds), *cells])
    return Table(["runs", "n", "seeds", *(COLUMNS[key][0] for key in measures)], rows, num_text=1)


def _cell(key: str, values: Sequence[float | None]) -> str:
    """Formats mean and range, and how many runs have a value if some have none."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    mean, low, high = (COLUMNS[key][1](_like(known[0], float(one))) for one in mean_and_range(np.array(known)))
    few = f"; {len(known)} of {len(values)}" if len(known) < len(values) else ""
    return f"{mean} ({low} to {high}{few})"


def _like(example: float, value: float) -> float:
    """Makes a number of the same type: a count stays one."""
    return round(value) if isinstance(example, int) else value
