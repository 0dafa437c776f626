"""Compiling a run's step for a pod that is not there: does it fit, what does it exchange, how long would it take."""

from swift.tools.pod_compile.compiling import FITS, REFUSED, TOO_LARGE, check_pod, compile_one, configurations
from swift.tools.pod_compile.devices import settle_process
from swift.tools.pod_compile.json_format import document, name_of, text_lines
from swift.tools.pod_compile.pods import CHIPS, Chip, Pod

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
    "document",
    "name_of",
    "settle_process",
    "text_lines",
]
