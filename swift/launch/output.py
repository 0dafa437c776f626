"""The standard output of a process that speaks to another one there."""

import os
import sys
from typing import TextIO


def take_output() -> TextIO:
    """Takes over standard output: whatever else is printed from now on goes to standard error."""
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return output
