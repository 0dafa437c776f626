"""The worth of balancing experts and of dropping fewer tokens: placements, and what balances them, over several seeds.

``table`` is 150 iterations of the demo: static, SYMI's and packed placement, each with no balancing, with an auxiliary
loss and with an expert bias. ``long`` is 2,000 iterations, with more systems; ``olmoe`` is 2,000 iterations of a
small model of OLMoE's architecture, with no balancing.

A run takes 1 to 25 CPU-minutes. It is written to a record once it has ended, and one that is there is not run again;
one that was interrupted continues from its last checkpoint. So a study may take several sittings, and be divided
among processes (``--part 1/2``).
"""

import argparse
import json
import os
import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from children import ROOT, tell
from faults.evidence import read_lines
from faults.record import commit
from measure import cpu_seconds, publish

from swift.checkpoint.manifest import checkpoint_steps
from swift.config.experiment import Experiment
from swift.config.gin_reader import load_experiment
from swift.config.stored import config_text
from swift.data.sources import StandardLibrary
from swift.files import replace_file
from swift.runlog.reading import Run, measure, read_run, scalars, steps_to_target
from swift.train.start import TrainOptions
from swift.train.trainer import train

RECORD = ROOT / "experiments" / "results" / "balance_runs.jsonl"
SYSTEMS = {
    "static": ("symi/demo/static.gin", ()),
    "flexmoe10": ("symi/demo/flexmoe10.gin", ()),
    "symi": ("symi/demo/symi.gin", ()),
    "packed": ("beyond/packed_rank_best.gin", ()),
    "exact": ("demo.gin", ("ExpertConfig.capacity=@ExactCapacity()",)),
}
"""Files below ``experiments``, and settings. With exact capacity a run computes what one device without limits does."""
SHAPES = {
    "demo": (),
    "olmoe": (
        "model_size.name='olmoe-1b-7b-tiny'",
        "ExpertConfig.num_classes=16",
        "ExpertConfig.top_k=8",
        "TopK.normalize_gates=False",
        "Experiment.separate_documents=True",
    ),
}
"""Settings of a model; ranks, slots and batches are the same for all. OLMoE has 64 experts, 8 of which
serve a token, and the small one 16: every token takes half of them, so that the load is more even."""
BALANCES = {"none": (0.0, False), "aux": (1e-2, False), "bias": (0.0, True)}
"""Coefficient of the auxiliary loss, and whether the router has a bias."""
TARGETS = (2.5, 2.25, 2.0, 1.9, 1.8, 1.7, 1.6)
"""Target training losses, in nats per byte."""
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Student's t, two-sided, by the number of seeds."""
POINTS = 40
"""Number of points in a curve."""


@dataclass(frozen=True)
class Case:
    """One run of a study: its key in the record."""

    steps: int
    balance: str
    system: str
    seed: int
    shape: str = "demo"


def cases_of(study: str, seeds: int) -> Iterator[Case]:
    """Yields the runs of a study, the most telling first."""
    for seed in range(seeds):
        if study == "table":
            for balance in BALANCES:
                yield from (Case(150, balance, system, seed) for system in ("static", "symi", "packed"))
        else:
            shape = "olmoe" if study == "olmoe" else "demo"
            yield from (Case(2000, "none", system, seed, shape) for system in ("static", "symi", "exact", "packed"))
    if study == "long":
        for seed in range(seeds):
            yield from (
                Case(2000, balance, system, seed) for balance in ("aux", "bias") for system in ("static", "symi")
            )
            yield Case(2000, "none", "flexmoe10", seed)


def experiment_of(case: Case) -> Experiment:
    """Builds the experiment of a case, which saves a checkpoint every 200 iterations."""
    (file, settings), (coefficient, has_bias) = SYSTEMS[case.system], BALANCES[case.balance]
    counts = (f"Experiment.num_steps={case.steps}", f"Experiment.eval_every={case.steps}", "CheckpointConfig.every=200")
    balance = f"ExpertConfig.aux_loss_coefficient={coefficient}"
    settings = [*SHAPES[case.shape], *settings, *counts, balance, f"Experiment.seed={case.seed}"]
    return load_experiment(ROOT / "experiments" / file, [*settings, *["TopK.bias_update_rate=0.001"] * has_bias])


