"""The tables of the papers' READMEs, made of the results in ``experiments/results``.

Such a document has a line ``<!-- table: NAME -->`` where a table begins and ``<!-- end -->`` where it ends.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from balance_tables import balance_drops, balance_saved
from markdown_tables import by_strategy, markdown, percent
from placement_tables import placement_drift, placement_eplb, placement_time, spare_slots

Results = dict[str, dict[str, Any]]
"""Documents by file name."""
_BLOCK = re.compile(r"(?P<begin><!-- table: (?P<name>\w+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)


def read_results(directory: Path) -> Results:
    """Loads all results in a directory."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))}


def rewrite_tables(text: str, results: Results) -> str:
    """Updates the tables of a README; a table without a result says so."""

    def rewritten(match: re.Match[str]) -> str:
        name = match["name"]
        result, table = TABLES[name]
        body = table(results[result]) if result in results else f"*{result} has not been run*"
        return f"{match['begin']}\n{body}\n\n{match['end']}"

    return _BLOCK.sub(rewritten, text)


def symi_convergence(found: dict[str, Any]) -> str:
    """SYMI's table 3: five systems."""
    runs = {run["name"]: run for run in found["runs"]}
    against = found["symi_against"]
    names = {
        "static": "static (DeepSpeed)",
        "flexmoe100": "FlexMoE-100",
        "flexmoe50": "FlexMoE-50",
        "flexmoe10": "FlexMoE-10",
        "symi": "SYMI",
    }

    def gain(name: str, key: str) -> str:
        if name not in against:
            return ""
        return f"{percent(against[name][key])} ({percent(against[name][f'{key}_paper'])})"

    rows = [
        ["tokens dropped", *(f"{runs[name]['dropped_percent']:.1f} %" for name in names)],
        ["iterations to the target loss", *(runs[name]["steps_to_target"] or "-" for name in names)],
        ["loss, mean of the last 10 iterations", *(f"{runs[name]['final_loss']:.3f}" for name in names)],
        ["SYMI drops fewer by (paper)", *(gain(name, "fewer_drops") for name in names)],
        ["SYMI needs fewer iterations by (paper)", *(gain(name, "fewer_iterations") for name in names)],
    ]
    return markdown(["", *names.values()], rows)


def symi_aux_loss(found: dict[str, Any]) -> str:
    """Dropped tokens by the coefficient of the auxiliary loss."""
    rows = [
        [coefficient, *(percent(by[policy]["dropped"]) for policy in ("static", "symi")), by["symi"]["loss"]]
        for coefficient, by in found["by_coefficient"].items()
    ]
    return markdown(["coefficient", "static drops", "SYMI drops", "SYMI's loss"], rows)


def symi_capacity(found: dict[str, Any]) -> str:
    """Tokens that survive by the capacity factor."""
    rows = [
        [f"x {factor}", percent(by["survive"]), percent(by["paper"])]
        for factor, by in found["by_capacity_factor"].items()
    ]
    return markdown(["capacity", "survive", "paper"], rows)


def symi_breakdown(found: dict[str, Any]) -> str:
    """Shares of an iteration's CPU-seconds."""
    rows = [[name, f"{100 * share:.2f} %"] for name, share in found["shares"].items()]
    return markdown(["part", f"of an iteration of {found['tokens_per_rank']:,} tokens a rank"], rows)


def symi_cost(found: dict[str, Any]) -> str:
    """Cost of an iteration compared with the baselines."""
    sizes = ("iteration_of_the_demo", "iteration_with_the_paper's_tokens_per_rank")
    by_size = [found[size] for size in sizes]

    def ratios(key: str) -> list[str]:
        return [f"{by[key]['median']:.3f}" for by in by_size]

    share = found["placement_cpu_s"]["symi"] / by_size[0]["cpu_s"]["symi"]
    rows = [
        ["`symi` over DeepSpeed (`static`, coupled)", *ratios("symi_over_static_coupled")],
        ["`symi` over `static` in the same layout", *ratios("symi_over_static")],
        ["placement computation, share of an iteration", f"{100 * share:.3f} %", ""],
        ["FlexMoE-10, a migrating iteration over a normal one", found["flexmoe"]["migrating_over_normal"], ""],
    ]
    return markdown(["CPU-seconds", *(f"{by['tokens_per_rank']:,} tokens a rank" for by in by_size)], rows)


