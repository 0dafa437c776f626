"""``swift simulate``: simulates recovery strategies on a failure trace; prints text or JSON, and draws a picture."""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from swift.cli.values import PICTURE, check_output, costs_of, named_numbers, seconds_of
from swift.errors import SettingError, check_count, renamed_errors, suggest
from swift.files import replace_file
from swift.schedules.problem import Problem
from swift.simulate.engine import CAUSES
from swift.simulate.engine import simulate as run_through
from swift.simulate.job import Job
from swift.simulate.json_format import document
from swift.simulate.published import published
from swift.simulate.registry import ON_REQUEST, STRATEGIES, CannotRun, strategies
from swift.simulate.traces import Trace, evenly_spaced, poisson, read_trace, weibull
from swift.topology import Topology
from swift.typed import SourceText

_JOB_NAMES = {
    "iteration": "iteration_s",
    "state": "state_bytes",
    "expert-share": "expert_share",
    "experts": "num_experts",
    "host": "host_bandwidth",
    "network": "network_bandwidth",
    "storage": "storage_bandwidth",
    "restart": "restart_s",
    "checkpoint-every": "checkpoint_every",
    "K": "experts_per_checkpoint",
}
"""Maps the names in ``--job`` to fields of ``Job``."""
_WHOLE = ("num_experts", "checkpoint_every", "experts_per_checkpoint")
_MAX_FAILURES = 1_000_000
_MAX_OPS = 5_000_000
"""Maximum number of operations per iteration; beyond it, planning for a strategy takes minutes and gigabytes."""
_SETTINGS = {
    "Topology.num_pipelines": "--pipelines",
    "Topology.num_stages": "--stages",
    "Topology.num_expert_ranks": "--expert-ranks",
    "Problem.num_microbatches": "--microbatches",
    "Problem.memory_limit": "--memory-limit",
    "trace": "--trace",
    "seed": "--seed",
    "shape": "--weibull",
    "mtbf (s)": "--mtbf",
    "period (s)": "--remove-every",
    "trace horizon (s)": "--duration",
    "model": "--model",
    "strategy": "--strategy",
}
"""Maps the library's setting names to command-line options, for error messages."""


def simulate(options: argparse.Namespace) -> None:
    """Runs ``swift simulate --pipelines D --stages P --microbatches M``, for example with ``--mtbf 10m``."""
    _check_plot(options.plot, [] if options.trace is None else [options.trace])
    for name in options.strategy:
        known = (*STRATEGIES, *ON_REQUEST)
        if name not in known:
            raise SettingError("--strategy", name, suggest(name, known, f"must be one of {', '.join(known)}"))
    with renamed_errors(lambda error: _translate(error, options)):
        job, model = _job(options), published(options.model) if options.model else None
        trace = _trace(options, job.num_workers)
        chosen = strategies(job, trace, model, options.strategy or STRATEGIES)
        for strategy in chosen:
            if options.strategy and isinstance(strategy, CannotRun) and not strategy.out_of_memory:
                raise SettingError("strategy", strategy.name, strategy.reason)
        facts = document(
            job,
            trace,
            (strategy if isinstance(strategy, CannotRun) else run_through(strategy, trace) for strategy in chosen),
        )
    if options.plot is not None:
        _draw(options.plot, facts)
    if options.format == "json":
        print(json.dumps(facts))
    else:
        _print(facts)


def _job(options: argparse.Namespace) -> Job:
    topology = Topology(options.pipelines, options.stages, options.expert_ranks)
    num_ops = 3 * options.pipelines * options.stages * options.microbatches
    if num_ops > _MAX_OPS:
        size = SourceText(f"{options.pipelines} x {options.stages} x {options.microbatches}")
        allowed = f"makes {num_ops:,} ops an iteration; at most {_MAX_OPS:,} can be simulated"
        raise SettingError("--pipelines x --stages x --microbatches", size, allowed)
    problem = Problem(topology, options.microbatches, costs=costs_of(options.costs)).limited(options.memory_limit)
    values: dict[str, Any] = named_numbers("--job", options.job, _JOB_NAMES, "iteration=2")
    for name in _WHOLE:
        if name in values and values[name] % 1 == 0:
            values[name] = int(values[name])
    return Job(problem, **values)


