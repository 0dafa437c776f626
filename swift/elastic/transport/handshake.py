"""Handshake of two nodes: each proves to the other that it has the key of the run, without sending it.

The first node sends a challenge. The other answers with its number, a challenge of its own and the proof for the first
challenge. The first node answers with its own proof, and says whether it admits the other. A false proof it refuses
in a line without a proof of its own.
"""

import hmac
import json
from collections.abc import Mapping

MAX_BYTES = 1024
"""Largest size of a line of the handshake, in bytes."""


def line_of(**fields: object) -> str:
    """Returns a line of the handshake."""
    return json.dumps(fields) + "\n"


def proof(key: str, text: str) -> str:
    """Returns a digest of a text that only those who have the key can compute."""
    return hmac.digest(key.encode(), text.encode(), "sha256").hex()


def has_proof(fields: Mapping[str, object], key: str, text: str) -> bool:
    """Returns whether a received line has the proof of a text."""
    return hmac.compare_digest(str(fields.get("proof")).encode(errors="replace"), proof(key, text).encode())
