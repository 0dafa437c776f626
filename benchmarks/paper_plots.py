"""Plots of ``experiments/plots``, drawn from the results in ``experiments/results``."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from paper_tables import Results

from swift.draw.charts import mean_and_range
from swift.draw.style import CHECKPOINT_COLORS, INK, POLICY_COLORS, STRATEGY_COLORS, colors_of
from swift.files import replace_file


def draw_all(results: Results, directory: Path) -> list[Path]:
    """Draws every plot whose result exists, as SVG that is identical for identical results."""
    directory.mkdir(exist_ok=True)
    paths = []
    for name, (result, draw) in PLOTS.items():
        if result not in results:
            continue
        figure = Figure(figsize=(7.2, 3.6), layout="constrained")
        axes = figure.subplots()
        draw(axes, results[result])
        axes.spines[["top", "right"]].set_visible(False)
        file = io.BytesIO()
        with matplotlib.rc_context({"svg.hashsalt": "swift"}):
            figure.savefig(file, format="svg", metadata={"Date": None})
        paths.append(directory / f"{name}.svg")
        replace_file(paths[-1], file.getvalue())
    return paths


def survival(axes: Axes, found: dict[str, Any]) -> None:
    """Share of surviving tokens, over the iterations."""
    _curves(axes, found, "survival")
    axes.set(ylabel="share of tokens that survive", ylim=(0, 1))


def loss(axes: Axes, found: dict[str, Any]) -> None:
    """The training loss over the iterations."""
    _curves(axes, found, "loss")
    axes.set(ylabel="training loss (nats per byte)")


def _curves(axes: Axes, found: dict[str, Any], metric: str) -> None:
    curves = dict(found["curves"])
    every = curves.pop("every")
    for color, (name, curve) in zip(colors_of([*curves], POLICY_COLORS), curves.items(), strict=True):
        axes.plot(every * (np.arange(len(curve[metric])) + 0.5), curve[metric], color=color, label=name)
    axes.set(xlabel="iteration")
    axes.legend(ncols=3, frameon=False)


def aux_loss(axes: Axes, found: dict[str, Any]) -> None:
    """Dropped tokens by coefficient."""
    by = found["by_coefficient"]
    for policy in ("static", "symi"):
        dropped = [100 * row[policy]["dropped"] for row in by.values()]
        axes.plot(list(by), dropped, "o-", color=POLICY_COLORS[policy], label=policy)
    axes.set(xlabel="coefficient of the auxiliary loss", ylabel="tokens dropped (%)", ylim=(0, None))
    axes.legend(frameon=False)


def balance(axes: Axes, found: dict[str, Any]) -> None:
    """Share of dropped tokens over the iterations, without balancing; the mean over seeds."""
    systems = found["by_balance"]["none"]
    for color, (name, of) in zip(colors_of([*systems], POLICY_COLORS), systems.items(), strict=True):
        middles = of["every"] * (np.arange(len(of["drop_fractions"])) + 0.5)
        axes.plot(middles, 100 * np.array(of["drop_fractions"]), color=color, label=name)
    axes.set(xlabel="iteration", ylabel="tokens dropped (%)", ylim=(0, None))
    axes.legend(ncols=3, frameon=False)


def balance_loss(axes: Axes, found: dict[str, Any]) -> None:
    """Training loss less that of ``static`` with the same seed, without balancing; the mean over seeds."""
    systems, every = found["loss_less_static"]["none"], found["by_balance"]["none"]["static"]["every"]
    for color, (name, losses) in zip(colors_of([*systems], POLICY_COLORS), systems.items(), strict=True):
        axes.plot(every * (np.arange(len(losses)) + 0.5), losses, color=color, label=name)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set(xlabel="iteration", ylabel="loss less that of static (nats per byte)")
    axes.legend(ncols=3, frameon=False)


def locality(axes: Axes, found: dict[str, Any]) -> None:
    """Dropped tokens by locality: means over the seeds, and from the least to the most."""
    by = found["by_locality"]
    for policy in ("static", "symi"):
        dropped = [row[policy]["dropped_percent"] for row in by.values()]
        means = [one["mean"] for one in dropped]
        beyond = [[abs(one["range"][end] - one["mean"]) for one in dropped] for end in (0, 1)]
        places = [float(one) for one in by]
        axes.errorbar(places, means, beyond, fmt="o-", capsize=3, color=POLICY_COLORS[policy], label=policy)
    axes.set(xlabel="locality", ylabel="tokens dropped (%)", ylim=(0, None))
    axes.legend(frameon=False)


def ablation(axes: Axes, found: dict[str, Any]) -> None:
    """Periods over that of 1F1B without failures, at the worst stage."""
    cases = found["ablation"]
    techniques = list(next(iter(cases.values()))["periods by failed stage"])
    for index, technique in enumerate(techniques):
        worst = [
            max(case["periods by failed stage"][technique]) / case["no failure"]["1F1B"] for case in cases.values()
        ]
        places = np.arange(len(cases)) + 0.27 * (index - 1)
        bars = axes.bar(places, worst, 0.25, color=STRATEGY_COLORS[technique], label=technique)
        axes.bar_label(bars, fmt="%.2f", fontsize=7, color=INK)
    axes.axhline(1, color=INK, linewidth=0.8)
    axes.set_xticks(range(len(cases)), list(cases), fontsize=8)
    axes.set(ylabel="period / 1F1B's without failures", ylim=(0, 1.8))
    axes.legend(frameon=False, ncols=3, loc="upper left")


def failures(axes: Axes, found: dict[str, Any]) -> None:
    """Throughput by the time between failures, 8 pipelines of 4 stages."""
    rows = [row for row in found["of_job"] if row["shape"] == "8 x 4" and row["back"].startswith("after")]
    lines(axes, {row["every"]: row["ratios"] for row in rows}, "a failure every")


def lines(axes: Axes, rows: dict[str, dict[str, float]], label: str) -> None:
    """A line for each strategy."""
    names = [*next(iter(rows.values()))]
    for color, strategy in zip(colors_of(names, STRATEGY_COLORS), names, strict=True):
        axes.plot(list(rows), [row[strategy] for row in rows.values()], "o-", color=color, label=strategy)
    axes.set(xlabel=label, ylabel="throughput / without failures", ylim=(None, 1))
    axes.legend(frameon=False, ncols=2)


def scale(axes: Axes, found: dict[str, Any]) -> None:
    """Throughput at scale and the live share."""
    rows = found["scale"]
    places = np.arange(len(rows))
    throughput = [row["throughput"] for row in rows.values()]
    color = STRATEGY_COLORS["swift"]
    bars = axes.bar(places, throughput, 0.7, color=color, label="over ours without failures")
    axes.bar_label(bars, fmt="%.2f", fontsize=7, color="white", label_type="center")
    axes.plot(places, [row["fault_scaled"] for row in rows.values()], "_", markersize=24, color=INK, label="live share")
    axes.set_xticks(places, [name.replace(" devices, ", "\n") for name in rows], fontsize=8)
    axes.set(xlabel="devices, share that is down", ylabel="throughput", ylim=(0, 1.2))
    axes.legend(frameon=False, ncols=2)


def plt_against_loss(axes: Axes, found: dict[str, Any]) -> None:
    """Validation loss over the proportion of lost tokens, with the range of the seeds where there are several."""
    for color, (name, runs) in zip(colors_of([*found["runs"]], CHECKPOINT_COLORS), found["runs"].items(), strict=True):
        lost, loss_of_seeds = (np.array([run[key] for run in runs]) for key in ("plt", "validation_loss"))
        axes.errorbar(100 * lost.mean(), loss_of_seeds.mean(), **_spread(loss_of_seeds), color=color, label=name)
    axes.set(xlabel="tokens lost, PLT (%)", ylabel="validation loss (nats per byte)")
    axes.legend(frameon=False)


def _spread(values: np.ndarray) -> dict[str, Any]:
    """Arguments of ``errorbar``: from the smallest to the largest value, and nothing for one value."""
    if len(values) < 2:
        return {"fmt": "o"}
    mean, low, high = mean_and_range(values)
    return {"fmt": "o", "yerr": [[mean - low], [high - mean]], "capsize": 3}


def ettr(axes: Axes, found: dict[str, Any]) -> None:
    """Effective training time ratio by mean time between failures, a spare after 60 s."""
    rows = {
        name.split(",")[0]: row
        for name, row in found["effective_training_time_ratio"].items()
        if name.endswith("repair 60 s")
    }
    lines(axes, rows, "mean time between failures")


def agents(axes: Axes, found: dict[str, Any]) -> None:
    """Speed of a town over that with a barrier, by its agents."""
    towns = {name: of["seconds"] for name, of in found.items() if name.endswith(" agents")}
    rules = {"ahead": "ahead of those out of reach", "oracle": "oracle"}
    for index, (color, rule) in enumerate(zip(colors_of([*rules], {}), rules, strict=True)):
        places = np.arange(len(towns)) + 0.4 * (index - 0.5)
        speeds = [seconds["barrier"] / seconds[rule] for seconds in towns.values()]
        bars = axes.bar(places, speeds, 0.38, color=color, label=rules[rule])
        axes.bar_label(bars, fmt="%.2f", fontsize=7, color=INK)
    axes.axhline(1, color=INK, linewidth=0.8)
    axes.set_xticks(range(len(towns)), list(towns))
    axes.set(ylabel="speed / with a barrier", ylim=(0, None))
    axes.legend(frameon=False, loc="upper left")


PLOTS: dict[str, tuple[str, Callable[[Axes, dict[str, Any]], None]]] = {
    "symi_survival": ("symi_drops", survival),
    "symi_loss": ("symi_drops", loss),
    "symi_aux_loss": ("symi_aux_loss", aux_loss),
    "balance_drops": ("balance", balance),
    "balance_long_loss": ("balance_long", balance_loss),
    "balance_olmoe_loss": ("balance_olmoe", balance_loss),
    "locality_drops": ("locality", locality),
    "recycle_ablation": ("recycle_ablation", ablation),
    "recycle_failures": ("recycle_failures", failures),
    "recycle_scale": ("recycle_scale", scale),
    "moc_faults": ("moc_faults", plt_against_loss),
    "moc_ettr": ("simulation", ettr),
    "agents_speed": ("agents", agents),
}
"""(result, function that draws it) of each plot by name."""
