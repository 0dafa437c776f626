"""``swift train``: runs an experiment in one process, or in one process per host.

The functions at the end serve ``train`` and ``compare`` on several hosts: they determine which host this is, and check
that all hosts have the same program and settings.
"""

import argparse
import ipaddress
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from swift.cli.input_hosts import input_hosts_of_runs, plan_reading
from swift.cli.jax_setup import prepare
from swift.cli.run_setup import corpora_directory, observers_of, reference_of, run_dir_of, weights_of
from swift.cli.values import OF_ONE, deadlines_of
from swift.config.experiment import Experiment
from swift.config.gin_reader import load_experiment
from swift.config.stored import config_text
from swift.errors import SettingError, check_count
from swift.files import this_program
from swift.runlog.lease import living_owner
from swift.runlog.reading import read_run
from swift.train.hosts import SINGLE_HOST, Hosts, HostSettings, join_hosts, own_devices
from swift.train.start import TrainOptions
from swift.train.trainer import train as run_training
from swift.typed import SourceText

_SAME = ("resume", "stop_at", "profile", "init_from")
"""Options that must be the same on all hosts."""


def train(options: argparse.Namespace, *, ends_at_second: bool = True) -> None:
    """Runs ``swift train CONFIG.gin``; see ``TrainOptions`` for ``ends_at_second``."""
    experiment = load_experiment(options.config, options.set)
    host = host_settings(options)
    run_dir = run_dir_of(options)
    weights, connect = (
        weights_of(options, experiment),
        input_hosts_of_runs([experiment.data], options, has_network=options.coordinator is not None),
    )
    prepare([experiment], devices_of_host(host, [experiment]))
    run = TrainOptions(
        run_dir,
        resume=options.resume,
        stop_at=options.stop_at,
        profile=_profile_window(options.profile),
        prepare=options.prepare,
        init_from=weights,
        log_every=options.log_every,
        observers=observers_of(options),
        stopping_s=deadlines_of(options.deadline, OF_ONE).stopping,
        ends_at_second=ends_at_second,
        corpora=corpora_directory(),
        connect=connect,
        plan=plan_reading,
    )
    with nullcontext(SINGLE_HOST) if host is None else joined(host, options, {run_dir: experiment}) as hosts:
        with hosts.all_or_none():
            reference = reference_of(options) if hosts.is_first else None
        summary = run_training(experiment, replace(run, hosts=hosts))
    if hosts.is_first:
        from swift.cli.report import show_distance, show_run

        ended = read_run(run_dir)
        show_run(ended, summary, options.format)
        if reference is not None:
            show_distance(ended, reference, experiment.topology, options.format)


def _profile_window(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    numbers = re.fullmatch(r"(\d+):(\d+)", text)
    if not numbers or not 1 <= int(numbers[1]) <= int(numbers[2]):
        raise SettingError("--profile", text, "must be FIRST:LAST, such as 10:12")
    return int(numbers[1]), int(numbers[2])


def host_settings(options: argparse.Namespace) -> HostSettings | None:
    """Returns the settings with which this process joins the other hosts, or None for a run on one host.

    Raises:
        SettingError: an option is missing or out of range.
    """
    address, count, index = options.coordinator, options.num_hosts, options.host
    if address is None:
        for name, value in (("--num-hosts", count), ("--host", index)):
            if value is not None:
                raise SettingError(name, value, "goes with --coordinator, which is not set")
        return None
    if options.run_dir is None:
        raise SettingError("--run-dir", SourceText("(not set)"), "must be a directory that all hosts share")
    if count is not None:
        check_count("--num-hosts", count, least=1)
    if index is not None:
        check_count("--host", index, least=0)
        if count is not None and index >= count:
            raise SettingError("--host", index, f"must be below --num-hosts = {count}: hosts are numbered from 0")
    if address == "auto":
        return HostSettings(None, count, index)
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise SettingError("--coordinator", address, "must be HOST:PORT, or auto")
    for name, value in (("--num-hosts", count), ("--host", index)):
        if value is None:
            raise SettingError(name, SourceText("(not set)"), "has to be given with an address as --coordinator")
    if not options.insecure_network and not _is_loopback(host):
        allowed = "is a network, on which nothing is encrypted and no key is asked for"
        raise SettingError("--coordinator", address, f"{allowed}; add --insecure-network if you trust that network")
    return HostSettings(address, count, index)


def _is_loopback(host: str) -> bool:
    """Returns whether an address is certainly local to this machine; of all host names, only ``localhost`` counts."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def devices_of_host(place: HostSettings | None, experiments: Sequence[Experiment]) -> int | None:
    """Returns the number of devices that this host must emulate, or None for as many as the experiments need.

    Args:
        place: settings with which this host joins the others, or None for a run on one host.
        experiments: settings of the runs.

    Raises:
        SettingError: the devices cannot be divided evenly among the hosts, or the experiments need different numbers.
    """
    if place is None:
        return None
    counts = {experiment.topology.num_devices for experiment in experiments}
    if len(counts) > 1:
        allowed = "workers x ranks must be the same in all files of a comparison on several hosts"
        raise SettingError("Topology", sorted(counts), allowed)
    return own_devices(experiments[0].topology, place) if experiments[0].ranks == "emulated" else None


def _check_no_run(options: argparse.Namespace, run_dirs: Iterable[Path]) -> None:
    """Raises SettingError if a run is in progress: a second host with the same index would abort it on all hosts.

    A directory without an owner passes, since host 0 acquires its lease only after all hosts have joined.
    """
    for run_dir in run_dirs:
        lease = living_owner(run_dir, lambda line: print(f"swift: {line}", file=sys.stderr, flush=True))
        if lease is None:
            continue
        name, value = ("--run-dir", str(run_dir)) if options.host is None else ("--host", options.host)
        allowed = f"the run is under way, by {lease.owner or 'another process'}, and all its hosts are there"
        raise SettingError(name, value, allowed)


@contextmanager
def joined(place: HostSettings, options: argparse.Namespace, experiments: Mapping[Path, Experiment]) -> Iterator[Hosts]:
    """Joins the other hosts for the duration of the ``with`` block, and checks that all have the same configuration.

    JAX must not have a backend yet. Output to stdout is discarded within the block.

    Args:
        place: settings with which this host joins the others.
        options: options of the command.
        experiments: settings of the runs, by run directory.

    Raises:
        SettingError: a run is already in progress, the other hosts cannot be found, or they have a different program or
            configuration.
    """
    _check_no_run(options, experiments)
    with options.link.quiet():
        with options.link.joining():
            hosts = join_hosts(place)
        names = [f"{run_dir.name}: " if len(experiments) > 1 else "" for run_dir in experiments]
        facts: dict[str, object] = {"program": this_program(), "experiments": "".join(names)}
        for name in _SAME:
            value = getattr(options, name, None)
            facts[f"--{name.replace('_', '-')}"] = str(value) if isinstance(value, Path) else value
        for words, experiment in zip(names, experiments.values(), strict=True):
            settings = (line.partition(" = ") for line in config_text(experiment).splitlines())
            facts |= {f"{words}{name}": value for name, equals, value in settings if equals}
        hosts.check_same(facts)
        yield hosts
