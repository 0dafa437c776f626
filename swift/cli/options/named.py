"""Named numbers, durations and workers on the command line: ``--costs tF=1 tB=1.3``, ``--mtbf 6h``, ``--fail 1:2``."""

import re
import sys
from collections.abc import Mapping, Sequence

from swift.cli.options.mistakes import nearest
from swift.errors import SettingError
from swift.schedules.plans.json_format import COST_NAMES
from swift.schedules.problem import Costs
from swift.topology import Worker, read_worker

MAX_COST = 1e18
_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def named_numbers(option: str, texts: Sequence[str], fields: Mapping[str, str], example: str) -> dict[str, float]:
    """Parses named numbers.

    Args:
        option: option that the texts were given for.
        texts: texts such as ``tB=1.3``.
        fields: maps the names that users write to fields.
        example: example for error messages.

    Raises:
        SettingError: a text is not of that form, has an unknown name, or has no number.
    """
    values: dict[str, float] = {}
    given = set()
    for text in texts:
        name, is_set, number = text.partition("=")
        if not is_set:
            raise SettingError(option, text, f"must be NAME=VALUE, such as {example}")
        if name not in fields:
            raise SettingError(option, text, f"there is no {name}; {nearest(name, fields)}")
        try:
            values[fields[name]] = float(number)
        except ValueError as error:
            raise SettingError(option, text, f"{number!r} is not a number") from error
        if name in given:
            raise SettingError(option, text, f"{name} is given twice")
        given.add(name)
        if values[fields[name]] > MAX_COST:
            raise SettingError(option, text, f"must be at most {MAX_COST:g}: take a larger unit")
    return values


def costs_of(texts: Sequence[str]) -> Costs:
    """Parses ``--costs``.

    Raises:
        SettingError: a text is not of that form, or a cost is impossible.
    """
    values = named_numbers("--costs", texts, COST_NAMES, "tB=1.3")
    if "f_stash" in values:
        values.setdefault("w_stash", values["f_stash"])
    return Costs(**values)


def workers_of(option: str, texts: Sequence[str]) -> frozenset[Worker]:
    """Parses workers, each named pipeline:stage.

    Raises:
        SettingError: a text is not of that form.
    """
    found = set()
    for text in texts:
        worker = read_worker(text)
        if worker is None:
            raise SettingError(option, text, "must be PIPELINE:STAGE, such as 1:2")
        if worker in found:
            raise SettingError(option, text, "is given twice")
        found.add(worker)
    return frozenset(found)


def seconds_of(option: str, text: str) -> float:
    """Parses a duration; one without a unit is taken for seconds, and said to be.

    Raises:
        SettingError: the text is not of that form.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text, re.ASCII)
    if not found:
        raise SettingError(option, text, "must be a duration, such as 90s, 10m, 6h or 2d")
    if not found[2]:
        print(f"swift: {option} {text} has no unit and is taken for {text}s", file=sys.stderr)
    return float(found[1]) * _UNITS_S[found[2]]
