"""The planning problem: ops, chunks, micro-batches, live workers, costs and memory.

A chunk is a run of consecutive blocks of the model; an op works on one chunk. If pipelines have different cuts, chunks
are the common refinement of these cuts, so that every worker holds whole chunks. In a V each stage holds two runs of
blocks, hence two chunks.

Shape suffixes: D pipelines, M micro-batches (the maximum over pipelines), P chunks, 4 the kinds F, B, W, U.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from swift.errors import SettingError, check_count, check_number
from swift.topology import Topology, Worker

NO_MICROBATCH = -1


class Kind(IntEnum):
    """Kind of an op: forward, input gradient, weight gradient, update. Its ``TickTable`` opcode is the value + 1."""

    F = 0
    B = 1
    W = 2
    U = 3


class Op(NamedTuple):
    """Identity of an op within a window.

    Attributes:
        kind: F, B or W of one micro-batch, or U.
        iteration: index in the window, from 0.
        pipeline: the micro-batch's own pipeline, even if a peer runs the op; for U, the updating worker's pipeline.
        microbatch: index within the pipeline; ``NO_MICROBATCH`` for U.
        chunk: chunk of the model. In a plain problem it is also the stage that runs the op.
    """

    kind: Kind
    iteration: int
    pipeline: int
    microbatch: int
    chunk: int


class TimedOp(NamedTuple):
    """An op with the worker that runs it, its start and its end."""

    op: Op
    worker: Worker
    start: float
    end: float


@dataclass(frozen=True)
class Chunk:
    """A run of consecutive blocks, and its costs relative to ``Costs``.

    Attributes:
        num_blocks: number of blocks; 0 if unspecified.
        f, b, w, u: factors on the times of F, B, W and U. The first chunk's factors include the embedding, the last
            chunk's factors include the head.
        f_stash, w_stash: factors on the sizes of the stashes.
    """

    num_blocks: int = 0
    f: float = 1.0
    b: float = 1.0
    w: float = 1.0
    u: float = 1.0
    f_stash: float = 1.0
    w_stash: float = 1.0

    def __post_init__(self) -> None:
        check_count("Chunk.num_blocks", self.num_blocks, least=0)
        for name in ("f", "b", "w", "f_stash"):
            check_number(f"Chunk.{name}", getattr(self, name), above=0)
        for name in ("u", "w_stash"):
            check_number(f"Chunk.{name}", getattr(self, name), least=0)
        # Stored as floats: 1 and 1.0 are equal, but a plan's key is a hash of their text.
        for name in ("f", "b", "w", "u", "f_stash", "w_stash"):
            object.__setattr__(self, name, float(getattr(self, name)))

    @classmethod
    def of_size(cls, size: float, num_blocks: int = 0, *, more_f: float = 0.0, more_b: float = 0.0) -> "Chunk":
        """Creates a chunk whose ops cost ``size`` times the values in ``Costs``.

        Args:
            size: factor on all times and stashes.
            num_blocks: number of blocks; 0 if unspecified.
            more_f: added to the factor of F, for the head, whose F also computes the gradient.
            more_b: added to the factor of B, for the embedding.
        """
        return cls(num_blocks, size + more_f, size + more_b, *(size,) * 4)


def joined(blocks: Sequence[Chunk]) -> Chunk:
    """Merges consecutive chunks into one whose costs are the sums of theirs."""
    names = ("f", "b", "w", "u", "f_stash", "w_stash")
    return Chunk(
        sum(block.num_blocks for block in blocks), *(sum(getattr(block, name) for block in blocks) for name in names)
    )


def cut_by_costs(costs: Sequence[float], num_stages: int, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Cuts blocks so that the slowest stage is as fast as possible; ties go to the most even cut.

    Args:
        costs: time of each block.
        num_stages: number of stages to cut into, at most the number of blocks.
        first: additional time of the first stage, for the embedding.
        last: additional time of the last stage, for the head.

    Returns:
        The number of blocks in each stage.

    >>> cut_by_costs([1.0] * 7, 4), cut_by_costs([1.0] * 8, 4, last=1.0)
    ((2, 2, 2, 1), (3, 2, 2, 1))
    """
    sums = [0.0, *accumulate(costs)]
    num_blocks = len(costs)

    def time(stage: int, begin: int, end: int) -> float:
        return sums[end] - sums[begin] + first * (stage == 0) + last * (stage == num_stages - 1)

    # Dynamic program. best[e]: (longest stage, sum of squares, sizes) of the best way to put the first e blocks into
    # the stages so far. Rounding turns sums that differ only by float error into ties, which the most even cut wins.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(num_stages):
        next_best: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in range(stage + 1, num_blocks - (num_stages - 1 - stage) + 1):
            ways = []
            for begin, (longest, squares, sizes) in best.items():
                if begin < end:
                    stage_time = time(stage, begin, end)
                    ways.append((max(longest, stage_time), squares + stage_time**2, (*sizes, end - begin)))
            next_best[end] = min(ways, key=lambda way: (round(way[0], 9), round(way[1], 9), [-size for size in way[2]]))
        best = next_best
    return best[num_blocks][2]


