"""The tables of ``experiments/balance/README.md``."""

from typing import Any

from markdown_tables import markdown

_SYSTEMS = {
    "static": "static",
    "flexmoe10": "FlexMoE-10",
    "symi": "SYMI",
    "packed": "packed, capacity by rank",
    "exact": "exact: nothing dropped",
}
_BALANCES = {"none": "nothing", "aux": "auxiliary loss, 1e-2", "bias": "expert bias"}


def balance_drops(found: dict[str, Any]) -> str:
    """Formats drops and losses by balancing method and system: mean, smallest and largest over the seeds."""

    def cell(of: dict[str, float], digits: int) -> str:
        return f"{of['mean']:.{digits}f} ({of['least']:.{digits}f} to {of['most']:.{digits}f})"

    rows = [
        [
            _BALANCES[balance],
            _SYSTEMS[system],
            len(of["seeds"]),
            cell(of["dropped_percent"], 1),
            cell(of["loss"], 3),
            cell(of["validation_loss"], 3),
        ]
        for balance, systems in found["by_balance"].items()
        for system, of in systems.items()
    ]
    return markdown(["balanced by", "system", "seeds", "dropped, %", "loss at the end", "validation loss"], rows)


def balance_saved(found: dict[str, Any]) -> str:
    """Formats the iterations that each system saves over ``static``, by target loss: mean over seeds, 95 % interval."""
    by_balance = found["fewer_iterations"]
    targets = list(dict.fromkeys(target for of in by_balance.values() for saved in of.values() for target in saved))

    def cell(saved: dict[str, Any] | None) -> str:
        if saved is None:
            return "-"
        interval = "" if saved["plus_minus"] is None else f" ± {100 * saved['plus_minus']:.1f}"
        part = "" if saved["seeds"] == saved["of"] else f" ({saved['seeds']} of {saved['of']})"
        return f"{100 * saved['mean']:.1f}{interval}{part}"

    rows = [
        [_BALANCES[balance], _SYSTEMS[system], *(cell(saved.get(target)) for target in targets)]
        for balance, systems in by_balance.items()
        for system, saved in systems.items()
    ]
    return markdown(["balanced by", "system", *targets], rows)
