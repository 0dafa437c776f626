"""The checkpoint service: a process that writes and reads the checkpoints of an elastic run.

It is not a member of any generation: as a member, it would let Orbax wait for all processes, and forever if one of them
died. The service and the workers exchange states through shared memory, see ``swift.elastic.state.store``. These states
have no slots, which are recomputed.

``ShardedState`` joins the processes' parts into a whole state for a checkpoint, and splits a whole state into parts.
``Resharding`` converts the state of an elastic run to another set of ranks, from the slices that processes have handed
over and from older copies. ``run_checkpoint_service`` is the main function of the process.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NoReturn, TextIO

import jax
import jax.numpy as jnp
import numpy as np

from swift.checkpoint.inspection import restore_facts, restore_lines, save_facts
from swift.checkpoint.manifest import Manifest, archive_newer, checkpoint_path, checkpoint_steps, clean_up_saves
from swift.checkpoint.reader import RestorePlan, plan_restore, record_restore
from swift.checkpoint.recovery import recover_ranks
from swift.checkpoint.units import StateSplit
from swift.checkpoint.writer import save_checkpoint
from swift.config.experiment import Experiment
from swift.data.loader import check_same_position, state_at
from swift.elastic.membership.messages import Process, StateId, complete_workers, covers_whole_state, processes_of
from swift.elastic.state.ledger_counts import LedgerCounts
from swift.elastic.state.run_files import RunFiles
from swift.elastic.state.slices import ElasticSpecs, Handover, is_elastic
from swift.elastic.state.store import SharedMemoryStore, join_parts, process_parts
from swift.elastic.transport.messages import (
    CHECKPOINT_ANSWERS,
    CHECKPOINT_COMMANDS,
    CheckpointAnswer,
    CheckpointCommand,
    CommandFailed,
    KeptElsewhere,
    LoadCheckpoint,
    Reshard,
    SaveCheckpoint,
    Saved,
    StateRestored,
)
from swift.elastic.worker.channel import LineWriter, configure_jax
from swift.errors import RunError, SettingError
from swift.mesh.live import MeshRow
from swift.mesh.state_rows import shard_shapes
from swift.pipeline.reconfigure.recut import spec_with_assignment
from swift.pipeline.reconfigure.reshard import reshape_state
from swift.pipeline.reconfigure.transfer import transfer_on_host
from swift.pipeline.state import TrainState
from swift.pipeline.step.spec import StepSpec
from swift.runlog.lease import writes_checkpoints
from swift.runlog.run_directory import sync_record
from swift.schedules.plans.normalize import DEFAULT_ASSIGNMENT, ChunkAssignment
from swift.topology import Worker
from swift.train.build import on_storage_mesh
from swift.train.initial_weights import WeightSource
from swift.train.saved_state import check_savable, extra_of, ledger_after, load_state, save_fallback, split_of

_LoadUpTo = Callable[[StepSpec, int], tuple[TrainState, RestorePlan] | None]
"""(step spec, iteration) -> state and plan of the newest intact checkpoint up to that iteration, or None."""

_RECORD_S = 20.0
"""Seconds that a save waits for the record of its iteration."""
_ORPHANED_S = 1.0
"""Seconds after which the kernel has surely given a child of a dead parent a new one; it closes files before that."""


@dataclass(frozen=True, kw_only=True)
class ShardedState:
    """Converts between a whole state in checkpoint layout and the parts of a generation's processes.

    A process has the blocks that its worker holds; a checkpoint has the blocks in the cut of the first pipeline.

    Attributes:
        spec: step spec of the run, on the storage mesh.
        cut: workers that hold each block; falsy for the run's own cut.
        snapshots: directory of the parts, see ``SharedMemoryStore``.
        by_rank: whether each expert rank is a process of its own, rather than each worker.
        is_elastic: whether the run is elastic, in which case a generation has the remaining ranks, renumbered from 0.
    """

    spec: StepSpec
    cut: ChunkAssignment
    snapshots: Path
    by_rank: bool
    is_elastic: bool

    def joined(self, stamp: StateId, holders: Sequence[Process]) -> TrainState:
        """Joins the parts of these processes into a whole state in checkpoint layout, without slots.

        Args:
            stamp: stamp of the state.
            holders: all processes of a set of workers that together have every block.

        Raises:
            RunError: a part is damaged or belongs to another state.
            OSError: a part does not exist.
        """
        in_order = self._in_order(holders)
        snapshot_spec = self._on_workers(process.worker for process in in_order)
        specs, shapes = _without_slots(snapshot_spec), snapshot_spec.abstract()
        like = shard_shapes(specs, shapes, len(self._ranks(0)))
        parts = [SharedMemoryStore(self.snapshots, process).load(stamp, like) for process in in_order]
        return transfer_on_host(join_parts(specs, shapes, parts), snapshot_spec, self.spec.checkpoint_spec)

    def keep(self, host: TrainState, stamp: StateId, processes: Sequence[Process]) -> None:
        """Splits a whole state into parts, and stores one for every process, without slots.

        Processes that hold the same blocks get the same part. The parts are in the run's own cut, which is used
        whenever a run resumes from a checkpoint.

        Raises:
            OSError: a part cannot be stored.
        """
        worker_of = {self._holding(process): process.worker for process in reversed(processes)}
        rows = sorted(worker_of)
        snapshot_spec = self._on_workers(worker_of[holding] for holding in rows)
        moved = transfer_on_host(host, self.spec.checkpoint_spec, snapshot_spec)
        for index, process in enumerate(processes):
            ranks = self._ranks(index if self.is_elastic else process.rank)
            parts = process_parts(_without_slots(snapshot_spec), moved, rows.index(self._holding(process)), ranks)
            SharedMemoryStore(self.snapshots, process).save(stamp, parts)

    def _holding(self, process: Process) -> int:
        return self.spec.chunks.holding(*process.worker)

    def _ranks(self, rank: int) -> Sequence[int]:
        """Returns the expert ranks of a process."""
        return (rank,) if self.by_rank else range(self.spec.live.num_ranks)

    def _on_workers(self, workers: Iterable[Worker]) -> StepSpec:
        """Returns the step spec on a mesh with one row for each of these workers."""
        rows = tuple(MeshRow(worker, worker[1]) for worker in dict.fromkeys(workers))
        return spec_with_assignment(self.spec.at(replace(self.spec.live, rows=rows)), self.cut)

    def _in_order(self, holders: Sequence[Process]) -> list[Process]:
        """Sorts processes by stage, worker and rank; asserts that they form complete workers that have every block."""
        in_order = sorted(set(holders), key=lambda process: (process.worker[1], process))
        everyone = processes_of(self.spec.live.topology, by_rank=self.by_rank)
        complete, chunks = complete_workers(everyone, in_order), self.spec.chunks
        has_parts = any(process.worker not in complete for process in in_order)
        has_all = covers_whole_state(
            everyone, in_order, self.cut or ChunkAssignment(() if chunks.matches_stages else chunks.stage_DC)
        )
        assert len(in_order) == len(holders), f"holders are {holders}"
        assert self.is_elastic or (has_all and not has_parts), f"holders are {holders}"
        return in_order


@dataclass(frozen=True)
class Resharding:
    """Converts states of an elastic run to other ranks, and recovers lost ranks' slices.

    Attributes:
        specs: step specs of the run.
        handover: states and copies that processes have handed over.
        counts: counts token updates for the ledger of the run.
        load_up_to: reads the newest intact checkpoint up to an iteration, as the last source for lost slices.
    """

    specs: ElasticSpecs
    handover: Handover
    counts: LedgerCounts
    load_up_to: _LoadUpTo

    def reshard(self, command: Reshard) -> tuple[list[str], dict[str, Any]]:
        """Reshards a state for the ranks of a generation, and stores each process's part.

        Returns:
            (lines that say where lost ranks' slices came from, for the terminal; the same information as event fields).

        Raises:
            RunError: there is no copy of a lost rank's slices, or no part of the state is left.
            OSError: a part cannot be stored.
        """
        stamp, layout, generation, processes = command
        old, new = (self.specs.on(len(group)) for group in (layout.processes, processes))
        state, slots, lost = self._joined(old, layout.processes, stamp)
        lines, facts = list[str](), dict[str, Any]()
        if lost:
            split = split_of(old)
            copies = self.handover.rank_copies(split, layout, lost, lambda step: self.counts.contained(old, step))
            ledger, last = self.counts.so_far(old, stamp.step)
            recovery = recover_ranks(
                state,
                slots,
                split,
                [(0, layout.processes.index(process)) for process in lost],
                copies=list(copies),
                step=stamp.step,
                ledger=ledger,
                stored=partial(self.load_up_to, old, stamp.step),
                names=[process.rank for process in layout.processes],
            )
            state, lines = recovery.state, recovery.lines
            facts = {"lost": [str(process) for process in lost], **recovery.facts}
            self.counts.note_loss(recovery.ledger, last)
        host = reshape_state(state, old, new)
        for rank, process in enumerate(processes):
            parts = process_parts(_without_slots(new), host, process.worker[1], [rank])
            self.handover.parts(process).save(StateId(generation, stamp.step), parts)
        slots_before, slots_now = old.experts.slots_per_rank, new.experts.slots_per_rank
        if slots_before != slots_now:
            lines.append(f"each rank now has {slots_now} slots instead of {slots_before}")
        return lines, facts | {"ranks": len(processes), "ranks_before": len(layout.processes)}

    def rehearse(self, num_ranks: int) -> None:
        """Compiles the placement policy for ``num_ranks`` ranks in advance, so that no process has to wait for this."""
        spec = self.specs.on(num_ranks)
        layers, classes, slots = spec.num_moe_layers, spec.experts.num_classes, spec.experts.slots_per_rank
        if layers:
            placement, policy = spec.policy.init(layers, classes, num_ranks, slots)
            spec.policy(jnp.ones((layers, classes), jnp.int32), placement, policy)

    def _joined(
        self, old: StepSpec, processes: Sequence[Process], stamp: StateId
    ) -> tuple[TrainState, dict[str, np.ndarray] | None, list[Process]]:
        """Joins the parts that still exist; returns the state, the slots, and the processes whose parts are lost.

        In place of each lost part, the state contains a copy of another part, so that the shapes are right; its values
        are meaningless.
        """
        parts = [self._part(old, process, stamp) for process in processes]
        lost = [process for process, part in zip(processes, parts, strict=True) if part is None]
        available = [part for part in parts if part is not None]
        if not available:
            raise RunError(f"nothing is left of the state after iteration {stamp.step}")
        has_slots = all(part.slots for part in available)
        if not has_slots:
            available = [replace(part, slots={}) for part in available]
        specs = old.specs if has_slots else _without_slots(old)
        remaining = iter(available)
        parts = [available[0] if part is None else next(remaining) for part in parts]
        state = join_parts(specs, old.abstract(with_slots=has_slots), parts)
        return replace(state, slots={}), state.slots or None, lost

    def _part(self, old: StepSpec, process: Process, stamp: StateId) -> TrainState | None:
        """Returns the part that a process handed over or was to resume from, or None if there is no intact one."""
        for store, specs, shapes in (
            (self.handover.states(process), old.specs, old.abstract(with_slots=True)),
            (self.handover.parts(process), _without_slots(old), old.abstract()),
        ):
            if stamp in store.stamps():
                try:
                    return store.load(stamp, shard_shapes(specs, shapes, num_devices=1))
                except RunError as error:
                    print(f"passed over: {error}", file=sys.stderr)
        return None


def _without_slots(spec: StepSpec) -> TrainState:
    return replace(spec.specs, slots={})


@dataclass(frozen=True, kw_only=True)
class CheckpointService:
    """Writes and reads a run's checkpoints, in the same format as ``swift train``.

    Attributes:
        experiment: settings of the run.
        checkpoints: directory of the run's checkpoints.
        snapshots: directory for states to be saved and restored states, see ``SharedMemoryStore``.
        by_rank: whether each expert rank is a process of its own, rather than each worker.
        data: state of a data loader of the run.
        handed_over: directory of the states that processes hand over, see ``Handover``; only for elastic runs.
        init_from: run whose weights this run begins with as long as it has no checkpoint; None for random weights.
    """

    experiment: Experiment
    checkpoints: Path
    snapshots: Path
    by_rank: bool
    data: Mapping[str, Any]
    handed_over: Path | None = None
    init_from: WeightSource | None = None

    @cached_property
    def spec(self) -> StepSpec:
        """Step spec of the run on the storage mesh."""
        return self._elastic_specs.on(self.experiment.topology.num_expert_ranks)

    @cached_property
    def _elastic_specs(self) -> ElasticSpecs:
        return ElasticSpecs(on_storage_mesh(self.experiment))

    @cached_property
    def _counts(self) -> LedgerCounts:
        return LedgerCounts(self.experiment, self.checkpoints, self.snapshots / "losses.json")

    @cached_property
    def split(self) -> StateSplit:
        """Division of the state into a dense part and experts, which determines how checkpoints are written."""
        return split_of(self.spec)

    def serve(self, commands: Iterable[str], answer: Callable[[str], None]) -> None:
        """Carries out commands until the stream ends, finishing each one before reading the next.

        Args:
            commands: lines, each with a command.
            answer: called with each line that contains an answer.
        """
        for line in commands:
            answer(CHECKPOINT_ANSWERS.line(self.carry_out(CHECKPOINT_COMMANDS.read(line))))

    def carry_out(self, command: CheckpointCommand) -> CheckpointAnswer:
        """Carries out a command; returns ``CommandFailed`` instead of raising an error."""
        begun = time.perf_counter()
        try:
            match command:
                case SaveCheckpoint(stamp, holders, is_full, True, cut):
                    write = partial(self.save, stamp, holders, is_full=is_full, cut=cut)
                    return KeptElsewhere(stamp.step, save_fallback(self.checkpoints, stamp.step, write))
                case SaveCheckpoint(stamp, holders, is_full, _, cut):
                    facts = save_facts(self.save(stamp, holders, is_full=is_full, cut=cut))
                    path = checkpoint_path(self.checkpoints, stamp.step)
                    return Saved(stamp.step, time.perf_counter() - begun, path.name, facts)
                case LoadCheckpoint(None, generation, processes) if self.init_from and not self._steps:
                    facts = self.begin(generation, processes)
                    lines = [f"passed over: {reason}" for reason in facts["passed_over"]]
                    return StateRestored(StateId(generation, 0), lines, facts, is_origin=True)
                case LoadCheckpoint(step, generation, processes):
                    plan = self.load(generation, processes, step)
                    after = ledger_after(self.experiment, plan)
                    stamp, facts = StateId(generation, plan.step), restore_facts(plan, after)
                    return StateRestored(stamp, restore_lines(plan, after), facts)
                case Reshard():
                    lines, facts = self.resharding.reshard(command)
                    facts |= {"reshard_ms": 1000 * (time.perf_counter() - begun)}
                    stamp = StateId(command.generation, command.stamp.step)
                    return StateRestored(stamp, lines, facts, is_resharded=True)
        except Exception as error:  # whatever the error is, the service must survive to try the next checkpoint
            return _failure(command, self.checkpoints, error)

    def save(
        self,
        stamp: StateId,
        holders: Sequence[Process],
        directory: Path | None = None,
        *,
        is_full: bool = False,
        cut: ChunkAssignment = DEFAULT_ASSIGNMENT,
    ) -> Manifest:
        """Writes a checkpoint from the parts that processes have stored.

        Args:
            stamp: stamp of the state.
            holders: processes whose parts to use: all processes of a set of workers that together have every block.
            directory: directory for checkpoints; None for the run's own.
            is_full: whether to save all experts, whatever K is; after the last iteration all are saved anyway.
            cut: workers that hold each block of the parts; falsy for the run's own cut.

        Returns:
            The manifest of the checkpoint.

        Raises:
            RunError: a part is damaged or belongs to another state, weights are not finite, or an expert has no slot.
            OSError: a part does not exist, or the checkpoint cannot be written.
        """
        spec = self._spec_of(holders)
        split, state = split_of(spec), self._parts(holders, cut).joined(stamp, holders)
        check_savable(state, stamp.step, spec.experts.num_classes)
        ledger, config = self._counts.at(spec, stamp.step, _RECORD_S), self.experiment.checkpoint
        if directory is None:  # flush first: a crash must not lose records that the checkpoint's ledger counts
            sync_record(self.checkpoints.parent)
        chosen_LK = ledger.choose(config.selection, full=is_full or stamp.step == self.experiment.num_steps)
        manifest = save_checkpoint(
            directory or self.checkpoints,
            stamp.step,
            split.host_snapshot(state, chosen_LK),
            split,
            ledger,
            identity=self.experiment.identity(),
            extra=extra_of(spec, state_at(self.data, stamp.step)),
            num_kept=config.num_kept,
        )
        self._counts.forget_losses(stamp.step)
        return manifest

    def load(self, generation: int, processes: Sequence[Process], step: int | None = None) -> RestorePlan:
        """Reads the checkpoint from which the run resumes, and stores each process's part.

        Newer checkpoints, which are damaged or not wanted, are archived.

        Args:
            generation: generation of the stamp under which the parts are stored.
            processes: processes of that generation.
            step: iteration of the checkpoint; None for the newest intact one.

        Returns:
            The plan, with the source of every part of the state.

        Raises:
            SettingError: there is no such checkpoint, it is damaged, or it belongs to another model or other data.
            OSError: a part cannot be stored.
        """
        plan = plan_restore(self.checkpoints, self.experiment.identity(), step)
        host = load_state(self.checkpoints, plan, self._spec_of(processes))
        check_same_position(plan.manifest.extra["loader"], self.data)
        self._parts(processes).keep(host, StateId(generation, plan.step), processes)
        for aside in archive_newer(self.checkpoints, plan.step):
            print(f"{aside} is archived: the run resumes from an older one", file=sys.stderr)
        record_restore(self.checkpoints, plan.manifest, ledger_after(self.experiment, plan))
        self._counts.forget_losses(sys.maxsize)
        return plan

    def begin(self, generation: int, processes: Sequence[Process]) -> dict[str, Any]:
        """Reads another run's weights, which this run begins with, and stores each process's part.

        Args:
            generation: generation of the stamp under which the parts are stored.
            processes: processes of that generation.

        Returns:
            Where the weights came from, as fields of the event.

        Raises:
            SettingError: there is no intact checkpoint of the other run, or it belongs to another model.
            OSError: a part cannot be stored.
        """
        assert self.init_from is not None
        plan = self.init_from.plan(self.experiment)
        spec = self._spec_of(processes).checkpoint_spec
        host = jax.device_get(spec.state_without_slots(self.init_from.parameters(plan)))
        self._parts(processes).keep(host, StateId(generation, 0), processes)
        return self.init_from.facts(plan)

    @property
    def _steps(self) -> list[int]:
        return checkpoint_steps(self.checkpoints)

    @cached_property
    def resharding(self) -> Resharding:
        """Converts states of this run to other ranks; only for elastic runs."""
        assert self.handed_over is not None, "only the ranks of an elastic run change"
        processes = processes_of(self.experiment.topology, by_rank=self.by_rank)
        load_up_to = partial(_load_up_to, self.checkpoints, self.experiment.identity())
        handover = Handover(self.handed_over, self.snapshots, processes)
        return Resharding(self._elastic_specs, handover, self._counts, load_up_to)

    def rehearse(self) -> None:
        """Traces and compiles everything that later commands need, so that no process has to wait for this."""
        self.spec.abstract()  # traces the model
        num_ranks = self.experiment.topology.num_expert_ranks
        for count in (num_ranks - 1, num_ranks) if self._is_elastic else ():
            self.resharding.rehearse(max(1, count))

    @property
    def _is_elastic(self) -> bool:
        return is_elastic(self.experiment, by_rank=self.by_rank)

    def _spec_of(self, processes: Sequence[Process]) -> StepSpec:
        """Returns the step spec of the generation that has these processes."""
        return self._elastic_specs.on(len(processes)) if self._is_elastic else self.spec

    def _parts(self, processes: Sequence[Process], cut: ChunkAssignment = DEFAULT_ASSIGNMENT) -> ShardedState:
        """Returns the converter for the parts of a generation's processes."""
        return ShardedState(
            spec=self._spec_of(processes),
            cut=cut,
            snapshots=self.snapshots,
            by_rank=self.by_rank,
            is_elastic=self._is_elastic,
        )


def _load_up_to(
    directory: Path, identity: Mapping[str, Any], spec: StepSpec, step: int
) -> tuple[TrainState, RestorePlan] | None:
    """Reads the newest intact checkpoint up to an iteration, for ``spec``; returns None if there is none."""
    for older in reversed([s for s in checkpoint_steps(directory) if s <= step]):
        with suppress(SettingError):
            plan = plan_restore(directory, identity, older)
            return load_state(directory, plan, spec), plan
    return None


def _failure(command: CheckpointCommand, checkpoints: Path, error: Exception) -> CommandFailed:
    reason = " ".join(str(error).split())
    if not isinstance(error, SettingError | RunError | OSError):
        traceback.print_exception(error)
        reason = f"{type(error).__name__}: {reason}"
    if isinstance(command, SaveCheckpoint):
        return CommandFailed("save", command.stamp.step, reason)
    if isinstance(command, Reshard):
        return CommandFailed("reshard", command.stamp.step, reason, command.generation)
    step = max(checkpoint_steps(checkpoints), default=None) if command.step is None else command.step
    return CommandFailed("load", step, reason, command.generation)


class ServiceShutdown:
    """Ends the process of a service after the last command, or when nobody reads its answers any more.

    If the supervisor was killed, the memory directory of the node is removed first. Workers try to remove it, too, but
    their coordination service died with the supervisor, and JAX may abort them before they have done so.

    Args:
        scratch: files that the processes of the run share.
    """

    def __init__(self, scratch: RunFiles):
        self._scratch, self._supervisor, self._lock = scratch, os.getppid(), threading.Lock()

    def __call__(self) -> NoReturn:
        """Ends this process."""
        with self._lock:  # a second thread must not end the process while the first is still removing the directory
            deadline = time.monotonic() + _ORPHANED_S
            while os.getppid() == self._supervisor and time.monotonic() < deadline:
                time.sleep(0.01)
            if os.getppid() != self._supervisor:
                self._scratch.remove()
            os._exit(0)  # a regular exit would wait minutes for threads that Orbax leaves behind after a failed save


def run_checkpoint_service(
    experiment: Experiment,
    run_dir: Path,
    scratch: RunFiles,
    commands: TextIO,
    *,
    by_rank: bool,
    init_from: WeightSource | None = None,
) -> NoReturn:
    """Runs the checkpoint service: carries out commands and answers on standard output, then ends the process.

    Commands and answers are lines of ``swift.elastic.transport.messages``. JAX must not have created a backend before.

    Args:
        experiment: settings of the run.
        run_dir: run directory.
        scratch: files that the processes of the run share.
        commands: stream of commands.
        by_rank: whether each expert rank is a process of its own, rather than each worker.
        init_from: run whose weights this run begins with; None for random weights.
    """
    leave = ServiceShutdown(scratch)
    output = LineWriter(leave)
    configure_jax(experiment, num_devices=1)
    service = CheckpointService(
        experiment=experiment,
        checkpoints=run_dir / "checkpoints",
        snapshots=scratch.snapshots,
        by_rank=by_rank,
        data=scratch.data(),
        handed_over=scratch.handed_over,
        init_from=init_from,
    )
    try:
        with writes_checkpoints(run_dir):
            clean_up_saves(service.checkpoints)
            service.rehearse()
            service.serve(commands, output.write)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    leave()
