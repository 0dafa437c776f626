"""The planning problem: ops, chunks, micro-batches, live workers, costs and memory.

A chunk is a run of consecutive blocks of the model, the unit of an op's work. Pipelines that are cut differently have
the common refinement of their cuts as chunks, so that every worker holds whole chunks; a stage with two runs of blocks
holds two.

D: pipelines, M: micro-batches of the pipeline with the most, P: chunks, 4: the kinds F, B, W, U.
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
    """Kind of an op: forward, input gradient, weight gradient, update; its value + 1 is a ``TickTable`` opcode."""

    F = 0
    B = 1
    W = 2
    U = 3


class Op(NamedTuple):
    """One op.

    Attributes:
        kind: F, B or W of one micro-batch, or U.
        iteration: index of the iteration, from 0.
        pipeline: pipeline of the micro-batch, wherever it runs; for U, of the worker that updates.
        microbatch: index within the pipeline; ``NO_MICROBATCH`` for U.
        chunk: chunk of the model; without other chunks, the stage of the worker that runs it.
    """

    kind: Kind
    iteration: int
    pipeline: int
    microbatch: int
    chunk: int


class TimedOp(NamedTuple):
    """An op with its worker, start and end."""

    op: Op
    worker: Worker
    start: float
    end: float


@dataclass(frozen=True)
class Chunk:
    """Consecutive blocks of the model, and what their ops cost: factors of the fields of ``Costs``.

    Attributes:
        num_blocks: number of blocks; 0 where it is not said.
        f, b, w, u: factors of the times of F, B, W and U. Those of the first chunk count the embedding, and those of
            the last one the head.
        f_stash, w_stash: factors of the stashes.
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
        for name in ("f", "b", "w", "u", "f_stash", "w_stash"):
            object.__setattr__(self, name, float(getattr(self, name)))

    @classmethod
    def of_size(cls, size: float, num_blocks: int = 0, *, more_f: float = 0.0, more_b: float = 0.0) -> "Chunk":
        """Makes a chunk whose ops cost ``size`` times what ``Costs`` says.

        Args:
            size: factor of all times and stashes.
            num_blocks: number of blocks; 0 where it is not said.
            more_f: addition to the factor of F: the head computes its gradient at once.
            more_b: addition to the factor of B, for the embedding.
        """
        return cls(num_blocks, size + more_f, size + more_b, *(size,) * 4)


def joined(blocks: Sequence[Chunk]) -> Chunk:
    """Joins consecutive chunks into one, whose ops cost what those of all of them do."""
    names = ("f", "b", "w", "u", "f_stash", "w_stash")
    return Chunk(
        sum(block.num_blocks for block in blocks), *(sum(getattr(block, name) for block in blocks) for name in names)
    )