def run(case: Case, directory: Path) -> dict[str, Any]:
    """Trains a case to its end, starting from an earlier session's checkpoint if any, and returns its record entry.

    Args:
        case: run of a study.
        directory: directory for this run only. It also stores the CPU-seconds of each session, 0 for a killed one.
    """
    run_dir, spent = directory / "run", directory / "cpu_s.json"
    if not checkpoint_steps(run_dir / "checkpoints"):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
    sittings, begun = json.loads(spent.read_text()) if spent.exists() else [], cpu_seconds()
    if not (run_dir / "summary.json").exists():
        replace_file(spent, json.dumps([*sittings, 0.0]).encode())
        experiment = experiment_of(case)
        try:
            train(experiment, TrainOptions(run_dir, config_text(experiment), resume=run_dir.exists()))
        finally:
            sittings.append(round(cpu_seconds() - begun, 1))
            replace_file(spent, json.dumps(sittings).encode())
    return {"cpu_s": round(sum(sittings)), "sittings": len(sittings), **figures_of(read_run(run_dir))}


def figures_of(found: Run) -> dict[str, Any]:
    """Computes the figures of a run: drops, losses, iterations to targets, curves."""
    losses_T, drops_T = scalars(found, "loss"), scalars(found, "drop_fraction")
    every = max(1, len(losses_T) // POINTS)
    whole = len(losses_T) // every * every
    tail = losses_T[-len(losses_T) // 20 :]
    figures = measure(found, None)
    return {
        "dropped_percent": round(figures["dropped_percent"], 3),
        "loss": round(float(tail.mean()), 4),
        "validation_loss": round(figures["validation_loss"], 4),
        "steps_to": {f"{target:g}": steps_to_target(losses_T, target) for target in TARGETS},
        "every": every,
        "losses": [round(float(x), 3) for x in losses_T[:whole].reshape(-1, every).mean(axis=1)],
        "drop_fractions": [round(float(x), 4) for x in drops_T[:whole].reshape(-1, every).mean(axis=1)],
    }


def entropy_of_next_byte(text: bytes, known: int) -> float:
    """Computes the entropy of a byte given those before it, in nats: what a table of n-grams reaches on its own corpus.

    Args:
        text: corpus.
        known: bytes before it that are known, up to 3.
    """
    codes = np.frombuffer(text, np.uint8).astype(np.int64)
    places = len(codes) - known
    context = sum(codes[back : back + places] << (8 * back) for back in range(known)) + np.zeros(places, np.int64)
    joint, of_context = (np.unique(x, return_counts=True)[1] for x in (context << 8 | codes[known:], context))
    entropies = [np.log(places) - (n * np.log(n)).sum() / places for n in (joint, of_context)]
    return round(float(entropies[0] - entropies[1]), 3)


def fill(cases: Sequence[Case], record: Path, runs: Path) -> None:
    """Runs the cases that are not yet in the record, each in a directory below ``runs``."""
    known = {Case(**line["case"]) for line in read_lines(record).records}
    missing = [case for case in cases if case not in known]
    if record.exists() and not record.read_bytes().endswith(b"\n"):
        with record.open("ab") as file:
            file.write(b"\n")  # an earlier session was killed in the middle of a line
    for number, case in enumerate(missing, start=1):
        tell(f"{number} of {len(missing)}: {case}")
        directory = runs / f"{case.shape}-{case.steps}-{case.balance}-{case.system}-{case.seed}"
        line = {"case": asdict(case), "commit": commit(ROOT), **run(case, directory)}
        with record.open("ab") as file:
            file.write((json.dumps(line) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(directory, ignore_errors=True)


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Aggregates the seeds of each system and balancing method: mean, smallest and largest of every figure."""
    found: dict[str, Any] = {}
    for name in ("dropped_percent", "loss", "validation_loss"):
        values = [line[name] for line in lines]
        found[name] = {"mean": round(statistics.mean(values), 4), "least": min(values), "most": max(values)}
    found["steps_to"] = {target: [line["steps_to"][target] for line in lines] for target in lines[0]["steps_to"]}
    found["every"] = lines[0]["every"]
    for name in ("losses", "drop_fractions"):
        found[name] = np.mean([line[name] for line in lines], axis=0).round(4).tolist()
    return found | {"seeds": sorted(line["case"]["seed"] for line in lines)}


def fewer_iterations(lines: list[dict[str, Any]], balance: str, system: str) -> dict[str, Any]:
    """Computes by target the share of ``static``'s iterations that a system saves: mean over seeds, and 95 % interval.

    Seeds at which either does not reach the target are left out, and counted.
    """
    runs, found = beside_static(lines, balance, system), {}
    for target in map("{:g}".format, TARGETS):
        steps = [(one["steps_to"][target], other["steps_to"][target]) for one, other in runs]
        saved = [1 - ours / theirs for ours, theirs in steps if ours and theirs]
        if not saved:
            continue
        half = T_95[len(saved)] * statistics.stdev(saved) / len(saved) ** 0.5 if len(saved) in T_95 else None
        mean = round(statistics.mean(saved), 4)
        found[target] = {"mean": mean, "plus_minus": half and round(half, 4), "seeds": len(saved), "of": len(runs)}
    return found


def loss_less_static(lines: list[dict[str, Any]], balance: str, system: str) -> list[float]:
    """Computes the curve of a system's loss less that of ``static``, the mean over seeds."""
    pairs = [(one["losses"], other["losses"]) for one, other in beside_static(lines, balance, system)]
    return np.mean([np.subtract(ours, theirs) for ours, theirs in pairs], axis=0).round(4).tolist() if pairs else []


def beside_static(
    lines: list[dict[str, Any]], balance: str, system: str
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs the runs of a system with those of ``static`` by seed; runs without a counterpart are left out."""
    by_case = {
        (line["case"]["system"], line["case"]["seed"]): line for line in lines if line["case"]["balance"] == balance
    }
    seeds = sorted(seed for name, seed in by_case if name == system and ("static", seed) in by_case)
    return [(by_case[system, seed], by_case["static", seed]) for seed in seeds]


def part(text: str) -> tuple[int, int]:
    """Parses the K-th of N processes.

    >>> part("1/2")
    (1, 2)
    """
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError("must be K/N with 1 <= K <= N")
    return int(number), int(count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", choices=("table", "long", "olmoe"))
    parser.add_argument("--seeds", type=int, default=3, choices=(1, 2, 3, 4, 5))
    parser.add_argument("--record", type=Path, default=RECORD, help="file of the runs that have ended")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "balance", help="directory of the runs meanwhile")
    parser.add_argument("--part", type=part, default=(1, 1), metavar="K/N", help="of N processes that share the runs")
    parser.add_argument("--only-summary", action="store_true", help="run nothing: what the record has")
    options = parser.parse_args()
    cases = list(cases_of(options.study, options.seeds))
    if not options.only_summary:
        options.runs.mkdir(parents=True, exist_ok=True)
        first, step = options.part
        fill(cases[first - 1 :: step], options.record, options.runs)
        if step > 1:
            return 0  # the summary is of all parts: --only-summary
    wanted = {Case(**line["case"]): line for line in read_lines(options.record).records}
    lines = [wanted[case] for case in cases if case in wanted]
    groups: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for line in lines:
        groups.setdefault(line["case"]["balance"], {}).setdefault(line["case"]["system"], []).append(line)
    by_balance = {
        balance: {system: summary(of) for system, of in systems.items()} for balance, systems in groups.items()
    }
    corpus = b"\0".join(document.read().encode() for document in StandardLibrary().documents())
    if not {"static", "symi"} <= by_balance.get("none", {}).keys():
        parser.error(f"{options.record} has no run of static and symi without balancing, which the others are held to")
    drops = {system: of["dropped_percent"]["mean"] for system, of in by_balance["none"].items()}
    return publish(
        f"what balancing and placement are worth: {options.study}",
        {
            "runs": len(lines),
            "runs_missing": len(cases) - len(lines),
            "cpu_minutes_of_runs": round(sum(line["cpu_s"] for line in lines) / 60),
            "entropy_of_next_byte": {f"{known} known": entropy_of_next_byte(corpus, known) for known in (1, 2, 3)},
            "commits": sorted({line["commit"] for line in lines}),
            "by_balance": by_balance,
            **{
                of.__name__: {
                    balance: {system: of(lines, balance, system) for system in systems if system != "static"}
                    for balance, systems in groups.items()
                }
                for of in (fewer_iterations, loss_less_static)
            },
        },
        {"symi's drops over static's": (round(drops["symi"] / drops["static"], 4), 0.75)},
    )


if __name__ == "__main__":
    sys.exit(main())
