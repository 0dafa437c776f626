"""The work of a stage on one rank: a block as a function, the loop over blocks, F, B and W, and the ops on buffers."""

from swift.pipeline.runtime.stage.block import Extras, block_function, block_shapes
from swift.pipeline.runtime.stage.forward_stage import ForwardStage
from swift.pipeline.runtime.stage.hot_rows import HotRows
from swift.pipeline.runtime.stage.stage import Stage, Stash
from swift.pipeline.runtime.stage.stage_ops import EvaluationOps, StageOps

__all__ = [
    "EvaluationOps",
    "Extras",
    "ForwardStage",
    "HotRows",
    "Stage",
    "StageOps",
    "Stash",
    "block_function",
    "block_shapes",
]
