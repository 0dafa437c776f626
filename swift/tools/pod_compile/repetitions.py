"""Run counts of the parts of a compiled step, from its tick table, since its schedule is data.

A collective carries the names of the parts that contain it (``swift.pipeline.scopes``), which XLA preserves.

R: rows of the axis ``worker``.
"""

import math
from dataclasses import dataclass

import numpy as np

from swift.mesh import Collective
from swift.pipeline import StepSpec, scopes
from swift.schedules import Kind, TickTable

_OPS = {scopes.FORWARD: Kind.F, scopes.BACKWARD_INPUT: Kind.B, scopes.BACKWARD_WEIGHT: Kind.W}
_MESSAGES = (scopes.ACTIVATIONS, scopes.GRADIENTS)
_NAMES = (*_OPS, *_MESSAGES, scopes.MICROBATCH, scopes.UPDATE)
OTHER = "other"
"""Part of collectives without a name: metrics, and collectives that XLA introduced."""


@dataclass(frozen=True)
class Runs:
    """Run counts of the parts of a program on every row of its mesh.

    Attributes:
        spec: specification of the step.
        table: tick table that the program interprets; None for a single worker.
        num_iterations: iterations of a call, K.
    """

    spec: StepSpec
    table: TickTable | None
    num_iterations: int

    def part(self, one: Collective) -> str:
        """Part of a step that contains a collective: one of ``swift.pipeline.scopes``, or ``OTHER``.

        Within an update, ``collect/GROUP``, ``peers/GROUP`` or ``materialize/GROUP`` where it applies.
        """
        path = one.path
        for name in (scopes.COLLECT, scopes.PEERS, scopes.MATERIALIZE):
            if scopes.UPDATE in path and name in path:
                return f"{name}/{path[path.index(name) + 1]}"
        return self._name(one)

    def of(self, one: Collective) -> np.ndarray:
        """Runs of a collective in a call, int64 ``[R]``."""
        name = self._name(one)
        return self._trips_R(one) * self._runs(name, one.path)

    def trips(self, one: Collective) -> int:
        """Runs of a collective per run of its part, in the row that has most."""
        return int(self._trips_R(one).max())

    def _trips_R(self, one: Collective) -> np.ndarray:
        name = self._name(one)
        inner = [loop for loop in one.loops if name == OTHER or name in loop.path]
        over_blocks = [loop for loop in inner if scopes.BLOCKS in loop.path][-1:]  # the others are inside a block
        trips = math.prod(self._trips(loop.num_trips) for loop in inner if loop not in over_blocks)
        # Only blocks with experts have collectives; in a stage of both kinds they are in a branch.
        blocks_R = np.array(self.spec.cut.counts(is_moe=True))[self.spec.live.stage_R]
        return trips * (blocks_R if over_blocks else np.ones_like(blocks_R))

    def ops(self, name: str) -> np.ndarray:
        """Runs of F, B or W in a call, int64 ``[R]``."""
        assert self.table is not None
        return (self.table.opcode_TR == _OPS[name] + 1).sum(axis=0)

    @property
    def end_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows that serve the first stage, and those that serve the last, bool ``[R]`` each."""
        stage_R = self.spec.live.stage_R
        return stage_R == 0, stage_R == self.spec.num_stages - 1

    def _name(self, one: Collective) -> str:
        return next((name for name in _NAMES if name in one.path), OTHER)

    def _trips(self, num_trips: int | None) -> int:
        """Trip count of a loop; the only ones that the compiler does not know are those of loops over ticks."""
        if num_trips is not None:
            return num_trips
        return 1 if self.table is None else int(self.table.phase_bounds[-1])

    def _runs(self, name: str, path: tuple[str, ...]) -> np.ndarray:
        everywhere = np.ones(self.spec.live.num_live, np.int64)
        if name in _OPS:
            return self.ops(name)
        if name in _MESSAGES:
            assert self.table is not None
            moves = self.table.activations if name == scopes.ACTIVATIONS else self.table.gradients
            turn, branch = (_number(path, path.index(name), prefix) for prefix in (scopes.ROUND, "branch_"))
            return everywhere * int((moves.permutation_TQ[:, turn] == branch - 1).sum())
        if name == scopes.MICROBATCH:
            return everywhere * self.spec.num_microbatches
        if name == scopes.UPDATE:
            return self._of_ends(path) * self.num_iterations
        return everywhere

    def _of_ends(self, path: tuple[str, ...]) -> np.ndarray:
        """Rows in which the update of a parameter group runs: only those that use it, for one in a branch."""
        is_first, is_last = self.end_rows
        if "branch_1_fun" in path and "embedding" in path:
            return is_first.astype(np.int64)
        if "branch_1_fun" in path and "head" in path:
            return is_last.astype(np.int64)
        return np.ones(self.spec.live.num_live, np.int64)


def _number(path: tuple[str, ...], first: int, prefix: str) -> int:
    """Parses the number in the first name with a prefix, from a position in the path on: 2 in ``branch_2_fun``."""
    name = next(name for name in path[first:] if name.startswith(prefix))
    return int(name.removeprefix(prefix).split("_")[0])
