"""Hooks for runs on GPUs that are not there: each is a CPU backend that JAX makes by itself, with its own collectives.

Python imports this first where ``PYTHONPATH`` has this directory.
"""

import sys

if "swift" in sys.orig_argv:
    from swift.elastic import accelerators, device_probe

    device_probe._ASK = 'print(\'["gpu", 4, "emulated GPU"]\')'
    accelerators._BACKENDS["gpu"] = "cpu"