def _trace(options: argparse.Namespace, num_workers: int) -> Trace:
    is_set = {name: getattr(options, name) is not None for name in ("trace", "mtbf", "remove_every")}
    if sum(is_set.values()) != 1:
        allowed = "give one of --trace FILE, --mtbf DURATION and --remove-every DURATION"
        raise SettingError("trace", SourceText("(not set)" if not any(is_set.values()) else "(set twice)"), allowed)
    if options.num_failures is not None and options.remove_every is None:
        raise SettingError("--num-failures", options.num_failures, "counts the failures of --remove-every alone")
    if options.trace is not None:
        return read_trace(options.trace, lambda line: print(f"swift: {line}", file=sys.stderr), options.seed)
    if options.remove_every is not None:
        num_failures = num_workers // 2 if options.num_failures is None else options.num_failures
        check_count("--num-failures", num_failures, least=1)
        return evenly_spaced(
            num_workers, seconds_of("--remove-every", options.remove_every), num_failures, options.seed
        )
    mtbf_s, repair_s = seconds_of("--mtbf", options.mtbf), seconds_of("--repair", options.repair)
    horizon_s = seconds_of("--duration", options.duration)
    if mtbf_s > 0 and horizon_s / mtbf_s > _MAX_FAILURES:
        allowed = (
            f"makes {horizon_s / mtbf_s:,.0f} failures in --duration {options.duration}; at most {_MAX_FAILURES:,}"
        )
        raise SettingError("--mtbf", options.mtbf, allowed)
    if options.weibull is None:
        return poisson(num_workers, mtbf_s, repair_s, horizon_s, options.seed)
    return weibull(num_workers, mtbf_s, options.weibull, repair_s, horizon_s, options.seed)


def _check_plot(path: Path | None, inputs: Sequence[Path]) -> None:
    """Checks ``--plot`` before the simulation, which may take a long time."""
    if path is None:
        return
    if path.suffix.lower() not in (".svg", ".png"):
        raise SettingError("--plot", str(path), "must end in .svg or .png")
    check_output("--plot", path, PICTURE, inputs)


def _draw(path: Path, facts: Mapping[str, Any]) -> None:
    # Matplotlib is imported only if there is a picture to draw.
    from swift.draw.loads import simulation_file

    try:
        replace_file(path, simulation_file(facts, "png" if path.suffix.lower() == ".png" else "svg"))
    except OSError as error:
        raise SettingError("--plot", str(path), f"cannot be written: {error.strerror}") from error


def _print(facts: Mapping[str, Any]) -> None:
    sys.stdout.write("\n".join((*_headings(facts), "", *_table(facts), "", *_remarks(facts))) + "\n")
    sys.stdout.flush()


def _headings(facts: Mapping[str, Any]) -> Iterator[str]:
    job, trace = facts["job"], facts["trace"]
    num_workers = job["num_pipelines"] * job["num_stages"]
    yield (
        f"{job['num_pipelines']} pipelines x {job['num_stages']} stages x {job['num_expert_ranks']} expert ranks: "
        f"{num_workers} workers, {num_workers * job['num_expert_ranks']} devices; "
        f"{job['num_microbatches']} micro-batches per pipeline, {job['iteration_s']:g} s an iteration"
    )
    mtbf_s = trace["mean_time_between_failures_s"]
    often = f", one in {mtbf_s / 60:.3g} minutes" if mtbf_s else ""
    yield f"{trace['hours']:.4g} hours, {trace['failures']:,} failures{often}, at most {trace['most_nodes']:,} nodes"


def _table(facts: Mapping[str, Any]) -> Iterator[str]:
    rows = facts["strategies"]
    spent = [cause for cause in CAUSES if any(row["spent_s"] and row["spent_s"][cause] > 0 for row in rows)]
    has_samples = any(row["samples_per_s"] is not None for row in rows)
    headings = [
        "  ETTR",
        "iterations",
        *["samples/s"] * has_samples,
        *(f"{cause} %".replace("_", " ") for cause in spent),
    ]
    width = max(map(len, STRATEGIES)) + 2
    yield "strategy".ljust(width) + "  ".join(headings)
    for row in rows:
        if row["spent_s"] is None:
            yield row["name"].ljust(width) + "out of memory"
            continue
        rate = "-" if row["samples_per_s"] is None else f"{row['samples_per_s']:.4g}"
        total = sum(row["spent_s"].values())
        shares = [f"{100 * row['spent_s'][cause] / total:.2f}" for cause in spent]
        cells = [f"{row['ettr']:.4f}", f"{row['iterations']:,.0f}", *[rate] * has_samples, *shares]
        yield row["name"].ljust(width) + "  ".join(
            cell.rjust(len(heading)) for cell, heading in zip(cells, headings, strict=True)
        )


def _remarks(facts: Mapping[str, Any]) -> Iterator[str]:
    for row in facts["strategies"]:
        yield f"{row['name']}: {row['reason'] if row['spent_s'] is None else row['source']}"
    for row in facts["left_out"]:
        yield f"{row['name']} is left out: {row['reason']}"


def _translate(error: SettingError, options: argparse.Namespace) -> SettingError:
    setting, value = error.setting, error.value
    field = setting.partition(".")[2]
    if setting.startswith("Job.") and field in _JOB_NAMES.values():
        (name,) = (name for name, known in _JOB_NAMES.items() if known == field)
        return SettingError("--job", SourceText(f"{name}={value:g}"), error.allowed)
    if setting.startswith("Costs."):
        return SettingError("--costs", " ".join(options.costs), error.allowed)
    return SettingError(_SETTINGS.get(setting, setting), value, error.allowed)
