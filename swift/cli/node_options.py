"""The number of nodes, that of this one, and the address at which it listens, from options or their surroundings."""

import ipaddress
import socket
from argparse import Namespace
from collections.abc import Mapping

from swift.errors import SettingError, check_count
from swift.typed import SourceText

_TASKS = "SLURM_STEP_NUM_TASKS"


def node_count(options: Namespace, environment: Mapping[str, str]) -> int:
    """Returns the number of nodes, given by the command line, or else by Slurm; one where neither says it.

    Args:
        options: options ``nodes``, ``node`` and ``listen``.
        environment: environment variables; ``srun`` says there how many tasks it has.

    Raises:
        SettingError: it is none, or other options are for several.
    """
    count = options.nodes if options.nodes is not None else _number(environment, _TASKS) or 1
    check_count("--nodes", count, least=1)
    for name in ("node", "listen") if count == 1 else ():
        if getattr(options, name):
            raise SettingError(f"--{name}", getattr(options, name), "is for several --nodes")
    return count


def own_node(options: Namespace, environment: Mapping[str, str], count: int) -> int:
    """Returns the number of this node of several, given by the command line, or else by Slurm or Kubernetes.

    Args:
        options: option ``node``.
        environment: environment variables; ``srun`` numbers its tasks there, an indexed Kubernetes job its pods.
        count: number of nodes.

    Raises:
        SettingError: it is not given, or out of range.
    """
    index = _number(environment, "SLURM_PROCID" if _number(environment, _TASKS) else "JOB_COMPLETION_INDEX")
    node = options.node if options.node is not None else index
    if node is None or not 0 <= node < count:
        raise SettingError(
            "--node", SourceText("(not set)") if node is None else node, f"must be from 0 to {count - 1}"
        )
    return int(node)


def listening_address(text: str | None) -> tuple[str, int]:
    """Returns the address and port of ``--listen``, those of this machine's name and any port where it is not given.

    Raises:
        SettingError: it is no address, or none that others can reach.
    """
    host, _, port = (text or socket.gethostname()).partition(":")
    if port and not (port.isdecimal() and int(port) < 2**16):
        raise SettingError("--listen", text, "must be HOST or HOST:PORT, with a port below 65536")
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        raise SettingError("--listen", host, f"is not a known host: {error.strerror}") from error
    if not host or ipaddress.ip_address(address).is_unspecified:
        raise SettingError("--listen", text, "must be HOST or HOST:PORT, with one address that others can reach")
    return address, int(port or 0)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else None
