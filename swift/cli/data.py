"""``swift data ACTION CONFIG.gin``: profiles, plans and benchmarks an input pipeline, or serves it to other machines.

``swift data serve`` produces samples for other machines; ``input_hosts`` connects the other actions to such machines.
"""

import argparse
import functools
import itertools
import json
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any

from swift.cli.input_hosts import input_hosts, key_file_of, serving_facts
from swift.cli.node_options import listening_address
from swift.config.gin_reader import load_pipeline, load_pipelines
from swift.data.pipeline import InputPlan, Pipeline, TracedPipeline, plain_plan
from swift.data.remote_records import InputHosts
from swift.data.sample_store import check_writable, find_survey
from swift.data.samples import Samples
from swift.data.sources import DataError
from swift.data.survey import in_order
from swift.elastic.transport.connections import check_network
from swift.errors import SettingError, check_count, check_number, renamed_settings
from swift.input.optimizer import Resources, alternatives, plan_input, profile_hosts
from swift.input.profile import InputProfile, profile_input
from swift.input.server import find_key, serve_input

_BACKLOG = 128

_ROUNDS = 3
"""Number of turns per plan in a benchmark. The plans alternate, so that a change in machine speed affects both."""
_OPTIONS = {
    "Resources.num_epochs": "--epochs",
    "Resources.num_cores": "--cores",
    "Resources.memory_bytes": "--memory",
    "Resources.cache_directory": "--cache-dir",
}


def serve(options: argparse.Namespace) -> None:
    """Runs ``swift data serve CONFIG.gin``: serves samples until a signal stops the process."""
    check_count("--processes", options.processes, least=1)
    host, port = listening_address(options.listen)
    check_network(host, is_trusted=options.insecure_network)
    load = functools.partial(load_pipelines, options.config, options.set)
    for pipeline in load():
        serving_facts(pipeline)
    key = find_key(key_file_of(options.key_file), makes=True)
    try:
        listener = socket.create_server((host, port), backlog=_BACKLOG)
    except OSError as error:
        raise SettingError("--listen", f"{host}:{port}", f"cannot be listened on: {error.strerror}") from error
    with listener:
        serve_input(listener, key, load, options.processes, _say)


def _say(line: str) -> None:
    sys.stdout.write(f"swift: {line}\n")
    sys.stdout.flush()


def data(options: argparse.Namespace) -> None:
    """Runs ``swift data ACTION CONFIG.gin``."""
    if options.action == "serve":
        serve(options)
        return
    if options.records is not None:
        check_count("--records", options.records, least=1)
    if options.action == "bench":
        check_number("--seconds", options.seconds, above=0)
    pipeline, running = load_pipeline(options.config, options.set), getattr(options, "running", None)
    if running is not None:  # lets the parent say which operator was running if this process is killed
        pipeline = TracedPipeline.of(pipeline, running.note)
    try:
        facts, lines = _found(pipeline, options)
    except DataError as error:  # the same error as from a run that reads this data when it starts
        raise SettingError("Pipeline.source", pipeline.source, str(error)) from error
    sys.stdout.write(json.dumps(facts) + "\n" if options.format == "json" else "\n".join(lines) + "\n")
    sys.stdout.flush()


def _found(pipeline: Pipeline, options: argparse.Namespace) -> tuple[dict[str, Any], Iterator[str]]:
    """Runs an action other than ``serve``; returns its result as a dictionary for JSON and as text lines."""
    if options.action == "profile":
        return _profile(profile_input(pipeline, options.records))
    with renamed_settings(_OPTIONS):
        used = _resources(options)
        connect = input_hosts([pipeline], options)
        with nullcontext() if connect is None else connect(pipeline, _report) as hosts:
            profile = profile_input(pipeline, options.records)
            if hosts is not None:
                used = replace(used, hosts=profile_hosts(hosts, pipeline, profile))
            if options.action == "plan":
                return _plan(pipeline, used, profile)
            return _bench(pipeline, used, profile, options.seconds, hosts)


def _resources(options: argparse.Namespace) -> Resources:
    check_number("--memory", options.memory, least=0)
    if options.cache_dir is not None:  # checked even if the plan turns out not to need it
        check_writable(options.cache_dir)
    return Resources(options.epochs, options.cores, int(options.memory * 1e9), cache_directory=options.cache_dir)


