"""``swift data serve``, and the connections of the other actions to machines where it runs."""

import argparse
import functools
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from swift.cli.configuration import load_pipelines
from swift.cli.options.kinds import Written
from swift.cli.options.nodes import listening_address
from swift.data.config import DataConfig
from swift.data.corpus import readings
from swift.data.pipeline.elsewhere import ConnectHosts
from swift.data.pipeline.keeping.digests import NoDigest, pipeline_facts
from swift.data.pipeline.pipeline import Pipeline
from swift.elastic.transport.rendezvous import check_network
from swift.errors import SettingError, check_count, renamed_settings
from swift.tools.offload.client import ConnectedHosts, connect
from swift.tools.offload.keys import find_key
from swift.tools.offload.server import serve_input

_BACKLOG = 128


def serve(options: argparse.Namespace) -> None:
    """``swift data serve CONFIG.gin``: ends with a signal."""
    check_count("--processes", options.processes, least=1)
    host, port = listening_address(options.listen)
    check_network(host, is_trusted=options.insecure_network)
    load = functools.partial(load_pipelines, options.config, options.set)
    for pipeline in load():
        _facts(pipeline)
    key = find_key(_key_file(options.key_file), makes=True)
    try:
        listener = socket.create_server((host, port), backlog=_BACKLOG)
    except OSError as error:
        raise SettingError("--listen", f"{host}:{port}", f"cannot be listened on: {error.strerror}") from error
    with listener:
        serve_input(listener, key, load, options.processes, _say)


def _say(line: str) -> None:
    sys.stdout.write(f"swift: {line}\n")
    sys.stdout.flush()


def input_hosts_of_runs(
    data: Sequence[DataConfig], options: argparse.Namespace, *, has_network: bool = False
) -> ConnectHosts | None:
    """Returns the function by which runs connect to the machines of ``--input-hosts``, see ``input_hosts``.

    Args:
        data: settings of the data of each run.
        options: see ``input_hosts``.
        has_network: see ``input_hosts``.

    Raises:
        SettingError: see ``input_hosts``; or a run does not have documents of which samples are made.
    """
    pipelines = [] if options.input_hosts is None else [pipeline for one in data for pipeline in readings(one)]
    return input_hosts(pipelines, options, has_network=has_network)


def input_hosts(
    pipelines: Sequence[Pipeline], options: argparse.Namespace, *, has_network: bool = False
) -> ConnectHosts | None:
    """Returns the function that connects to the machines of ``--input-hosts``; None: there are none.

    Args:
        pipelines: pipelines of which samples are made there.
        options: options ``input_hosts``, ``key_file`` and ``insecure_network``.
        has_network: whether the command permits another network by the same option.

    Raises:
        SettingError: an option is set that goes with ``--input-hosts``; an address or the key cannot be used; or a
            pipeline cannot be told from another.
    """
    if options.input_hosts is None:
        allowed = "goes with --input-hosts, which is not set"
        if options.key_file is not None:
            raise SettingError("--key-file", str(options.key_file), allowed)
        if options.insecure_network and not has_network:
            raise SettingError("--insecure-network", Written("(set)"), allowed)
        return None
    addresses = [_address(text, is_trusted=options.insecure_network) for text in options.input_hosts.split(",")]
    key = find_key(_key_file(options.key_file))
    for pipeline in pipelines:
        _facts(pipeline)  # before anything is read or written

    told = set[tuple[Callable[[str], None], str]]()

    @contextmanager
    def connected(pipeline: Pipeline, report: Callable[[str], None]) -> Iterator[ConnectedHosts]:
        def report_once(line: str) -> None:  # a mixture connects for each source, to the same hosts
            if (report, line) not in told:
                told.add((report, line))
                report(line)

        hosts = connect(addresses, key, _facts(pipeline), report, report_once)
        try:
            yield hosts
        finally:
            hosts.close()

    return connected


def _address(text: str, *, is_trusted: bool) -> tuple[str, int]:
    if not text.rpartition(":")[0]:
        raise SettingError("--input-hosts", text, "must be HOST:PORT, or several of them with commas between")
    with renamed_settings({"--listen": "--input-hosts"}):
        host, port = listening_address(text)
        check_network(host, is_trusted=is_trusted)
    if not port:
        raise SettingError("--input-hosts", text, "must be HOST:PORT, with the port on which it listens")
    return host, port


def _key_file(path: Path | None) -> Path:
    if path is None:
        raise SettingError("--key-file", Written("(not set)"), "the machines need a key that they can prove to have")
    return path


def _facts(pipeline: Pipeline) -> dict[str, str]:
    try:
        return pipeline_facts(pipeline)
    except NoDigest as error:
        why = f"cannot be made on several machines: {error}"
        raise SettingError("Pipeline", Written("(as configured)"), why) from error