def recycle_ablation(found: dict[str, Any]) -> str:
    """Periods with one failure, technique by technique."""

    def span(values: list[float]) -> str:
        low, high = min(values), max(values)
        return f"{low:g}" if low == high else f"{low:g} - {high:g}"

    rows = []
    for name, by in found["ablation"].items():
        whole, periods = by["no failure"], by["periods by failed stage"]
        rows.append([name, f"{whole['1F1B']:g}", *(span(of) for of in periods.values())])
        rows[-1] += [span(by["lower bounds"]), f"{whole['decoupled, staggered']:g}"]
    heading = ["pipelines x stages", "1F1B, no failure", "re-routed", "+ decoupled", "+ staggered", "bound"]
    return markdown([*heading, "zero-bubble, no failure"], rows)


def recycle_failures(found: dict[str, Any]) -> str:
    """Throughput under failures of 32 workers."""
    heading = ["pipelines x stages", "a failure every", "back"]
    return by_strategy(
        heading, [([row[key] for key in ("shape", "every", "back")], row["ratios"]) for row in found["of_job"]]
    )


def recycle_baselines(found: dict[str, Any]) -> str:
    """Throughput under failures next to the published systems, 30 nodes."""
    heading = ["model", "pipelines x stages", "a removal every"]
    rows = [([row[key] for key in ("model", "shape", "every")], row["ratios"]) for row in found["published"]]
    return by_strategy(heading, rows)


def recycle_scale(found: dict[str, Any]) -> str:
    """Throughput at scale, next to the live share."""
    rows = [
        [name, row["pipelines x stages"], *(f"{row[key]:.3f}" for key in ("fault_scaled", "throughput", "over_1f1b"))]
        for name, row in found["scale"].items()
    ]
    heading = ["devices, down", "pipelines x stages", "fault-scaled", "over ours without failures"]
    return markdown([*heading, "over 1F1B without failures"], rows)


def recycle_traces(found: dict[str, Any]) -> str:
    """Effective training time ratios on the published traces."""
    keys = ("hours", "most_nodes", "removals", "pipelines x stages")
    heading = ["trace", "hours", "most nodes", "removals", "pipelines x stages"]
    rows = found["traces"].items()
    return by_strategy(heading, [([name, *(row[key] for key in keys)], row["ratios"]) for name, row in rows])


def recycle_published(found: dict[str, Any]) -> str:
    """Averages of Oobleck's artifact."""
    rows = [
        [name, f"{row['ours']:g}", f"{row['published']:g}", f"{100 * row['off']:+.1f} %"]
        for name, row in found["published_averages"].items()
    ]
    return markdown(["system, model, a removal every", "samples/s, ours", "published", "off"], rows)


def recycle_against(found: dict[str, Any]) -> str:
    """Throughput over Oobleck and Bamboo, each relative to its own base, with the schedule's gain over 1F1B."""
    pairs = [(ours, other) for ours in ("adapt", "recycle", "swift") for other in ("oobleck", "bamboo")]
    rows = []
    for name, row in found["over_oobleck_and_bamboo"].items():
        alone = [row.get(f"{ours} over {other}") for ours, other in pairs]
        over = ("-" if ratio is None else f"{ratio:.2f}; {ratio * row['schedule']:.2f}" for ratio in alone)
        rows.append([name, f"{row['adapt over the ideal']:.3f}", *over])
    heading = ["model, pipelines x stages, a removal every", "`adapt` over the live share"]
    return markdown([*heading, *(f"`{ours}` over {other.capitalize()}" for ours, other in pairs)], rows)


def moc_sizes(found: dict[str, Any]) -> str:
    """Sizes of checkpoints by K, by the shapes of the states."""
    states = {"demo, 16 classes": found["state"], "GPT-350M-16E": found["gpt_350m_16e"]}
    ks = list(found["state"]["share_of_full"])
    return markdown(
        ["state", "full (GB)", *(f"K = {k}" for k in ks)],
        ([name, state["full_gb"], *(percent(state["share_of_full"][k]) for k in ks)] for name, state in states.items()),
    )


