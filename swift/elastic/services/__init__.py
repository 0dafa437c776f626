"""Processes beside the workers.

One writes and reads checkpoints, one compiles step functions ahead of failures. A state whose ranks change is resharded
by the first.
"""

from swift.elastic.services.checkpoint_process import run_checkpoint_service
from swift.elastic.services.compile_service import run_compile_service

__all__ = [
    "run_checkpoint_service",
    "run_compile_service",
]
