"""Compiling a run's step for a pod that is not there: does it fit, what does it exchange, how long would it take."""

from swift.aot.compiling import FITS, REFUSED, TOO_LARGE, check_pod, compile_one, configurations
from swift.aot.devices import settle_process
from swift.aot.document import document, text_lines
from swift.aot.pods import CHIPS, Chip, Pod

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
    "settle_process",
    "text_lines",
]
