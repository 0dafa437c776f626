"""The place of a host among several: a network between them has to be trusted in so many words, as by ``launch``."""

from argparse import Namespace
from pathlib import Path

import pytest

from swift.cli.train import host_settings
from swift.errors import SettingError
from swift.train.hosts import HostSettings


def options(**given):
    usual = {"num_hosts": 2, "host": 0, "run_dir": Path("run"), "insecure_network": False}
    return Namespace(**usual | given)


@pytest.mark.parametrize("host", ["10.0.0.1", "0.0.0.0", "[fd00::1]", "node0", "localhost.example.org"])
def test_a_network_between_hosts_is_used_only_where_it_is_trusted(host):
    with pytest.raises(SettingError) as refused:
        host_settings(options(coordinator=f"{host}:9123"))
    assert str(refused.value) == (
        f"--coordinator = '{host}:9123': is a network, on which nothing is encrypted and no key is asked for; "
        "add --insecure-network if you trust that network"
    )
    assert host_settings(options(coordinator=f"{host}:9123", insecure_network=True)) == HostSettings(
        f"{host}:9123", 2, 0
    )


@pytest.mark.parametrize("address", ["127.0.0.1:9123", "127.0.0.3:9123", "[::1]:9123", "localhost:9123"])
def test_on_one_machine_there_is_no_network(address):
    assert host_settings(options(coordinator=address)) == HostSettings(address, 2, 0)


def test_a_scheduler_chooses_the_machines_itself():
    assert host_settings(options(coordinator="auto", num_hosts=None, host=None)) == HostSettings(None, None, None)
