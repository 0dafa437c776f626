"""The hosts of ``swift train``: which of them this is, and whether all of them run the same."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from swift.cli.configuration import config_text
from swift.cli.options import Written
from swift.elastic.transport import this_program
from swift.errors import SettingError, check_count
from swift.train import Experiment, HostPlace, Hosts, join_hosts


def place_of(options: argparse.Namespace) -> HostPlace | None:
    """Returns this host's place among several; None: the run is on one host.

    Raises:
        SettingError: an option is missing or out of range.
    """
    address, count, own = options.coordinator, options.num_hosts, options.host
    if address is None:
        for name, value in (("--num-hosts", count), ("--host", own)):
            if value is not None:
                raise SettingError(name, value, "goes with --coordinator, which is not set")
        return None
    if options.run_dir is None:
        raise SettingError("--run-dir", Written("(not set)"), "several hosts need a directory that they share")
    if count is not None:
        check_count("--num-hosts", count, least=1)
    if own is not None:
        check_count("--host", own, least=0)
        if count is not None and own >= count:
            raise SettingError("--host", own, f"must be below --num-hosts = {count}: hosts are numbered from 0")
    if address == "auto":
        return HostPlace(None, count, own)
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise SettingError("--coordinator", address, "must be HOST:PORT, or auto")
    for name, value in (("--num-hosts", count), ("--host", own)):
        if value is None:
            raise SettingError(name, Written("(not set)"), "has to be given with an address as --coordinator")
    return HostPlace(address, count, own)


@contextmanager
def joined(place: HostPlace, options: argparse.Namespace, experiment: Experiment) -> Iterator[Hosts]:
    """Joins the other hosts, before JAX has started; nothing is printed on stdout meanwhile.

    Raises:
        SettingError: they cannot be found, or run another program or configuration.
    """
    with options.link.quiet():
        with options.link.joining():
            hosts = join_hosts(place)
        settings = (line.partition(" = ") for line in config_text(experiment).splitlines())
        invocation = {"program": this_program(), "--resume": options.resume, "--stop-at": options.stop_at}
        invocation |= {"--profile": options.profile, "--init-from": options.init_from and str(options.init_from)}
        hosts.check_same(invocation | {name: value for name, equals, value in settings if equals})
        yield hosts
