"""This machine's own address, and whether it can be listened on."""

import ipaddress
import socket
from collections.abc import Iterator

from swift.tools.doctor.finding import Finding

_TOPIC = "network"
_CONNECT_S = 5.0


def examine_network(host: str, *, is_alone: bool, is_chosen: bool) -> Iterator[Finding]:
    """Listens at an address of this machine and connects to it.

    Args:
        host: address at which the others find this machine.
        is_alone: whether there are no others, so that an address which they reach is not missed.
        is_chosen: whether the user has given the address, rather than the machine's name.
    """
    try:
        with socket.create_server((host, 0)) as listener:
            socket.create_connection(listener.getsockname()[:2], timeout=_CONNECT_S).close()
    except OSError as error:
        yield Finding(_TOPIC, "missing", f"{host} cannot be listened on and reached from here: {error}")
        return
    if not ipaddress.ip_address(host).is_loopback:
        yield Finding(_TOPIC, "ok", f"this machine is {host}, which can be listened on")
    elif is_chosen:
        yield Finding(_TOPIC, "note", f"{host} is reached by this machine alone")
    else:
        remedy = "a run on several needs --listen HOST" if is_alone else "see /etc/hosts, or give --listen HOST"
        text = f"this machine's name stands for {host}, which no other machine reaches: {remedy}"
        yield Finding(_TOPIC, "note" if is_alone else "missing", text)
