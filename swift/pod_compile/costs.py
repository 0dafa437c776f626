"""Prediction of an iteration's time: a roofline model for the ops, tick by tick, and a link model for collectives.

- Work (``Work``, ``op_costs``): floating-point operations and memory traffic of the ops on one rank, estimated before
  anything is compiled. FLOPs are those of matmuls. Memory traffic consists of the inputs and outputs of matmuls and
  kernels, and of accumulated and stashed values; everything else is assumed to be fused with them.
- Runs (``OpCounts``): how often each part of a compiled step runs. The program does not show this, since the schedule
  is an argument; it is determined by the tick table. Each collective carries the names of the parts that contain it
  (``swift.pipeline.scopes``), which XLA preserves.
- Links (``Interconnect``): the time of a collective is determined by the bytes on its busiest link, plus latency. TPU
  chips form a mesh whose long dimensions wrap around; a message travels along one dimension after the other, in the
  shorter direction. A GPU has one link in each direction to the switch of its host, and one in each direction to other
  hosts. All groups of a collective run concurrently. In an ``all-to-all``, every device sends an equal share to every
  other; ``ragged-all-to-all`` is treated in the same way. ``all-gather`` and ``reduce-scatter`` run on a ring of the
  group, with half of the bytes in each direction; ``all-reduce`` is a ``reduce-scatter`` followed by an ``all-gather``;
  ``collective-permute`` sends a message for each of its pairs.

No overlap is assumed. A tick of a pipeline takes as long as its longest op, because all workers wait for each other's
messages.

Legend: T ticks, R rows of the axis ``worker``, C chunks.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from swift.mesh.devices import Chip
from swift.mesh.hlo_collectives import ALL_TO_ALL, Collective
from swift.mesh.per_rank import EXPERT_AXIS
from swift.pipeline import scopes
from swift.pipeline.split_backward.equations import dot_bytes, dot_flops
from swift.pipeline.split_backward.split import SplitStage
from swift.pipeline.step.costs import counted_stage, embedding_and_head, rank_weights, split_stage, stash_bytes
from swift.pipeline.step.spec import StepSpec
from swift.pipeline.step.stage import block_shapes
from swift.pod_compile.pods import Pod
from swift.schedules.lowering.tick_table import TickTable
from swift.schedules.problem import Kind

HEAD, EMBEDDING = "head", "embedding"
"""Additional work at the ends of the pipeline: the last chunk's F also computes the loss, its gradient and the head's
gradient; the first chunk's B also computes the embedding's gradient."""

_KIND_OF = {scopes.FORWARD: Kind.F, scopes.BACKWARD_INPUT: Kind.B, scopes.BACKWARD_WEIGHT: Kind.W}
_MESSAGES = (scopes.ACTIVATIONS, scopes.GRADIENTS)
_NAMES = (*_KIND_OF, *_MESSAGES, scopes.MICROBATCH, scopes.UPDATE)
_OTHER = "other"
"""Part for collectives without a name: those of the metrics, and those that XLA introduced."""

_TPU_HOP_S, _GPU_MESSAGE_S = 1e-6, 5e-6
"""Latency, in seconds, of a step on TPU and of a message on GPU."""

_Value = TypeVar("_Value")
_UPDATE = (scopes.UPDATE, scopes.COLLECT, scopes.PEERS, scopes.MATERIALIZE)


@dataclass(frozen=True)
class Work:
    """Work of one rank: floating-point operations, and memory traffic in bytes."""

    num_flops: int
    num_bytes: int

    def __add__(self, other: "Work") -> "Work":
        return Work(self.num_flops + other.num_flops, self.num_bytes + other.num_bytes)

    def __mul__(self, times: int) -> "Work":
        return Work(self.num_flops * times, self.num_bytes * times)

    def seconds(self, chip: Chip, dtype: str) -> float:
        """Returns the time according to the roofline model: the longer of compute time and memory time."""
        assert chip.peak_flops is not None
        assert chip.memory_bandwidth is not None
        return max(self.num_flops / chip.peak_flops[dtype], self.num_bytes / chip.memory_bandwidth)

    @classmethod
    def of(cls, function: Callable[..., Any], arguments: tuple, num_ranks: int, more_bytes: int = 0) -> "Work":
        """Counts the work of a function from its jaxpr.

        Args:
            function: function to trace; it may use collectives over the expert ranks.
            arguments: shapes of the arguments.
            num_ranks: number of expert ranks.
            more_bytes: memory traffic in addition to that of matmuls and kernels, in bytes.
        """
        jaxpr = jax.make_jaxpr(function, axis_env=[(EXPERT_AXIS, num_ranks)])(*arguments)
        return cls(dot_flops(jaxpr), dot_bytes(jaxpr) + more_bytes)


def op_costs(spec: StepSpec, num_sequences: int) -> Mapping[str, Work]:
    """Returns the work that each part of a step does in one run, by the names in ``swift.pipeline.scopes``.

    If chunks have different layers, ops are listed by chunk, such as ``F/0``. A chunk is a stage if all pipelines have
    the same cut.

    Args:
        spec: specification of the step, on any mesh.
        num_sequences: number of sequences of a micro-batch on one rank.
    """
    ops = _ops(spec, num_sequences)
    if spec.is_single_worker:
        ops = {scopes.MICROBATCH: sum(ops.values(), Work(0, 0))}
    return {**ops, scopes.UPDATE: _update(spec)}


def _ops(spec: StepSpec, num_sequences: int) -> dict[str, Work]:
    stage, (layers, extras, x) = split_stage(spec, num_sequences)
    counted = counted_stage(spec, stage, num_sequences)
    ranks, d_out = spec.live.num_ranks, (x, jax.ShapeDtypeStruct((), spec.accumulate_dtype))
    names = scopes.FORWARD, scopes.BACKWARD_INPUT, scopes.BACKWARD_WEIGHT
    cut = spec.chunks.ops
    names_by_chunk = [names] if cut.is_uniform else [[f"{name}/{c}" for name in names] for c in range(len(cut.sizes))]
    total = {name: Work(0, 0) for chunk_names in names_by_chunk for name in chunk_names}
    for is_moe, block_stage in stage.kinds.items():
        block_args = block_shapes(layers, extras, is_moe)
        b, h, w = map(stash_bytes, block_stage.stash_shapes)
        real, known = (
            _block_work(block, block_args, x, d_out, ranks) for block in (block_stage, counted.kinds[is_moe])
        )
        more = b + h, w, _added(spec, block_args[0])
        block_work = [Work(c.num_flops, r.num_bytes + m) for c, r, m in zip(known, real, more, strict=True)]
        for chunk_names, count in zip(names_by_chunk, cut.counts(is_moe), strict=False):
            for name, work in zip(chunk_names, block_work, strict=True):
                total[name] += work * count
    return total | _embedding_and_head(spec, num_sequences, x)


def _block_work(block: SplitStage, block_args: tuple[Any, Any], x: Any, d_out: Any, num_ranks: int) -> list[Work]:
    """Counts the work of a block's F, B and W, without their stashes' memory traffic."""
    return [
        Work.of(block.forward, (*block_args, x), num_ranks),
        Work.of(block.backward_input, (*block_args, *block.stash_shapes[:2], d_out), num_ranks),
        Work.of(block.backward_weight, (*block_args, *block.stash_shapes[1:]), num_ranks),
    ]


def _embedding_and_head(spec: StepSpec, num_sequences: int, x: jax.ShapeDtypeStruct) -> dict[str, Work]:
    def work(end: Callable[..., Any], weights: Any, *arguments: Any) -> Work:
        return Work.of(end, (weights, *arguments), spec.live.num_ranks, _added(spec, weights))

    embedding, head = embedding_and_head(spec, num_sequences, x)
    return {HEAD: work(*head), EMBEDDING: work(*embedding)}


def _update(spec: StepSpec) -> Work:
    """Counts an update's work: sums over replicas, and memory traffic of weights, moments, slots and gradients."""
    ranks, state = spec.live.num_ranks, spec.worker_shapes
    num_flops = 0
    for name, leaf in state.slots.items():
        gradients = jax.ShapeDtypeStruct((leaf.shape[0], *leaf.shape[2:]), spec.accumulate_dtype)
        placement = spec.placements(jnp.zeros(state.placement.shape, jnp.int32))[name]
        num_flops += Work.of(spec.layouts[name].collect, (gradients, placement), ranks).num_flops
    optimizer_bytes, slot_bytes = (_bytes(tree) // ranks for tree in ((state.master, state.moments), state.slots))
    return Work(num_flops, 2 * optimizer_bytes + slot_bytes + _added(spec, rank_weights(spec)) // 2)


def _added(spec: StepSpec, weights: Any) -> int:
    """Returns the memory traffic of accumulating gradients, in bytes: each sum is read and written once."""
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(weights))
    return 2 * size * jnp.dtype(spec.accumulate_dtype).itemsize


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@dataclass(frozen=True)
class OpCounts:
    """Counts how often a program's parts run on every row of its mesh.

    Attributes:
        spec: step spec.
        table: tick table that the program interprets, or None for a single worker.
        num_iterations: number of iterations in a call, K.
        look_up_rounds: number of rounds of a look-up in a sharded embedding; the program does not show it, since it
            depends on the tokens.
    """

    spec: StepSpec
    table: TickTable | None
    num_iterations: int
    look_up_rounds: int = 1

    def part(self, collective: Collective) -> str:
        """Names the part of a step that contains a collective, by ``swift.pipeline.scopes``, or ``_OTHER``.

        The parts of an update are ``collect/GROUP``, ``peers/GROUP`` and ``materialize/GROUP``.
        """
        path = collective.path
        for name in (scopes.COLLECT, scopes.PEERS, scopes.MATERIALIZE):
            if scopes.UPDATE in path and name in path:
                return f"{name}/{path[path.index(name) + 1]}"
        return self._name(collective)

    def of(self, collective: Collective) -> np.ndarray:
        """Returns how often a collective runs in a call, int64 ``[R]``."""
        name, trips_C = self._name(collective), self.trips_C(collective)
        if name in _KIND_OF:
            return self.ops(name) @ trips_C
        return int(trips_C.max()) * self._runs(name, collective.path)

    def trips_C(self, collective: Collective) -> np.ndarray:
        """Returns how often a collective runs per run of its part, for each chunk, int64 ``[C]``."""
        name = self._name(collective)
        inner = [loop for loop in collective.loops if name == _OTHER or name in loop.path]
        # Loops are listed innermost first: the last one is the loop over blocks, the others are inside a block.
        over_blocks = [loop for loop in inner if scopes.BLOCKS in loop.path][-1:]
        # Copies of hot rows are assumed to need no further rounds: no row is needed twice in an iteration.
        if scopes.COPIES in collective.path:
            is_in_round = any(scopes.COPIES in loop.path for loop in collective.loops)
            return np.array([0 if is_in_round else 1] * len(self.spec.chunks.sizes))
        if scopes.EMBEDDING in collective.path:  # only in the first chunk, outside its blocks
            return np.array([self._look_up_trips(collective)] + [0] * (len(self.spec.chunks.sizes) - 1))
        trips = math.prod(self._trips(loop.num_trips) for loop in inner if loop not in over_blocks)
        if scopes.HEAD in collective.path:  # only in the last chunk, outside its blocks
            return np.array([0] * (len(self.spec.chunks.sizes) - 1) + [trips])
        # Only blocks with experts have collectives, which are in a branch if there are blocks of both kinds.
        blocks_C = np.array(self.spec.chunks.ops.counts(is_moe=True))
        # If no chunk has more than one block, the program has no loop over blocks.
        is_per_block = over_blocks or (name in _KIND_OF and max(self.spec.chunks.sizes) == 1)
        return trips * (blocks_C if is_per_block else np.ones_like(blocks_C))

    def _look_up_trips(self, collective: Collective) -> int:
        """Returns how often a collective runs per look-up: once, or once in each round."""
        is_in_round = any(scopes.EMBEDDING in loop.path for loop in collective.loops)
        return self.look_up_rounds if is_in_round else 1

    def ops(self, name: str) -> np.ndarray:
        """Returns how often F, B or W of each chunk runs in a call, int64 ``[R, C]``."""
        assert self.table is not None
        is_op_TR, chunk_TR = self.table.opcode_TR == _KIND_OF[name] + 1, self.table.chunk_TR
        return np.stack([(is_op_TR & (chunk_TR == c)).sum(axis=0) for c in range(len(self.spec.peers_C))], axis=1)

    @property
    def end_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Whether each row holds the first chunk, and whether it holds the last, bool ``[R]`` each."""
        return self._holds_RC[:, 0], self._holds_RC[:, -1]

    @property
    def num_updates(self) -> int:
        """Number of chunk updates in an iteration, over all rows."""
        return int(self._holds_RC.sum())

    @property
    def _holds_RC(self) -> np.ndarray:
        return self.spec.chunks.holds_HC[self.spec.holding_R]

    def _name(self, collective: Collective) -> str:
        return next((name for name in _NAMES if name in collective.path), _OTHER)

    def _trips(self, num_trips: int | None) -> int:
        """Returns a loop's trip count; the compiler knows it for every loop except the loop over ticks."""
        if num_trips is not None:
            return num_trips
        return 1 if self.table is None else int(self.table.phase_bounds[-1])

    def _runs(self, name: str, path: tuple[str, ...]) -> np.ndarray:
        everywhere = np.ones(self.spec.live.num_live, np.int64)
        if name in _KIND_OF:
            return self.ops(name)
        if name in _MESSAGES:
            assert self.table is not None
            moves = self.table.activations if name == scopes.ACTIVATIONS else self.table.gradients
            round_index, branch = (_number(path, path.index(name), prefix) for prefix in (scopes.ROUND, "branch_"))
            return everywhere * int((moves.permutation_TQ[:, round_index] == branch - 1).sum())
        if name == scopes.MICROBATCH:
            return everywhere * self.spec.num_microbatches
        if name == scopes.UPDATE:
            return self._of_updates(path) * self.num_iterations
        return everywhere

    def _of_updates(self, path: tuple[str, ...]) -> np.ndarray:
        """Returns how often a part of the updates runs in an iteration, int64 ``[R]``.

        Updates of embedding and head are in a branch and run only on rows that use these. If workers hold several
        chunks, the program contains an update either once, which runs for every chunk, or once for each round of sums
        over peers; in both cases the sum itself is in the branch of its round.
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
    """Returns the number in the first name with a prefix, from position ``first`` on: 2 for ``branch_2_fun``."""
    name = next(name for name in path[first:] if name.startswith(prefix))
    return int(name.removeprefix(prefix).split("_")[0])


class _Message(NamedTuple):
    source: int
    target: int
    num_bytes: float


@dataclass(frozen=True)
class Interconnect:
    """Model of the links between a pod's devices.

    Attributes:
        pod: pod that runs the program.
        coords: coordinates of each device of the program's mesh: (x, y, ...) for a TPU, otherwise (host, index within
            the host).
    """

    pod: Pod
    coords: Sequence[tuple[int, ...]]

    def seconds(self, collective: Collective) -> float:
        """Returns the time that one run of a collective takes; its groups all run concurrently."""
        messages, num_steps = list(self._messages(collective)), self._num_steps(collective)
        if not messages:
            return 0.0
        if self.pod.chip.platform == "tpu":
            return self._on_links(messages) + num_steps * _TPU_HOP_S
        return self._through_switches(messages) + num_steps * _GPU_MESSAGE_S

    def _messages(self, collective: Collective) -> Iterator[_Message]:
        if collective.kind == "collective-permute":
            yield from (_Message(a, b, collective.num_bytes) for a, b in collective.pairs)
            return
        for group in collective.groups or (tuple(range(len(self.coords))),):
            size = len(group)
            if size == 1:
                continue
            if collective.kind in ALL_TO_ALL:
                share = collective.num_bytes / size
                yield from (_Message(a, b, share) for a in group for b in group if a != b)
                continue
            # Bytes over every edge of the ring, in both directions together; an all-reduce goes around twice.
            around = collective.num_bytes * (size - 1) / size * (2 if collective.kind == "all-reduce" else 1)
            ring = self._ring(group)
            for a, b in zip(ring, (*ring[1:], ring[0]), strict=True):
                yield from (_Message(a, b, around / 2), _Message(b, a, around / 2))

    def _num_steps(self, collective: Collective) -> int:
        if collective.kind in ("collective-permute", *ALL_TO_ALL):
            return 1
        size = max(map(len, collective.groups), default=len(self.coords))
        return (2 if collective.kind == "all-reduce" else 1) * size // 2

    def _ring(self, group: tuple[int, ...]) -> tuple[int, ...]:
        """Orders the devices of a group along a snake through the mesh, so that neighbors on the ring are close."""

        def key(device: int) -> tuple[int, ...]:
            order: list[int] = []
            for place in reversed(self.coords[device]):
                order.append(-place if sum(map(abs, order)) % 2 else place)
            return tuple(order)

        return tuple(sorted(group, key=key))

    def _on_links(self, messages: Sequence[_Message]) -> float:
        load: Counter[tuple[tuple[int, ...], int, int]] = Counter()
        for source, target, num_bytes in messages:
            for link in self._route(self.coords[source], self.coords[target]):
                load[link] += num_bytes  # type: ignore[assignment]
        return max(load.values()) / (self.pod.chip.link_bandwidth or float("inf"))

    def _route(
        self, source: tuple[int, ...], destination: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """Yields the links of a route, each as (chip, dim, direction)."""
        position = list(source)
        for dim, size in enumerate(self.pod.shape):
            closes = size >= self.pod.chip.closes_from and size % self.pod.chip.closes_from == 0
            ahead = destination[dim] - position[dim]
            if closes and abs(ahead) > size / 2:
                ahead -= size if ahead > 0 else -size
            step = 1 if ahead > 0 else -1
            for _ in range(abs(ahead)):
                yield tuple(position), dim, step
                position[dim] = (position[dim] + step) % size

    def _through_switches(self, messages: Sequence[_Message]) -> float:
        chip, load = self.pod.chip, Counter[tuple[int, str, bool]]()
        for source, target, num_bytes in messages:
            leaves = self.coords[source][0] != self.coords[target][0]
            load[source, "out", leaves] += num_bytes  # type: ignore[assignment]
            load[target, "in", leaves] += num_bytes  # type: ignore[assignment]
        speeds = {False: chip.link_bandwidth, True: chip.network_bandwidth}
        return max(num_bytes / (speeds[leaves] or float("inf")) for (_, _, leaves), num_bytes in load.items())


def total_flops(runs: OpCounts, work: Mapping[str, Work]) -> int:
    """Returns the floating-point operations of an iteration, over all devices."""
    live, K = runs.spec.live, runs.num_iterations
    total = live.num_live * K * work[scopes.UPDATE].num_flops
    if runs.table is None:
        total += runs.spec.num_microbatches * work[scopes.MICROBATCH].num_flops
    else:
        for name in _KIND_OF:
            num_ops_C = runs.ops(name).sum(axis=0).tolist()
            total += sum(
                ops * chunk_work.num_flops
                for ops, chunk_work in zip(num_ops_C, _by_chunk(runs, work, name), strict=True)
            )
        total += int(runs.ops(scopes.BACKWARD_INPUT)[:, 0].sum()) * work[EMBEDDING].num_flops
        total += int(runs.ops(scopes.FORWARD)[:, -1].sum()) * work[HEAD].num_flops
    return total * live.num_ranks // K


def predict(
    runs: OpCounts, work: Mapping[str, Work], collectives: Sequence[Collective], links: Interconnect, dtype: str
) -> dict[str, float] | None:
    """Predicts the time of an iteration and its parts, in ms; returns None if the chip's peak FLOPs are unknown.

    Args:
        runs: run counts of the program's parts.
        work: work of each part, see ``op_costs``.
        collectives: collectives of the program.
        links: links that the collectives use.
        dtype: compute dtype.
    """
    chip, K = links.pod.chip, runs.num_iterations
    if not chip.peak_flops or dtype not in chip.peak_flops:
        return None
    busy = {name: op_work.seconds(chip, dtype) for name, op_work in work.items()}
    nothing = dict.fromkeys((*_KIND_OF, scopes.MICROBATCH), np.zeros(len(runs.spec.chunks.sizes)))
    inside_C = dict(nothing)
    update_R, messages, other = np.zeros(runs.spec.live.num_live), 0.0, 0.0
    for collective in collectives:
        part, runs_R = runs.part(collective).partition("/")[0], runs.of(collective)
        seconds = links.seconds(collective)
        if part in inside_C:
            inside_C[part] = inside_C[part] + runs.trips_C(collective) * seconds
        elif part in _UPDATE:
            update_R += runs_R * seconds
        elif part == _OTHER:
            other += int(runs_R.max()) * seconds
        else:
            messages += int(runs_R.max()) * seconds
    computing = _ticks(runs, busy, nothing)
    parts = {
        "compute": computing,
        "tokens": _ticks(runs, busy, inside_C) - computing,
        "messages": messages,
        "update": K * busy[scopes.UPDATE],
        "exchange": float(update_R.max()),
        "other": other,
    }
    parts_ms = {f"{name}_ms": 1e3 * seconds / K for name, seconds in parts.items()}
    return {"step_ms": sum(parts_ms.values()), **parts_ms}


def _by_chunk(runs: OpCounts, by_name: Mapping[str, _Value], name: str) -> list[_Value]:
    """Returns an op's value for every chunk, from one entry for all chunks (``F``) or an entry for each (``F/0``)."""
    chunks = range(len(runs.spec.chunks.sizes))
    return [by_name[name] if name in by_name else by_name[f"{name}/{chunk}"] for chunk in chunks]