def _profile(profile: InputProfile) -> tuple[dict[str, Any], Iterator[str]]:
    rows = [profile.source, *profile.operators]
    width = max(len(row.name) for row in rows) + 2

    def lines() -> Iterator[str]:
        yield f"{profile.num_profiled:,} of {profile.num_records:,} records"
        yield f"{'operator':{width}} {'ms':>9} {'waiting':>8} {'bytes in':>12} {'bytes after':>12} {'kept':>7}"
        for row in rows:
            waiting = 1 - row.cpu_s / row.seconds if row.seconds else 0.0
            numbers = f"{1e3 * row.seconds:9.3f} {100 * waiting:6.0f} % {row.bytes_in:12,.0f} {row.bytes_out:12,.0f}"
            yield f"{row.name:{width}} {numbers} {100 * row.kept_share:5.1f} %"
        yield f"two threads are {profile.thread_gain:.2f} times as fast as one"

    return asdict(profile), lines()


def _report(line: str) -> None:
    print(f"swift: {line}", file=sys.stderr)


def _plan(pipeline: Pipeline, used: Resources, profile: InputProfile) -> tuple[dict[str, Any], Iterator[str]]:
    chosen = plan_input(pipeline, used, profile)
    other_plans = alternatives(pipeline, used, profile)

    def lines() -> Iterator[str]:
        yield "as written: " + " -> ".join(itertools.chain(*plain_plan(pipeline).orders))
        yield from chosen.reasons
        yield f"predicted for {used.num_epochs:g} epochs of {profile.num_records:,} records, on one core:"
        for plan in other_plans:
            yield f"  {plan.seconds:12,.3f} s  {plan.name}"

    facts = _facts(chosen) | {"alternatives": {plan.name: plan.seconds for plan in other_plans}}
    return facts, lines()


def _facts(plan: InputPlan) -> dict[str, Any]:
    cache = None if plan.cache is None else asdict(plan.cache)
    workers = {"num_threads": plan.num_threads, "num_processes": plan.num_processes, "num_ahead": plan.num_ahead}
    offloaded = {"num_offloaded": plan.num_offloaded}
    return {"orders": plan.orders, "cache": cache, **workers, **offloaded, "reasons": plan.reasons}


def _bench(
    pipeline: Pipeline, used: Resources, profile: InputProfile, seconds: float, hosts: InputHosts | None
) -> tuple[dict[str, Any], Iterator[str]]:
    chosen = plan_input(pipeline, used, profile)
    plans = (("as written", plain_plan(pipeline)), ("planned", chosen))
    runs = {name: _Run(plan, used, hosts) for name, plan in plans}
    for _ in range(_ROUNDS):
        for run in runs.values():
            run.turn(seconds / _ROUNDS)
    facts = {
        name: {"start_s": run.start_s, "samples": run.num_samples, "samples_per_s": run.num_samples / run.seconds}
        for name, run in runs.items()
    }

    def lines() -> Iterator[str]:
        for name, run_facts in facts.items():
            yield f"{name:12} {run_facts['samples_per_s']:14,.1f} samples/s after {run_facts['start_s']:.3f} s"
        yield f"planned over as written: {facts['planned']['samples_per_s'] / facts['as written']['samples_per_s']:.2f}"

    return facts, lines()


class _Run:
    """Measures the throughput of one plan over several turns."""

    def __init__(self, plan: InputPlan, used: Resources, hosts: InputHosts | None):
        start_time = time.perf_counter()
        samples = Samples(plan, 0, find_survey(plan, used.cache_directory, _report, hosts=hosts), hosts)
        self.start_s = time.perf_counter() - start_time
        self.num_samples, self.seconds = 0, 0.0
        self._samples = in_order(samples, plan, hosts=hosts)

    def turn(self, seconds: float) -> None:
        """Reads samples for this many seconds."""
        start_time = time.perf_counter()
        while time.perf_counter() - start_time < seconds:
            next(self._samples)
            self.num_samples += 1
        self.seconds += time.perf_counter() - start_time
