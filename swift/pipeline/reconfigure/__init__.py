"""Reconfiguration from one failure set to the next.

The plan of a failure set, its compiled steps, the cache of executables, and moving or resharding a state to other
workers.
"""

from swift.pipeline.reconfigure.block_sharing import (
    Share,
    compiled_share,
    on_mesh,
    saving_rows,
    share_blocks,
    share_key,
)
from swift.pipeline.reconfigure.block_transfer import LocalPiece, local_pieces, move_on_host, put_moved
from swift.pipeline.reconfigure.compiled_steps import StepKind, Steps, WindowResult, program_key
from swift.pipeline.reconfigure.cuts import Cuts, UnknownCut
from swift.pipeline.reconfigure.engine import Engine, Prepare, Reconfiguration
from swift.pipeline.reconfigure.executable_cache import ExecutableCache, compiled_init, compiled_slots, slots_key
from swift.pipeline.reconfigure.failure_config import (
    Configuration,
    Configurator,
    Plan,
    PlanSettings,
    batch_of_rows,
    neighbours,
    survives,
)
from swift.pipeline.reconfigure.memory_account import MemoryAccount
from swift.pipeline.reconfigure.recut import BetterCut, Recut, blocks_spec
from swift.pipeline.reconfigure.reshard import StateShape, reshape_state, reshaped
from swift.pipeline.reconfigure.state_move import StateMove, move_state

__all__ = [
    "BetterCut",
    "Configuration",
    "Configurator",
    "Cuts",
    "Engine",
    "ExecutableCache",
    "LocalPiece",
    "MemoryAccount",
    "Plan",
    "PlanSettings",
    "Prepare",
    "Reconfiguration",
    "Recut",
    "Share",
    "StateMove",
    "StateShape",
    "StepKind",
    "Steps",
    "UnknownCut",
    "WindowResult",
    "batch_of_rows",
    "blocks_spec",
    "compiled_init",
    "compiled_share",
    "compiled_slots",
    "local_pieces",
    "move_on_host",
    "move_state",
    "neighbours",
    "on_mesh",
    "program_key",
    "put_moved",
    "reshape_state",
    "reshaped",
    "saving_rows",
    "share_blocks",
    "share_key",
    "slots_key",
    "survives",
]
