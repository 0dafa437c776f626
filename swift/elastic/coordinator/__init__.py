"""The supervisor of a run of several processes.

``supervisor`` runs it to its end. ``membership_driver`` reports what happens to the membership and carries out its
decisions. The clients send requests to the checkpoint service and the compile service, which ``service_monitor``
watches. ``run_spec``, ``memory_demand`` and ``fault_injection`` have what is settled before a run starts.
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
