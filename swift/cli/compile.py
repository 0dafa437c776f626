"""``swift compile``: compiles an experiment for a pod, and reports whether each configuration fits.

Each configuration is compiled in its own process, since a failing compiler may terminate its process.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import jax

from swift.cli.values import workers_of
from swift.config.gin_reader import load_experiment
from swift.config.stored import config_text
from swift.errors import RunError, SettingError, check_count
from swift.pod_compile.compile import FITS, REFUSED, check_pod, compile_one, configurations
from swift.pod_compile.json_format import document, name_of, text_lines
from swift.pod_compile.pods import Pod, settle_process
from swift.topology import worker_names
from swift.train.emulated import FailedSet
from swift.typed import SourceText


def compile(options: argparse.Namespace) -> None:
    """Runs ``swift compile --topology v5e:4x4 CONFIG.gin``."""
    pod = Pod.parse(options.topology)
    check_count("--jobs", options.jobs, least=1)
    experiment = load_experiment(options.config, options.set)
    check_pod(experiment, pod)
    failed = None if options.fail is None else workers_of("--fail", options.fail)
    try:
        downs = configurations(experiment, failed, near=options.neighbours)
    except SettingError as error:
        raise SettingError("--fail", SourceText(" ".join(options.fail or ())), error.allowed) from error
    requests = [_request(config_text(experiment), pod, down) for down in downs]
    reports = _compile_all(requests, options.jobs)
    facts = document(experiment, pod, reports)
    if options.format == "json":
        print(json.dumps(facts))
    else:
        sys.stdout.write("\n".join(text_lines(facts)) + "\n")
        sys.stdout.flush()
    unfit = [name_of(report) for report in reports if report["result"] != FITS]
    if unfit:
        raise RunError(f"{len(unfit)} of {len(reports)} configurations cannot run on {pod.name}: {'; '.join(unfit)}")


def compiler(options: argparse.Namespace) -> None:
    """Compiles one configuration: reads a JSON request from one line of stdin, and writes a JSON report to stdout.

    The process ends when its stdin is closed, so that it does not outlive its parent.
    """
    del options
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # compilers print to stdout, which must contain only the report
    pod = Pod.parse(request["topology"])
    settle_process(pod)
    with tempfile.NamedTemporaryFile("w", suffix=".gin") as file:
        file.write(request["config"])
        file.flush()
        experiment = load_experiment(Path(file.name))
    jax.config.update("jax_enable_x64", experiment.compute_dtype == "float64")
    down = FailedSet(*(frozenset(map(tuple, request[name])) for name in ("workers", "ranks")))
    try:
        report = compile_one(experiment, pod, down)
    except SettingError as error:
        report = {"mistake": [error.setting, repr(error.value), error.allowed]}
    output.write(json.dumps(report))
    output.flush()
    os._exit(0)  # some compilers do not exit cleanly


def _end_with_input() -> None:
    while os.read(0, 1024):  # not sys.stdin: Python could not exit while this thread holds its lock
        pass
    os._exit(130)


def _request(config: str, pod: Pod, down: FailedSet) -> dict[str, Any]:
    return {"config": config, "topology": pod.name, "workers": sorted(down.workers), "ranks": sorted(down.ranks)}


def _compile_all(requests: Sequence[dict[str, Any]], num_jobs: int) -> list[dict[str, Any]]:
    """Compiles the requests, up to ``num_jobs`` at a time; returns their reports in the same order."""
    with ThreadPoolExecutor(num_jobs, "compile") as pool:
        pending = {pool.submit(_ask, request): number for number, request in enumerate(requests)}
        reports: dict[int, dict[str, Any]] = {}
        for future in as_completed(pending):
            report = future.result()
            if "mistake" in report:
                pool.shutdown(wait=False, cancel_futures=True)
                setting, value, allowed = report["mistake"]
                raise SettingError(setting, SourceText(value), allowed)
            reports[pending[future]] = report
            print(f"compiled {len(reports)}/{len(requests)}: {name_of(report)}, {report['result']}", file=sys.stderr)
    return [reports[number] for number in range(len(requests))]


def _ask(request: dict[str, Any]) -> dict[str, Any]:
    """Compiles one request in a new process and returns its report; the result is REFUSED if the process wrote none."""
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", "swift", "compiler"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin, process.stdout:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            answer = process.stdout.read()
            process.wait()
        if answer:
            return json.loads(answer)
        log.seek(0)
        reason = _stderr_tail(log.read().decode(errors="replace"), process.returncode)
    return {
        "failed": worker_names(request["workers"]),
        "lost_ranks": sorted({rank for _, rank in request["ranks"]}),
        "result": REFUSED,
        "reason": reason,
        "compile_s": 0.0,
    }


def _stderr_tail(log: str, code: int) -> str:
    """Describes why a compiler process ended: its first failed check, or else the last line it printed."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    checks = [line for line in lines if re.search(r"Check failed|RET_CHECK failure", line)]
    reason = (checks or lines[-1:] or ["no word"])[0]
    return f"its compiler ended with code {code}: {reason[:400]}"
