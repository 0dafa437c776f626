"""The coordinator of a run of processes.

The supervisor, which starts and watches them and carries out what the membership decides, its clients of the checkpoint
and compile services, and what a run needs before it starts.
"""

from swift.elastic.coordinator.checkpoint_client import KEEPER, CheckpointClient
from swift.elastic.coordinator.compile_client import PREPARER, CompileClient
from swift.elastic.coordinator.fault_injection import FaultInjection, parse_chaos
from swift.elastic.coordinator.memory_demand import MemoryDemand, StorageLocation, choose_place
from swift.elastic.coordinator.run_spec import RunSpec
from swift.elastic.coordinator.supervisor import Supervisor

__all__ = [
    "KEEPER",
    "PREPARER",
    "CheckpointClient",
    "CompileClient",
    "FaultInjection",
    "MemoryDemand",
    "RunSpec",
    "StorageLocation",
    "Supervisor",
    "choose_place",
    "parse_chaos",
]
