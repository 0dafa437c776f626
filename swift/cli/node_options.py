"""Reads the number of nodes, this node's index and its listening address from options, Slurm or Kubernetes."""

import ipaddress
import socket
from argparse import Namespace
from collections.abc import Mapping

from swift.errors import SettingError, check_count
from swift.typed import SourceText

_TASKS = "SLURM_STEP_NUM_TASKS"


def node_count(options: Namespace, environment: Mapping[str, str]) -> int:
    """Returns the number of nodes from the command line or else from Slurm; 1 if neither gives it.

    Args:
        options: options ``nodes``, ``node`` and ``listen``.
        environment: environment variables, in which ``srun`` gives its number of tasks.

    Raises:
        SettingError: the number is below 1, or it is 1 and an option for several nodes is set.
    """
    count = options.nodes if options.nodes is not None else _number(environment, _TASKS) or 1
    check_count("--nodes", count, least=1)
    for name in ("node", "listen") if count == 1 else ():
        if getattr(options, name):
            raise SettingError(f"--{name}", getattr(options, name), "is for several --nodes")
    return count


def own_node(options: Namespace, environment: Mapping[str, str], count: int) -> int:
    """Returns this node's 0-based index, from the command line or else from Slurm or Kubernetes.

    Args:
        options: option ``node``.
        environment: environment variables, in which ``srun`` or an indexed Kubernetes job gives this node's index.
        count: number of nodes.

    Raises:
        SettingError: the index is not given or out of range.
    """
    index = _number(environment, "SLURM_PROCID" if _number(environment, _TASKS) else "JOB_COMPLETION_INDEX")
    node = options.node if options.node is not None else index
    if node is None or not 0 <= node < count:
        raise SettingError(
            "--node", SourceText("(not set)") if node is None else node, f"must be from 0 to {count - 1}"
        )
    return int(node)


def listening_address(text: str | None) -> tuple[str, int]:
    """Returns the (address, port) of ``--listen``, by default this machine's own address and port 0, meaning any port.

    Raises:
        SettingError: the value is not an address, or other nodes cannot reach it.
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