def moc_stall(found: dict[str, Any]) -> str:
    """Cost of a save for a running iteration."""
    names = {"k_1": "K = 1 of 16", "k_4": "K = 4", "k_all": "full", "orbax_full": "Orbax's own asynchronous save"}
    keys = ("blocked_ms", "stall_ms", "written_ms")
    stalls = found["stalls"]
    rows = [[text, *(f"{stalls[name][key]:.1f}" for key in keys)] for name, text in names.items()]
    plain = f"{stalls['plain_step']['ms']:.1f}"
    heading = ["saved", "training waits (ms)", f"iteration of {plain} ms takes longer by (ms)", "written after (ms)"]
    return markdown(heading, rows)


def moc_faults(found: dict[str, Any]) -> str:
    """Validation loss against lost tokens."""
    rows = [
        [name, percent(of["plt"]), f"{of['validation_loss']:.3f}", f"{of['above_full']['mean']:+.3f}", of["written_mb"]]
        for name, of in found["variants"].items()
    ]
    return markdown(["saved", "tokens lost (PLT)", "validation loss", "above full", "written (MB)"], rows)


def moc_ettr(found: dict[str, Any]) -> str:
    """Effective training time ratio by mean time between failures."""
    ratios = found["effective_training_time_ratio"].items()
    return by_strategy(["between failures"], [([name], row) for name, row in ratios if isinstance(row, dict)])


def beyond_drops(found: dict[str, Any]) -> str:
    """Dropped tokens by cause, of the ablation."""
    keys = ("dropped_percent", "buffer_full_percent", "rank_or_slot_full_percent")
    rows = [[run["name"], *(f"{run[key]:.2f} %" for key in keys), f"{run['final_loss']:.3f}"] for run in found["runs"]]
    return markdown(["run", "tokens dropped", "a buffer full", "rank or slot full", "loss, last 10 iterations"], rows)


def beyond_costs(found: dict[str, Any]) -> str:
    """Cost of capacity by rank compared with SYMI's."""

    def over_symi(bytes_of: dict[str, int], name: str) -> str:
        return f"{bytes_of[name] / bytes_of['symi']:.2f}"

    names = {
        "rows that are exchanged": lambda of: f"{of['exchanged_token_bytes_over_symi']:.2f}",
        "FLOPs, all blocks counted as full": lambda of: f"{of['flops_over_symi']:.3f}",
        "CPU-seconds, 8 rounds": lambda of: f"{of['rank_spare8_over_symi']['median']:.3f}",
        "CPU-seconds, even split": lambda of: f"{of['rank_even_over_symi']['median']:.3f}",
        "CPU-seconds, best split": lambda of: f"{of['rank_best_over_symi']['median']:.3f}",
        "CPU-seconds, `exact`": lambda of: f"{of['exact_over_symi']['median']:.3f}",
        "all-to-all bytes, best split": lambda of: over_symi(of["exchanged_bytes"], "rank_best"),
        "all-to-all bytes, `exact`": lambda of: over_symi(of["exchanged_bytes"], "exact"),
        "share of the iteration that splits in 8 rounds": lambda of: f"{100 * of['split_share']:.2f} %",
        "share of the iteration that finds the best split": lambda of: f"{100 * of['best_split_share']:.2f} %",
    }
    sizes = [found["iteration_of_the_demo"], found["iteration_with_the_paper's_tokens_per_rank"]]
    heading = ["over `symi`'s", *(f"{of['tokens_per_rank']:,} tokens a rank" for of in sizes)]
    return markdown(heading, [[name, *map(show, sizes)] for name, show in names.items()])


def beyond_packing(found: dict[str, Any]) -> str:
    """The largest rank load of packed replicas over EPLB's and class order's."""
    keys = ("over_eplb", "over_class_order", "over_mean")
    rows = [
        [kind, *(f"{of[key]['median']:.3f} ({of[key]['largest']:.3f})" for key in keys)]
        for kind, of in found["packing"].items()
        if kind != "seconds"
    ]
    return markdown(["loads", "over EPLB's", "over class order's", "over the mean load"], rows)


