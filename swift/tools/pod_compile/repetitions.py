"""Run counts of the parts of a compiled step, from its tick table, since its schedule is data.

A collective carries the names of the parts that contain it (``swift.pipeline.scopes``), which XLA preserves.

R: rows of the axis ``worker``, C: chunks.
"""

import math
from dataclasses import dataclass

import numpy as np

from swift.mesh.hlo_collectives import Collective
from swift.pipeline import scopes
from swift.pipeline.runtime.step_spec import StepSpec
from swift.schedules.lowering.tick_table import TickTable
from swift.schedules.ops import Kind

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
        look_up_rounds: rounds of a look-up in an embedding in shares, which are data.
    """

    spec: StepSpec
    table: TickTable | None
    num_iterations: int
    look_up_rounds: int = 1

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
        name, trips_C = self._name(one), self.trips_C(one)
        if name in _OPS:
            return self.ops(name) @ trips_C
        return int(trips_C.max()) * self._runs(name, one.path)

    def trips_C(self, one: Collective) -> np.ndarray:
        """Runs of a collective per run of its part, for each chunk, int64 ``[C]``."""
        name = self._name(one)
        inner = [loop for loop in one.loops if name == OTHER or name in loop.path]
        over_blocks = [loop for loop in inner if scopes.BLOCKS in loop.path][-1:]  # the others are inside a block
        if scopes.COPIES in one.path:  # the rounds are none: no row is assumed to be needed twice in an iteration
            is_in_round = any(scopes.COPIES in loop.path for loop in one.loops)
            return np.array([0 if is_in_round else 1] * len(self.spec.chunks.sizes))
        if scopes.EMBEDDING in one.path:  # of the first chunk alone, and in no block
            return np.array([self._look_up_trips(one)] + [0] * (len(self.spec.chunks.sizes) - 1))
        trips = math.prod(self._trips(loop.num_trips) for loop in inner if loop not in over_blocks)
        if scopes.HEAD in one.path:  # of the last chunk alone, and in no block
            return np.array([0] * (len(self.spec.chunks.sizes) - 1) + [trips])
        # Only blocks with experts have collectives; in a chunk of both kinds they are in a branch.
        blocks_C = np.array(self.spec.chunks.ops.counts(is_moe=True))
        # Where no chunk has more than one block there is no loop over them.
        is_of_block = over_blocks or (name in _OPS and max(self.spec.chunks.sizes) == 1)
        return trips * (blocks_C if is_of_block else np.ones_like(blocks_C))

    def _look_up_trips(self, one: Collective) -> int:
        """Runs of a collective per look-up: in each round, or once."""
        is_in_round = any(scopes.EMBEDDING in loop.path for loop in one.loops)
        return self.look_up_rounds if is_in_round else 1

    def ops(self, name: str) -> np.ndarray:
        """Runs of F, B or W of each chunk in a call, int64 ``[R, C]``."""
        assert self.table is not None
        is_op_TR, chunk_TR = self.table.opcode_TR == _OPS[name] + 1, self.table.chunk_TR
        return np.stack([(is_op_TR & (chunk_TR == c)).sum(axis=0) for c in range(len(self.spec.peers_C))], axis=1)

    @property
    def end_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows that hold the first chunk, and those that hold the last, bool ``[R]`` each."""
        return self._holds_RC[:, 0], self._holds_RC[:, -1]

    @property
    def num_updates(self) -> int:
        """Updates of chunks in an iteration, on all rows."""
        return int(self._holds_RC.sum())

    @property
    def _holds_RC(self) -> np.ndarray:
        return self.spec.chunks.holds_HC[self.spec.holding_R]

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
            return self._of_updates(path) * self.num_iterations
        return everywhere

    def _of_updates(self, path: tuple[str, ...]) -> np.ndarray:
        """Runs of a part of the updates in an iteration: of embedding and head, in a branch, only where they are used.

        Where workers hold several chunks, either an update is in the program once and runs for each of them, or once
        for each round of sums over peers; its sum is in the branch of a round in any case.
        """
        is_used_RC = self._holds_RC.copy()
        ends = [chunk for name, chunk in (("embedding", 0), ("head", -1)) if name in path and "branch_1_fun" in path]
        for chunk in ends:
            is_used_RC = is_used_RC & (np.arange(is_used_RC.shape[1]) == chunk % is_used_RC.shape[1])
        turns = [name for name in path if name.startswith(scopes.ROUND)]
        if not turns:
            return is_used_RC.sum(axis=1)
        is_in_round_C = self.spec.rounds.round_C == int(turns[-1].removeprefix(scopes.ROUND))
        runs_R = (is_used_RC & is_in_round_C).sum(axis=1)
        is_in_branch = bool(ends) or path.index(turns[-1]) > path.index(scopes.UPDATE)
        return runs_R if is_in_branch else np.ones_like(runs_R)


def _number(path: tuple[str, ...], first: int, prefix: str) -> int:
    """Parses the number in the first name with a prefix, from a position in the path on: 2 in ``branch_2_fun``."""
    name = next(name for name in path[first:] if name.startswith(prefix))
    return int(name.removeprefix(prefix).split("_")[0])
