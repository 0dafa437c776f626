"""The tables of placements of ``experiments/beyond/README.md``."""

from typing import Any

from markdown_tables import markdown

_RULES = {
    "static": "`Static`",
    "symi": "`Symi`",
    "eplb": "EPLB",
    "packed": "`Packed`",
    "eplb, best split": "EPLB, the best split",
    "packed, best split": "`Packed`, the best split",
    "ultraep": "UltraEP, slots assigned after routing",
    "exact": "`@ExactCapacity()`, slots assigned after routing",
    "no copies": "one slot for each expert",
    "waterfilling": "the same, waterfilling with 1.05 of the mean's rows",
}


def placement_eplb(found: dict[str, Any]) -> str:
    """Largest rank loads over EPLB's, by kind of load."""
    rows = {**found["over_eplb_by_kind"], "all": found["over_eplb"], "all, by nodes": found["over_hierarchical_eplb"]}
    return markdown(
        ["loads", "number", "median", "mean", "largest", "above 1.005"],
        [
            [kind, f"{of['loads']:,}", *(f"{of[key]:.4f}" for key in ("median", "mean", "largest")), of["above_1.005"]]
            for kind, of in rows.items()
        ],
    )


def placement_time(found: dict[str, Any]) -> str:
    """Largest rank loads over EPLB's and times of a layer, by shape."""
    rows = [
        [
            *(of[key] for key in ("ranks", "experts", "slots_per_rank")),
            *(f"{of[key]:.4f}" for key in ("mean", "largest")),
            *(f"{of[key] / 1000:.3f}" for key in ("packed_us", "eplb_us")),
            f"{of['time_over_eplb']:.2f}",
        ]
        for of in found["over_eplb_by_shape"]
    ]
    heading = ["ranks", "experts", "slots", "load over EPLB's, mean", "largest", "CPU-ms a layer", "EPLB's"]
    return markdown([*heading, "time over EPLB's"], rows)


def spare_slots(found: dict[str, Any]) -> str:
    """Tokens dropped by the best split, and at least, by spare slots."""
    keys = ("balanced_flow_percent", "dropped_percent", "least_percent")
    rows = [
        [spare, row["slots_per_rank"], *(f"{row[key]:.2f} %" for key in keys)] for spare, row in found["spare"].items()
    ]
    return markdown(["spare slots", "slots", "balanced flow alone", "best split drops", "least possible"], rows)


def placement_drift(found: dict[str, Any]) -> str:
    """The largest rank load over the mean by rule, after drifts."""
    by_drift = found["drifting"]["by_drift"]
    rows = [
        [text, *(f"{by[name]['mean']:.3f} ({by[name]['largest']:.2f})" for by in by_drift.values())]
        for name, text in _RULES.items()
    ]
    drops = [f"{100 * by['waterfilling_drops']['mean']:.1f} %" for by in by_drift.values()]
    heading = ["rule", *(f"drift {100 * float(drift):.0f} %" for drift in by_drift)]
    return markdown(heading, [*rows, ["tokens that waterfilling drops", *drops]])