def common_chunks(cuts: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Refines several pipelines' cuts into chunks that no stage boundary divides.

    Args:
        cuts: number of blocks in each stage, for each pipeline; all must have the same sum.

    Returns:
        The number of blocks in each chunk, and the value for ``Problem.stage_of_chunk``.

    >>> common_chunks([(2, 2), (1, 3)])
    ((1, 1, 2), ((0, 0, 1), (0, 1, 1)))
    """
    ends = [list(accumulate(cut)) for cut in cuts]
    assert len({end[-1] for end in ends}) == 1, f"cuts of different models: {cuts}"
    bounds = sorted({0, *(bound for end in ends for bound in end)})
    # An empty stage ends where the stage before it ends, so ``last > first`` skips it.
    stages = [tuple(next(p for p, last in enumerate(end) if last > first) for first in bounds[:-1]) for end in ends]
    return tuple(after - before for before, after in pairwise(bounds)), tuple(stages)


def _checked_chunks(chunks: Any, stage_of_chunk: Any, topology: Topology) -> tuple[Any, Any]:
    """Validates ``Problem.chunks`` and ``Problem.stage_of_chunk``, and replaces default values by ().

    Raises:
        SettingError: a stage is outside the topology, or the chunks do not match the stages' chunks.
    """
    D, P = topology.num_pipelines, topology.num_stages
    chunks, holders, setting = tuple(chunks), tuple(map(tuple, stage_of_chunk)), "Problem.stage_of_chunk"
    if holders and len(holders) != D:
        raise SettingError(setting, holders, f"must be one for each of the {D} pipelines")
    if len({len(stages) for stages in holders}) > 1 or () in holders:
        raise SettingError(setting, holders, "must name a stage for each chunk, equally many for each pipeline")
    if any(not isinstance(p, int) or isinstance(p, bool) or not 0 <= p < P for stages in holders for p in stages):
        raise SettingError(setting, holders, f"must be stages: whole numbers from 0 to {P - 1}")
    number = len(holders[0]) if holders else P
    if chunks and len(chunks) != number:
        raise SettingError("Problem.chunks", len(chunks), f"must be {number}, as many as the stages hold")
    chunks = () if set(chunks) == {Chunk()} else chunks
    return chunks, () if set(holders) == {tuple(range(P))} else holders


def _checked_microbatches(value: Any, num_pipelines: int) -> int | tuple[int, ...]:
    """Validates ``Problem.num_microbatches``, and replaces a tuple of equal numbers by that number."""
    setting = "Problem.num_microbatches"
    if not isinstance(value, tuple | list):
        check_count(setting, value, least=1)
        return value
    if len(value) != num_pipelines:
        raise SettingError(setting, tuple(value), f"must be one number for each of the {num_pipelines} pipelines")
    if not all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in value):
        raise SettingError(setting, tuple(value), "must be whole numbers of at least 0")
    if not any(value):
        raise SettingError(setting, tuple(value), "must be at least one micro-batch")
    return value[0] if len(set(value)) == 1 else tuple(value)


@dataclass(frozen=True)
class Costs:
    """Cost model for one micro-batch, in arbitrary units of time and memory.

    Attributes:
        t_f: time of F, the forward pass through one stage.
        t_b: time of B, the gradient with respect to the stage's input.
        t_w: time of W, the gradient with respect to the stage's parameters.
        t_u: time of U, which reduces the gradients over peers and updates the parameters, once per iteration.
        t_comm: latency from the end of an op to the arrival of its output at the neighboring stage.
        f_stash: memory that F allocates and B frees.
        w_stash: memory that B allocates for W, and W frees.
        inbox: memory of one message, held from the end of the sending op to the end of the reading op.
    """

    t_f: float = 1.0
    t_b: float = 1.0
    t_w: float = 1.0
    t_u: float = 0.0
    t_comm: float = 0.0
    f_stash: float = 1.0
    w_stash: float = 1.0
    inbox: float = 0.0

    def __post_init__(self) -> None:
        for name in ("t_f", "t_b", "t_w", "f_stash"):
            check_number(f"Costs.{name}", getattr(self, name), above=0)
        for name in ("t_u", "t_comm", "w_stash", "inbox"):
            check_number(f"Costs.{name}", getattr(self, name), least=0)
        for item in fields(self):
            object.__setattr__(self, item.name, float(getattr(self, item.name)))

    @property
    def op_times(self) -> tuple[float, float, float, float]:
        """Times of F, B, W and U, indexed by ``Kind``."""
        return self.t_f, self.t_b, self.t_w, self.t_u

    @property
    def microbatch_peak(self) -> float:
        """Peak memory of one micro-batch on a worker: while B runs, the larger stash plus the message that B reads."""
        return max(self.f_stash, self.w_stash) + self.inbox


COST_NAMES = {
    "tF": "t_f",
    "tB": "t_b",
    "tW": "t_w",
    "tU": "t_u",
    "tComm": "t_comm",
    "F-stash": "f_stash",
    "W-stash": "w_stash",
    "inbox": "inbox",
}
"""Names of costs on the command line and in documents, mapped to fields of ``Costs``."""


@dataclass(frozen=True)
class Problem:
    """Cluster and work to schedule: the input of planners, and the reference for ``verify``.

    By default every stage is one chunk (a plain problem), and all stages cost the same.

    Attributes:
        topology: shape of the cluster. The number of expert ranks does not affect planning, since a worker's ranks run
            each op together.
        num_microbatches: micro-batches per pipeline and iteration; a tuple if pipelines differ.
        failed: failed workers.
        costs: times of ops and messages, and sizes of stashes and messages.
        memory_limit: memory limit per worker, in the unit of the costs' stashes; None for no limit.
        num_iterations: length of the window that is planned as one schedule, in iterations.
        decoupled: False runs each W immediately after its B, as a plain backward pass does; the B of the previous stage
            waits for both (ablation).
        staggered: False delays every U until all stages have finished their last W (ablation).
        chunks: chunks of the model, in order.
        stage_of_chunk: for each pipeline, the stage that holds each chunk; empty if chunk k is on stage k.

    Raises:
        SettingError: a failed worker is outside the topology, no survivor holds some chunk, the chunks do not match
            the stages, or the memory limit is too small for a single micro-batch.
    """

    topology: Topology
    num_microbatches: int | tuple[int, ...]
    failed: frozenset[Worker] = frozenset()
    costs: Costs = field(default_factory=Costs)
    memory_limit: float | None = None
    num_iterations: int = 3
    decoupled: bool = True
    staggered: bool = True
    chunks: tuple[Chunk, ...] = ()
    stage_of_chunk: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        chunks, holders = _checked_chunks(self.chunks, self.stage_of_chunk, self.topology)
        number = _checked_microbatches(self.num_microbatches, self.num_pipelines)
        # The fields are stored in their simplest form, so that equal problems compare equal.
        for name, value in (("num_microbatches", number), ("chunks", chunks), ("stage_of_chunk", holders)):
            object.__setattr__(self, name, value)
        check_count("Problem.num_iterations", self.num_iterations, least=1)
        self._check_survivors()
        if self.memory_limit is not None:
            self._check_memory(self.memory_limit, self.microbatch_peak)

    @property
    def num_pipelines(self) -> int:
        """Number of pipelines, D."""
        return self.topology.num_pipelines

    @property
    def num_stages(self) -> int:
        """Number of stages, P."""
        return self.topology.num_stages

    @property
    def num_chunks(self) -> int:
        """Number of chunks; a plain problem has one per stage."""
        return len(self.stage_of_chunk[0]) if self.stage_of_chunk else self.num_stages

    @property
    def microbatches(self) -> tuple[int, ...]:
        """Number of micro-batches in each pipeline."""
        number = self.num_microbatches
        return (number,) * self.num_pipelines if isinstance(number, int) else number

    @property
    def most_microbatches(self) -> int:
        """Maximum of ``microbatches``, M. Arrays with this dim are padded for pipelines with fewer micro-batches."""
        return max(self.microbatches)

    @property
    def total_microbatches(self) -> int:
        """Number of micro-batches in all pipelines together."""
        return sum(self.microbatches)

    @property
    def num_ops(self) -> int:
        """Number of F, B and W ops in one iteration."""
        return 3 * self.total_microbatches * self.num_chunks

    @property
    def is_uniform(self) -> bool:
        """Whether all pipelines have the same cut and the same number of micro-batches."""
        return isinstance(self.num_microbatches, int) and len(set(self.stage_of_chunk)) <= 1

    @property
    def is_plain(self) -> bool:
        """Whether stage p holds exactly chunk p, in all pipelines."""
        return not self.stage_of_chunk

    @cached_property
    def time_4P(self) -> np.ndarray:
        """Op times by kind and chunk, float64[4, P]."""
        factors = np.array([(chunk.f, chunk.b, chunk.w, chunk.u) for chunk in self._chunks]).T
        return np.array(self.costs.op_times)[:, None] * factors

    @cached_property
    def stash_2P(self) -> np.ndarray:
        """Sizes of F-stash and W-stash by chunk, float64[2, P]."""
        factors = np.array([(chunk.f_stash, chunk.w_stash) for chunk in self._chunks]).T
        return np.array([self.costs.f_stash, self.costs.w_stash])[:, None] * factors

    @cached_property
    def growth_W(self) -> list[float]:
        """Additional memory that B needs on each worker, indexed as in ``worker_DP``; at least 0.

        B needs additional memory only on chunks whose W-stash is larger than their F-stash.
        """
        growth = np.zeros(self.num_pipelines * self.num_stages)
        more_P = np.tile(self.stash_2P[1] - self.stash_2P[0], self.num_pipelines)
        np.maximum.at(growth, self.worker_DP.ravel(), more_P)
        return growth.tolist()

    @cached_property
    def stage_DP(self) -> np.ndarray:
        """Stage that holds each chunk in each pipeline, int64[D, P]."""
        if self.stage_of_chunk:
            return np.array(self.stage_of_chunk)
        return np.tile(np.arange(self.num_stages), (self.num_pipelines, 1))

    @cached_property
    def worker_DP(self) -> np.ndarray:
        """Index of each chunk's worker (d, p), live or not, as d * ``num_stages`` + p, int64[D, P]."""
        return np.arange(self.num_pipelines)[:, None] * self.num_stages + self.stage_DP

    def held_by(self, worker: Worker) -> tuple[int, ...]:
        """Returns the chunks that a worker holds, in ascending order."""
        d, p = worker
        return tuple(np.flatnonzero(self.stage_DP[d] == p).tolist())

    def runs_of(self, worker: Worker) -> tuple[tuple[int, int], ...]:
        """Returns the runs of blocks that a worker holds, as (first block, end); () if chunk sizes are unspecified."""
        if not any(chunk.num_blocks for chunk in self.chunks):
            return ()
        ends = list(accumulate((chunk.num_blocks for chunk in self.chunks), initial=0))
        runs: list[tuple[int, int]] = []
        for k in self.held_by(worker):
            first = runs.pop()[0] if runs and runs[-1][1] == ends[k] else ends[k]
            runs.append((first, ends[k + 1]))
        return tuple(runs)

    @property
    def microbatch_peak(self) -> float:
        """Peak memory of a single micro-batch with no other in flight, on the worker that needs the most."""
        if not self.chunks and self.is_plain:
            return self.costs.microbatch_peak
        stashes = np.tile(self.stash_2P.max(axis=0), self.num_pipelines)
        return float(np.bincount(self.worker_DP.ravel(), stashes).max()) + self.costs.inbox

    def limited(self, num_stashes: float | None) -> "Problem":
        """Sets the memory limit per worker, in F-stashes; None for no limit.

        Users specify limits in this unit.

        Raises:
            SettingError: the limit, in F-stashes, is too small for a single micro-batch.
        """
        if num_stashes is None:
            return replace(self, memory_limit=None)
        unit = self.costs.f_stash
        # A limit of exactly one peak may round to slightly less when it is converted to F-stashes and back.
        self._check_memory(num_stashes, self.microbatch_peak / unit * (1 - 1e-9))
        return replace(self, memory_limit=max(num_stashes * unit, self.microbatch_peak))

    def single_pipeline(self) -> "Problem":
        """Returns the problem for the first pipeline alone, without failures."""
        topology, number = Topology(num_stages=self.num_stages), self.most_microbatches
        first = self.stage_of_chunk[:1]
        return replace(self, topology=topology, failed=frozenset(), num_microbatches=number, stage_of_chunk=first)

    def if_drained(self) -> "Problem":
        """Adds a barrier before the updates if the window is one iteration, where only the end of all stages counts.

        A schedule of the resulting problem is valid for the original problem too. If ``has_equal_updates`` is False, it
        may not be the shortest one, since Us could run earlier.
        """
        return replace(self, staggered=self.staggered and self.num_iterations > 1)

    @property
    def begins_together(self) -> bool:
        """Whether all workers begin an iteration together: with a barrier, or in a window of one iteration."""
        return not self.staggered or self.num_iterations == 1

    @property
    def has_equal_updates(self) -> bool:
        """Whether all workers spend the same time on their Us, so that a barrier does not delay the last end."""
        u_P = self.time_4P[Kind.U]
        return not u_P.any() or (self.is_plain and not np.ptp(u_P))

    def most_loaded(self, num_survivors: int) -> int:
        """Returns n_p, the least number of micro-batches that a stage's busiest survivor has to run."""
        return math.ceil(self.total_microbatches / num_survivors)

    @cached_property
    def live_workers(self) -> tuple[Worker, ...]:
        """Live workers, in mesh order."""
        return self.topology.without(self.failed)

    @cached_property
    def survivors(self) -> tuple[tuple[int, ...], ...]:
        """Pipelines in which the worker that holds a chunk is live, in ascending order, for each chunk."""
        return tuple(
            tuple(d for d, p in enumerate(stage_D) if (d, p) not in self.failed) for stage_D in self.stage_DP.T.tolist()
        )

    @property
    def _chunks(self) -> tuple[Chunk, ...]:
        return self.chunks or (Chunk(),) * self.num_chunks

    def _check_survivors(self) -> None:
        if self.is_plain:
            self.topology.live_workers(self.failed)
            return
        self.topology.without(self.failed)
        for k, peers in enumerate(self.survivors):
            if not peers:
                allowed = f"chunk {k} has no live worker: restore from a checkpoint"
                raise SettingError("failed workers", sorted(self.failed), allowed)

    def _check_memory(self, limit: float, least: float) -> None:
        check_number("Problem.memory_limit", limit, above=0)
        if limit < least:
            takes = "which a single micro-batch takes with its message and while B runs"
            allowed = f"must be at least {math.ceil(1000 * least) / 1000:g}, {takes}"
            raise SettingError("Problem.memory_limit", limit, allowed)
