"""Checkpoints that several hosts write together, in the format of one.

``host_save`` is a save from the side of one host, ``shared_files`` what it writes and reads back, and ``host_board``
what the hosts tell each other meanwhile.
"""

from swift.checkpoint.hosts.host_board import HostBoard, HostFailed, Save, Spoilt
from swift.checkpoint.hosts.host_save import HostSave
from swift.checkpoint.hosts.shared_files import Filled, Piece, check_filled, fill_in, stored_shapes

__all__ = [
    "Filled",
    "HostBoard",
    "HostFailed",
    "HostSave",
    "Piece",
    "Save",
    "Spoilt",
    "check_filled",
    "fill_in",
    "stored_shapes",
]