def gspmd(found: dict[str, Any]) -> str:
    """CPU-seconds and wall time over GSPMD's."""
    names = {
        "expert_parallel_demo": "8 expert ranks, 256 tokens a rank",
        "expert_parallel_paper": "8 expert ranks, 2,048 tokens a rank",
        "pipeline_dense": "2 x 2 x 2, dense",
        "pipeline_experts": "2 x 2 x 2, experts",
    }
    rows = [
        [text, ours, f"{found[name]['cpu_over_gspmd'][ours]['median']:.2f}", f"{ratio['median']:.2f}"]
        for name, text in names.items()
        for ours, ratio in found[name]["ms_over_gspmd"].items()
    ]
    return markdown(["model", "ours", "CPU-seconds over GSPMD's", "wall time over GSPMD's"], rows)


def agents(found: dict[str, Any]) -> str:
    """Towns by the number of their agents: calls and time by each rule."""
    towns = {name: of for name, of in found.items() if name.endswith(" agents")}
    rules = {"barrier": "barrier", "ahead": "ahead of those out of reach", "oracle": "oracle"}
    rows = [
        [
            f"{name}, {of['steps']} steps",
            text,
            *(f"{calls[kind]:,}" for kind in ("reading", "decoding")),
            f"{seconds:,.0f}",
            f"{of['seconds']['barrier'] / seconds:.2f}",
        ]
        for name, of in towns.items()
        for rule, text in rules.items()
        for calls, seconds in [(of["calls"][rule], of["seconds"][rule])]
    ]
    return markdown(["town", "rule", "calls that read", "that decode", "seconds", "times as fast"], rows)


def locality_drops(found: dict[str, Any]) -> str:
    """Dropped tokens, loss and input time by locality: means over the seeds, least and most in brackets."""
    policies = ("static", "symi")

    def told(of: dict[str, Any], digits: int) -> str:
        low, high = (f"{one:.{digits}f}" for one in of["range"])
        return f"{of['mean']:.{digits}f} ({low} to {high})"

    def row(label: str, figure: str, digits: int) -> list[list[str]]:
        return [
            [f"{label}, {policy}", *(told(by[policy][figure], digits) for by in found["by_locality"].values())]
            for policy in policies
        ]

    rows = row("tokens dropped (%)", "dropped_percent", 1) + row(
        "loss, mean of the last 10 iterations", "final_loss", 3
    )
    return markdown(["locality", *found["by_locality"]], rows + row("input of a step (ms)", "input_ms", 2))


TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "symi_convergence": ("symi_drops", symi_convergence),
    "symi_aux_loss": ("symi_aux_loss", symi_aux_loss),
    "symi_capacity": ("symi_capacity", symi_capacity),
    "symi_breakdown": ("symi_breakdown", symi_breakdown),
    "symi_cost": ("symi_cost", symi_cost),
    "recycle_ablation": ("recycle_ablation", recycle_ablation),
    "recycle_failures": ("recycle_failures", recycle_failures),
    "recycle_baselines": ("recycle_failures", recycle_baselines),
    "recycle_scale": ("recycle_scale", recycle_scale),
    "recycle_traces": ("recycle_traces", recycle_traces),
    "recycle_published": ("simulation", recycle_published),
    "recycle_against": ("simulation", recycle_against),
    "gspmd": ("gspmd", gspmd),
    "beyond_drops": ("beyond", beyond_drops),
    "beyond_costs": ("beyond", beyond_costs),
    "beyond_packing": ("beyond", beyond_packing),
    "placement_eplb": ("placement", placement_eplb),
    "placement_time": ("placement", placement_time),
    "placement_drift": ("placement", placement_drift),
    "balance_drops": ("balance", balance_drops),
    "balance_saved": ("balance", balance_saved),
    "balance_long_drops": ("balance_long", balance_drops),
    "balance_long_saved": ("balance_long", balance_saved),
    "balance_olmoe_drops": ("balance_olmoe", balance_drops),
    "balance_olmoe_saved": ("balance_olmoe", balance_saved),
    "spare_slots": ("spare_slots", spare_slots),
    "locality_drops": ("locality", locality_drops),
    "moc_sizes": ("moc_checkpoint", moc_sizes),
    "moc_stall": ("moc_checkpoint", moc_stall),
    "moc_faults": ("moc_faults", moc_faults),
    "moc_ettr": ("simulation", moc_ettr),
    "agents": ("agents", agents),
}
"""(result, function that formats it) of each table by name."""
