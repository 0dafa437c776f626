"""``swift doctor``: checks whether a machine, or several together, can run Swift; prints lines or JSON."""

import argparse
import json
import os
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from swift.cli.node_options import listening_address, node_count, own_node
from swift.doctor.checks import examine_directory, examine_machine, examine_network, examine_software
from swift.doctor.connectivity import ConnectivityCheck, attending
from swift.elastic.device_probe import Finding, examine_devices
from swift.errors import RunError, SettingError
from swift.files import this_program
from swift.typed import SourceText

_STYLES = {"ok": "green", "note": "yellow", "missing": "bold red"}


def doctor(options: argparse.Namespace) -> None:
    """Runs ``swift doctor --host``, or ``swift doctor --nodes N --node I --run-dir DIR`` on each of N machines."""
    if options.host:
        options.nodes = 1
    count = node_count(options, os.environ)
    if count > 1 and options.run_dir is None:
        raise SettingError("--run-dir", SourceText("(not set)"), "several nodes need a directory that all of them see")
    node = own_node(options, os.environ, count) if count > 1 else 0
    if count > 1 and not options.run_dir.is_dir():
        allowed = "must be a directory that is there, in which the nodes meet"
        raise SettingError("--run-dir", str(options.run_dir), allowed)
    console, findings = Console(), list[Finding]()
    if options.format == "text" and count > 1:
        console.print(f"node {node} of {count}", highlight=False)
    for finding in _alone(options) if count == 1 else _together(options, count, node):
        findings.append(finding)
        if options.format == "text":
            verdict = Text(f"{finding.verdict:9}", _STYLES[finding.verdict])
            console.print(verdict.append(f"{finding.topic:11}{finding.text}", "none"), soft_wrap=True)
    num_missing = sum(finding.verdict == "missing" for finding in findings)
    if options.format == "json":
        rows = [vars(finding) for finding in findings]
        print(json.dumps({"node": node, "nodes": count, "is_ready": not num_missing, "findings": rows}))
    if num_missing:
        what = "one thing is missing" if num_missing == 1 else f"{num_missing} things are missing"
        raise RunError(f"{'this machine' if count == 1 else f'node {node}'} is not ready: {what}")


def _alone(options: argparse.Namespace) -> Iterator[Finding]:
    if options.run_dir is not None:
        yield from examine_directory(options.run_dir)
    yield from _examined()
    try:
        yield from examine_network(listening_address(None)[0], is_alone=True, is_chosen=False)
    except SettingError as error:
        yield Finding("network", "note", f"this machine's name, {error.value}, {error.allowed}")


def _together(options: argparse.Namespace, count: int, node: int) -> Iterator[Finding]:
    """Examines this machine and its connections to the other nodes, which must run the same check concurrently."""
    host, _ = listening_address(options.listen)
    directory_findings = list(examine_directory(options.run_dir))
    yield from directory_findings
    if any(finding.verdict == "missing" for finding in directory_findings):
        yield from _examined()
        yield Finding("nodes", "missing", "not looked for, since they meet in that directory")
        return
    try:
        with attending(ConnectivityCheck(options.run_dir, count, node, host)) as attendance:
            yield from (findings := list(_examined()))
            yield from examine_network(host, is_alone=False, is_chosen=options.listen is not None)
            devices = "; ".join(finding.text for finding in findings if finding.topic == "devices")
            _say(f"nodes: waiting for all {count}")
            yield from attendance.meet({"program": this_program(), "devices": devices})
    except OSError as error:
        yield Finding("nodes", "missing", f"this one cannot meet the others in {options.run_dir}: {error}")


def _examined() -> Iterator[Finding]:
    yield from examine_software()
    yield from examine_machine()
    _say("devices: JAX is started")
    yield from examine_devices()


def _say(text: str) -> None:
    """Prints on stderr what the command is waiting for."""
    print(f"{text} ...", file=sys.stderr, flush=True)
