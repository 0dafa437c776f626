"""A run on several hosts: how this process joins the others, what all agree on, and what one of them does alone.

JAX's coordination service connects the processes, one on each host; host 0 starts it, and writes the record.
"""

from swift.train.hosts.agreement import ALONE, Hosts
from swift.train.hosts.checked_files import checked_by_all
from swift.train.hosts.joining import HostPlace, join_hosts, own_devices
from swift.train.hosts.limits import check_all_compute, check_hosts
from swift.train.hosts.own_rows import OwnSequences

__all__ = [
    "ALONE",
    "HostPlace",
    "Hosts",
    "OwnSequences",
    "check_all_compute",
    "check_hosts",
    "checked_by_all",
    "join_hosts",
    "own_devices",
]
