"""Compilation of a run's step for a pod that is not present: memory, exchanged bytes and predicted time.

``compiling`` compiles one configuration and collects its facts; ``pods`` and ``devices`` describe the hardware;
``exchanged_bytes``, ``op_work``, ``interconnect`` and ``roofline`` turn programs into bytes and times.
"""

from swift.mesh import CHIPS, Chip
from swift.tools.pod_compile.compiling import FITS, REFUSED, TOO_LARGE, check_pod, compile_one, configurations
from swift.tools.pod_compile.devices import described_devices, settle_process
from swift.tools.pod_compile.json_format import document, name_of, text_lines
from swift.tools.pod_compile.pods import Pod

__all__ = [
    "CHIPS",
    "FITS",
    "REFUSED",
    "TOO_LARGE",
    "Chip",
    "Pod",
    "check_pod",
    "compile_one",
    "configurations",
    "described_devices",
    "document",
    "name_of",
    "settle_process",
    "text_lines",
]
