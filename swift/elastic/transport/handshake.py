"""What two nodes prove to each other before they talk: that both have the key of the run, which neither says.

The first sends a challenge; the other its number, a challenge of its own and a proof that fits the first's; the first
its own proof, and whether it lets the other in.
"""

import hmac
import json
from collections.abc import Mapping

LONGEST = 1024
"""Bytes of a line of a handshake, at most."""


def line_of(**said: object) -> str:
    """A line of a handshake."""
    return json.dumps(said) + "\n"


def proof(key: str, text: str) -> str:
    """What only somebody with the key can know of a text."""
    return hmac.digest(key.encode(), text.encode(), "sha256").hex()


def proves(said: Mapping[str, object], key: str, text: str) -> bool:
    """Whether what was said has the proof of a text."""
    return hmac.compare_digest(str(said.get("proof")).encode(errors="replace"), proof(key, text).encode())