def _ticks(runs: OpCounts, busy: Mapping[str, float], inside_C: Mapping[str, np.ndarray]) -> float:
    """Returns the time that a call spends in ops, in seconds; in every tick, all workers wait for the longest op.

    Args:
        runs: run counts of the program's parts.
        busy: compute time of each part, in seconds.
        inside_C: for each part, the time of the collectives inside an op of each chunk, in seconds.
    """
    if runs.table is None:
        return runs.spec.num_microbatches * (busy[scopes.MICROBATCH] + float(inside_C[scopes.MICROBATCH].max()))
    num_ticks = runs.table.phase_bounds[-1]
    opcode_TR, chunk_TR = runs.table.opcode_TR[:num_ticks], runs.table.chunk_TR[:num_ticks]
    took_TR = np.zeros(opcode_TR.shape)
    for name, kind in _KIND_OF.items():
        took_TR += (opcode_TR == kind + 1) * (np.array(_by_chunk(runs, busy, name)) + inside_C[name])[chunk_TR]
    took_TR += (opcode_TR == Kind.F + 1) * (chunk_TR == len(runs.spec.chunks.sizes) - 1) * busy[HEAD]
    took_TR += (opcode_TR == Kind.B + 1) * (chunk_TR == 0) * busy[EMBEDDING]
    return float(took_TR.max(axis=1).sum())
