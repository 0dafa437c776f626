"""The supervisor of a run of processes.

The supervisor runs it to its end. The membership driver reports what happens to the membership and carries out its
decisions; clients keep the checkpoint service and the compile service busy; the rest is what a run needs before it
starts.
"""

from swift.elastic.coordinator.checkpoint_client import CHECKPOINT_SERVICE, CheckpointClient
from swift.elastic.coordinator.compile_client import COMPILE_SERVICE, CompileClient
from swift.elastic.coordinator.fault_injection import FaultInjection, parse_chaos
from swift.elastic.coordinator.memory_demand import MemoryDemand, StorageLocation, choose_storage
from swift.elastic.coordinator.run_spec import RunContext, RunSpec
from swift.elastic.coordinator.supervisor import Supervisor

__all__ = [
    "CHECKPOINT_SERVICE",
    "COMPILE_SERVICE",
    "CheckpointClient",
    "CompileClient",
    "FaultInjection",
    "MemoryDemand",
    "RunContext",
    "RunSpec",
    "StorageLocation",
    "Supervisor",
    "choose_storage",
    "parse_chaos",
]