def cut_by_costs(costs: Sequence[float], num_stages: int, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Cuts blocks so that the longest stage is as short as it can be; among such cuts, the most even one.

    Args:
        costs: time of each block.
        num_stages: P, at most as many as there are blocks.
        first: additional time of the first stage, for the embedding.
        last: additional time of the last stage, for the head.

    Returns:
        The number of blocks of each stage.

    >>> cut_by_costs([1.0] * 7, 4), cut_by_costs([1.0] * 8, 4, last=1.0)
    ((2, 2, 2, 1), (3, 2, 2, 1))
    """
    sums = [0.0, *accumulate(costs)]
    num_blocks = len(costs)

    def time(stage: int, begin: int, end: int) -> float:
        return sums[end] - sums[begin] + first * (stage == 0) + last * (stage == num_stages - 1)

    # best[e]: (longest stage, sum of squares, sizes) of the stages so far, which hold the first e blocks.
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
    """Refines the cuts of several pipelines into chunks that every pipeline's stages hold as a whole.

    Args:
        cuts: number of blocks of each stage, for each pipeline; all have equal sums.

    Returns:
        (number of blocks of each chunk, ``Problem.stage_of_chunk``).

    >>> common_chunks([(2, 2), (1, 3)])
    ((1, 1, 2), ((0, 0, 1), (0, 1, 1)))
    """
    ends = [list(accumulate(cut)) for cut in cuts]
    assert len({end[-1] for end in ends}) == 1, f"cuts of different models: {cuts}"
    bounds = sorted({0, *(bound for end in ends for bound in end)})
    # A stage without blocks ends where the one before it ends, and holds no chunk.
    stages = [tuple(next(p for p, last in enumerate(end) if last > first) for first in bounds[:-1]) for end in ends]
    return tuple(after - before for before, after in pairwise(bounds)), tuple(stages)


def _checked_chunks(chunks: Any, stage_of_chunk: Any, topology: Topology) -> tuple[Any, Any]:
    """Checks these fields of ``Problem``; returns them in their simplest form.

    Raises:
        SettingError: a stage is not one of the topology's, or the chunks are not those that the stages hold.
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
    """Checks ``Problem.num_microbatches``; returns a whole number where all pipelines have equally many."""
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
    """Costs of the ops of one micro-batch, in any one unit of time and any one unit of memory.

    Attributes:
        t_f: time of F, the forward pass of one micro-batch through one stage.
        t_b: time of B, the gradient with respect to the stage's input.
        t_w: time of W, the gradient with respect to the stage's parameters.
        t_u: time of U, the reduction over peers and the update; once per iteration.
        t_comm: time from the end of an op to the arrival of its output at the neighbouring stage.
        f_stash: memory that F allocates and B frees.
        w_stash: memory that B leaves for W, and W frees.
        inbox: memory of one message, held from the end of the op that sends it to the end of the op that reads it.
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
        """Times of F, B, W and U: indexed by ``Kind``."""
        return self.t_f, self.t_b, self.t_w, self.t_u

    @property
    def microbatch_peak(self) -> float:
        """Peak memory of one micro-batch on a worker: the F-stash turns into the W-stash while B runs."""
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
"""Fields of ``Costs`` by the names used on the command line and in documents."""


@dataclass(frozen=True)
class Problem:
    """A configuration and its work: the input of planners, and the reference for ``verify``.

    Without ``chunks`` and ``stage_of_chunk`` every stage is a chunk, and all are alike.

    Attributes:
        topology: shape of the cluster; expert ranks do not matter here, since a worker's ranks run each op together.
        num_microbatches: micro-batches per pipeline and iteration; one number for each pipeline where they differ.
        failed: failed workers.
        memory_limit: limit per worker, in the unit of the costs' stashes; None for no limit.
        num_iterations: length of the window that is planned as one schedule.
        decoupled: False ties every W to its B, as a plain backward pass does; the neighbour's B waits for both
            (ablation).
        staggered: False delays every U until all stages have finished their last W (ablation).
        chunks: chunks of the model, in order.
        stage_of_chunk: for each pipeline the stage that holds each chunk; empty: chunk k is on stage k.

    Raises:
        SettingError: a failed worker is outside the topology, a chunk is held by no survivor, the chunks are not those
            of the stages, or the memory limit is too small for a single micro-batch.
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
        """Number of chunks: that of stages, unless the problem says otherwise."""
        return len(self.stage_of_chunk[0]) if self.stage_of_chunk else self.num_stages

    @property
    def microbatches(self) -> tuple[int, ...]:
        """Micro-batches of each pipeline."""
        number = self.num_microbatches
        return (number,) * self.num_pipelines if isinstance(number, int) else number

    @property
    def most_microbatches(self) -> int:
        """Micro-batches of the pipeline with the most, M: a dim of arrays, in which others have entries without one."""
        return max(self.microbatches)

    @property
    def total_microbatches(self) -> int:
        """Micro-batches of all pipelines."""
        return sum(self.microbatches)

    @property
    def num_ops(self) -> int:
        """Number of Fs, Bs and Ws of one iteration."""
        return 3 * self.total_microbatches * self.num_chunks

    @property
    def is_uniform(self) -> bool:
        """Whether all pipelines hold the same chunks on the same stages, and run equally many micro-batches."""
        return isinstance(self.num_microbatches, int) and len(set(self.stage_of_chunk)) <= 1

    @property
    def is_plain(self) -> bool:
        """Whether every stage holds one chunk, the chunk of its number, in all pipelines."""
        return not self.stage_of_chunk

    @cached_property
    def time_4P(self) -> np.ndarray:
        """Time of F, B, W and U of every chunk, float64[4, chunks]."""
        factors = np.array([(chunk.f, chunk.b, chunk.w, chunk.u) for chunk in self._chunks]).T
        return np.array(self.costs.op_times)[:, None] * factors

    @cached_property
    def stash_2P(self) -> np.ndarray:
        """F-stash and W-stash of every chunk, float64[2, chunks]."""
        factors = np.array([(chunk.f_stash, chunk.w_stash) for chunk in self._chunks]).T
        return np.array([self.costs.f_stash, self.costs.w_stash])[:, None] * factors

    @cached_property
    def growth_W(self) -> list[float]:
        """Most by which the stash of a chunk of each worker d * P + p grows while its B runs."""
        growth = np.zeros(self.num_pipelines * self.num_stages)
        more_P = np.tile(self.stash_2P[1] - self.stash_2P[0], self.num_pipelines)
        np.maximum.at(growth, self.worker_DP.ravel(), more_P)
        return growth.tolist()

    @cached_property
    def stage_DP(self) -> np.ndarray:
        """Stage that holds each chunk, int64[D, chunks]."""
        if self.stage_of_chunk:
            return np.array(self.stage_of_chunk)
        return np.tile(np.arange(self.num_stages), (self.num_pipelines, 1))

    @cached_property
    def worker_DP(self) -> np.ndarray:
        """Worker d * P + p that holds each chunk in each pipeline, live or not, int64[D, chunks]."""
        return np.arange(self.num_pipelines)[:, None] * self.num_stages + self.stage_DP

    def held_by(self, worker: Worker) -> tuple[int, ...]:
        """Chunks of a worker, ascending."""
        d, p = worker
        return tuple(np.flatnonzero(self.stage_DP[d] == p).tolist())

    def runs_of(self, worker: Worker) -> tuple[tuple[int, int], ...]:
        """Runs of blocks that a worker holds, as (first block, end); empty if the numbers of blocks are not said."""
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
        """Peak memory of one micro-batch that runs alone, on the worker where it takes the most."""
        if not self.chunks and self.is_plain:
            return self.costs.microbatch_peak
        stashes = np.tile(self.stash_2P.max(axis=0), self.num_pipelines)
        return float(np.bincount(self.worker_DP.ravel(), stashes).max()) + self.costs.inbox

    def limited(self, num_stashes: float | None) -> "Problem":
        """Limits the memory of a worker to this many F-stashes, the unit in which users give it; None: no limit.

        Raises:
            SettingError: the limit, in F-stashes, is too small for a single micro-batch.
        """
        if num_stashes is None:
            return replace(self, memory_limit=None)
        unit = self.costs.f_stash
        # A rounding error may make the product less than what a single micro-batch takes.
        self._check_memory(num_stashes, self.microbatch_peak / unit * (1 - 1e-9))
        return replace(self, memory_limit=max(num_stashes * unit, self.microbatch_peak))

    def single_pipeline(self) -> "Problem":
        """Reduces the problem to one pipeline, cut as the first one, without failures."""
        topology, number = Topology(num_stages=self.num_stages), self.most_microbatches
        first = self.stage_of_chunk[:1]
        return replace(self, topology=topology, failed=frozenset(), num_microbatches=number, stage_of_chunk=first)

    def if_drained(self) -> "Problem":
        """Adds a barrier if the window is one iteration, where only the end of all stages counts.

        What is planned so is valid; where ``has_equal_updates`` is false, a shorter plan may run Us earlier.
        """
        return replace(self, staggered=self.staggered and self.num_iterations > 1)

    @property
    def begins_together(self) -> bool:
        """True if no worker begins later than others: with a barrier, and in a window of one iteration."""
        return not self.staggered or self.num_iterations == 1

    @property
    def has_equal_updates(self) -> bool:
        """True if the Us of all workers take the same time after the last W, so that a barrier delays no end."""
        u_P = self.time_4P[Kind.U]
        return not u_P.any() or (self.is_plain and not np.ptp(u_P))

    def most_loaded(self, num_survivors: int) -> int:
        """Least number of micro-batches, n_p, of the most loaded among ``num_survivors`` live workers of a stage."""
        return math.ceil(self.total_microbatches / num_survivors)

    @cached_property
    def live_workers(self) -> tuple[Worker, ...]:
        """Live workers, in mesh order."""
        return self.topology.without(self.failed)

    @cached_property
    def survivors(self) -> tuple[tuple[int, ...], ...]:
        """Peers of every chunk: the pipelines whose worker of that chunk is live, ascending."""
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
