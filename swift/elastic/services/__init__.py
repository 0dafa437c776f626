"""Service processes beside the workers.

The checkpoint service writes and reads checkpoints, and reshards states when the ranks of a run change; the compile
service compiles programs ahead of failures.
"""

from swift.elastic.services.checkpoint_process import run_checkpoint_service
from swift.elastic.services.compile_service import run_compile_service

__all__ = ["run_checkpoint_service", "run_compile_service"]
