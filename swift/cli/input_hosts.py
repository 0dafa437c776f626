"""``--input-hosts``: connects a command to machines that produce samples for it, and plans how input is read.

The modules for both are imported only when used: most runs read plain text, which needs neither.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from swift.data.config import DataConfig
from swift.data.corpus import training_pipelines
from swift.data.pipeline import InputPlan, Pipeline
from swift.data.remote_records import ConnectHosts, InputHosts
from swift.data.sample_store import NoDigest, pipeline_facts
from swift.errors import SettingError, renamed_settings
from swift.typed import SourceText


def plan_reading(pipeline: Pipeline, hosts: InputHosts | None) -> InputPlan:
    """Plans a single pass over a pipeline, to build a corpus index, see ``plan_once``."""
    from swift.input.optimizer import plan_once

    return plan_once(pipeline, hosts)


def input_hosts_of_runs(
    data: Sequence[DataConfig], options: argparse.Namespace, *, has_network: bool = False
) -> ConnectHosts | None:
    """Returns a function that connects runs to the machines of ``--input-hosts``, see ``input_hosts``.

    Args:
        data: data settings of each run.
        options: see ``input_hosts``.
        has_network: see ``input_hosts``.

    Raises:
        SettingError: see ``input_hosts``; also if a run has no pipeline that produces samples from documents.
    """
    pipelines = (
        []
        if options.input_hosts is None
        else [pipeline for data_config in data for pipeline in training_pipelines(data_config)]
    )
    return input_hosts(pipelines, options, has_network=has_network)


def input_hosts(
    pipelines: Sequence[Pipeline], options: argparse.Namespace, *, has_network: bool = False
) -> ConnectHosts | None:
    """Returns a function that connects to the machines of ``--input-hosts``, or None if the option is not set.

    Args:
        pipelines: pipelines whose samples these machines produce.
        options: options ``input_hosts``, ``key_file`` and ``insecure_network``.
        has_network: whether ``--insecure-network`` also applies to another network that the command uses.

    Raises:
        SettingError: an option is set that needs ``--input-hosts``; an address or the key cannot be used; or a pipeline
            has no digest with which both sides could verify that they have the same one.
    """
    if options.input_hosts is None:
        allowed = "goes with --input-hosts, which is not set"
        if options.key_file is not None:
            raise SettingError("--key-file", str(options.key_file), allowed)
        if options.insecure_network and not has_network:
            raise SettingError("--insecure-network", SourceText("(set)"), allowed)
        return None
    from swift.input.client import connect
    from swift.input.server import find_key

    addresses = [_address(text, is_trusted=options.insecure_network) for text in options.input_hosts.split(",")]
    key = find_key(key_file_of(options.key_file))
    for pipeline in pipelines:
        serving_facts(pipeline)  # called early, so that it raises before anything is read or written

    reported = set[tuple[Callable[[str], None], str]]()

    @contextmanager
    def connected(pipeline: Pipeline, report: Callable[[str], None]) -> Iterator[InputHosts]:
        def report_once(line: str) -> None:  # a mixture connects to the same hosts again for each source
            if (report, line) not in reported:
                reported.add((report, line))
                report(line)

        hosts = connect(addresses, key, serving_facts(pipeline), report, report_once)
        try:
            yield hosts
        finally:
            hosts.close()

    return connected


def _address(text: str, *, is_trusted: bool) -> tuple[str, int]:
    if not text.rpartition(":")[0]:
        raise SettingError("--input-hosts", text, "must be HOST:PORT, or several of them with commas between")
    from swift.cli.node_options import listening_address
    from swift.elastic.transport.connections import check_network

    with renamed_settings({"--listen": "--input-hosts"}):
        host, port = listening_address(text)
        check_network(host, is_trusted=is_trusted)
    if not port:
        raise SettingError("--input-hosts", text, "must be HOST:PORT, with the port on which it listens")
    return host, port


def key_file_of(path: Path | None) -> Path:
    """Returns the path of the key file for input hosts; raises SettingError if it is None."""
    if path is None:
        raise SettingError("--key-file", SourceText("(not set)"), "the machines need a key that they can prove to have")
    return path


def serving_facts(pipeline: Pipeline) -> dict[str, str]:
    """Returns ``pipeline_facts``, which must be equal on both sides; raises SettingError if a digest is unavailable."""
    try:
        return pipeline_facts(pipeline)
    except NoDigest as error:
        reason = f"cannot be made on several machines: {error}"
        raise SettingError("Pipeline", SourceText("(as configured)"), reason) from error
