"""The checkpoint service: a process that writes and reads the checkpoints of a run of processes.

It is a member of no generation: within one, Orbax would wait for all processes, and wait forever if one of them died.
States pass through shared memory, see ``swift.elastic.state.shared_memory_store``, without slots, which are recomputed.
"""

import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax

from swift.checkpoint.partial.expert_units import StateSplit
from swift.checkpoint.storage.directory import checkpoint_path, checkpoint_steps, set_aside_newer
from swift.checkpoint.storage.manifest import Manifest
from swift.checkpoint.storage.message_texts import restore_facts, restore_lines, save_facts
from swift.checkpoint.storage.reader import RestorePlan, plan_restore, record_restore
from swift.checkpoint.storage.writer import save_checkpoint
from swift.data.loader import check_same_data
from swift.elastic.elastic_ranks import ElasticSpecs, is_elastic
from swift.elastic.membership.members import Process, Stamp, processes_of
from swift.elastic.services.checkpoint_parts import CheckpointParts
from swift.elastic.services.reshard_state import Resharding
from swift.elastic.state.handover import Handover
from swift.elastic.state.ledger_counts import LedgerCounts
from swift.elastic.transport.checkpoint_messages import (
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
from swift.errors import RunError, SettingError
from swift.pipeline.runtime.step_spec import StepSpec
from swift.pipeline.train_state import TrainState
from swift.runlog.run_directory import sync_record
from swift.schedules.plans.holders import OWN_CUT, BlockHolders
from swift.train.checkpoints.fork import WeightSource
from swift.train.checkpoints.rescue import keep_elsewhere
from swift.train.checkpoints.saved_state import check_savable, extra_of, ledger_after, load_state, split_of
from swift.train.settings.experiment import Experiment
from swift.train.settings.for_storage import for_storage

_RECORD_S = 20.0
"""Time limit for the record of an iteration whose state is being saved, in seconds."""


@dataclass(frozen=True, kw_only=True)
class CheckpointService:
    """Writes and reads the checkpoints of a run, in the format of ``swift train``.

    Attributes:
        experiment: settings of the run.
        checkpoints: directory of the run's checkpoints.
        snapshots: directory of states to be saved and of restored ones, see ``SharedMemoryStore``.
        by_rank: whether a process is an expert rank, rather than a whole worker.
        data: state of a loader of the run.
        handed_over: directory of the states that processes hand over, see ``Handover``; for elastic runs only.
        init_from: run whose weights this one begins with, as long as it has no checkpoint; None: it draws its own.
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
        """Step spec of the run on the mesh of a checkpoint."""
        return self._elastic_specs.on(self.experiment.topology.num_expert_ranks)

    @cached_property
    def _elastic_specs(self) -> ElasticSpecs:
        return ElasticSpecs(for_storage(self.experiment))

    @cached_property
    def _counts(self) -> LedgerCounts:
        return LedgerCounts(self.experiment, self.checkpoints, self.snapshots / "losses.json")

    @cached_property
    def split(self) -> StateSplit:
        """Division of the state into a dense part and experts."""
        return split_of(self.spec)

    def serve(self, commands: Iterable[str], answer: Callable[[str], None]) -> None:
        """Carries out commands until there are no more; each is finished before the next is read.

        Args:
            commands: lines of commands.
            answer: function that sends the line of an answer.
        """
        for line in commands:
            answer(CHECKPOINT_ANSWERS.line(self.carry_out(CHECKPOINT_COMMANDS.read(line))))

    def carry_out(self, command: CheckpointCommand) -> CheckpointAnswer:
        """Carries out a command; a failure is an answer, and does not raise."""
        begun = time.perf_counter()
        try:
            match command:
                case SaveCheckpoint(stamp, holders, is_full, True, cut):
                    write = partial(self.save, stamp, holders, is_full=is_full, cut=cut)
                    return KeptElsewhere(stamp.step, keep_elsewhere(self.checkpoints, stamp.step, write))
                case SaveCheckpoint(stamp, holders, is_full, _, cut):
                    facts = save_facts(self.save(stamp, holders, is_full=is_full, cut=cut))
                    path = checkpoint_path(self.checkpoints, stamp.step)
                    return Saved(stamp.step, time.perf_counter() - begun, path.name, facts)
                case LoadCheckpoint(None, generation, processes) if self.init_from and not self._steps:
                    facts = self.begin(generation, processes)
                    lines = [f"passed over: {why}" for why in facts["passed_over"]]
                    return StateRestored(Stamp(generation, 0), lines, facts, is_origin=True)
                case LoadCheckpoint(step, generation, processes):
                    plan = self.load(generation, processes, step)
                    after = ledger_after(self.experiment, plan)
                    stamp, facts = Stamp(generation, plan.step), restore_facts(plan, after)
                    return StateRestored(stamp, restore_lines(plan, after), facts)
                case Reshard():
                    lines, facts = self.resharding.reshard(command)
                    facts |= {"reshard_ms": 1000 * (time.perf_counter() - begun)}
                    stamp = Stamp(command.generation, command.stamp.step)
                    return StateRestored(stamp, lines, facts, is_resharded=True)
        except Exception as error:  # a checkpoint that cannot be saved, for whatever reason, must not cost the next one
            return self._failure(command, error)

    def save(
        self,
        stamp: Stamp,
        holders: Sequence[Process],
        directory: Path | None = None,
        *,
        is_full: bool = False,
        cut: BlockHolders = OWN_CUT,
    ) -> Manifest:
        """Writes a checkpoint of the parts that processes have kept.

        Args:
            stamp: stamp of the state.
            holders: processes that have kept its parts: of whole workers that together have every block.
            directory: directory of checkpoints; that of the run unless given.
            is_full: whether to save all experts, whatever K is; after the last iteration all are saved anyway.
            cut: workers that hold each block of the parts; False: as in the run.

        Returns:
            The checkpoint's manifest.

        Raises:
            RunError: a part is damaged or of another state, weights are not finite, or an expert has no slot.
            OSError: a part does not exist, or the checkpoint cannot be written.
        """
        spec = self._spec_of(holders)
        split, state = split_of(spec), self._parts(holders, cut).joined(stamp, holders)
        check_savable(state, stamp.step, spec.experts.num_classes)
        ledger, config = self._counts.at(spec, stamp.step, _RECORD_S), self.experiment.checkpoint
        if directory is None:  # a record that the ledger counts must not be lost while the checkpoint stays
            sync_record(self.checkpoints.parent)
        chosen_LK = ledger.choose(config.selection, full=is_full or stamp.step == self.experiment.num_steps)
        manifest = save_checkpoint(
            directory or self.checkpoints,
            stamp.step,
            split.host_snapshot(state, chosen_LK),
            split,
            ledger,
            identity=self.experiment.identity(),
            # Batches depend on the number of the iteration alone, which is all that the loader has to know.
            extra=extra_of(spec, dict(self.data) | {"next_step": stamp.step}),
            num_kept=config.num_kept,
        )
        self._counts.forget_losses(stamp.step)
        return manifest

    def load(self, generation: int, processes: Sequence[Process], step: int | None = None) -> RestorePlan:
        """Reads a checkpoint and keeps every process's part; processes of the same stage and rank get the same part.

        Newer checkpoints are set aside, as the run resumes from this one.

        Args:
            generation: generation of the stamp under which the parts are kept.
            processes: processes of that generation.
            step: iteration of the checkpoint; the newest sound one unless given.

        Returns:
            The plan, with the source of every part of the state.

        Raises:
            SettingError: there is no such checkpoint, it is of another model or other data, or damaged.
            OSError: a part cannot be kept.
        """
        plan = plan_restore(self.checkpoints, self.experiment.identity(), step)
        host = load_state(self.checkpoints, plan, self._spec_of(processes))
        check_same_data(plan.manifest.extra["loader"], self.data)
        self._parts(processes).keep(host, Stamp(generation, plan.step), processes)
        for aside in set_aside_newer(self.checkpoints, plan.step):
            print(f"{aside} is set aside: the run resumes from an older one", file=sys.stderr)
        record_restore(self.checkpoints, plan.manifest, ledger_after(self.experiment, plan))
        self._counts.forget_losses(sys.maxsize)
        return plan

    def begin(self, generation: int, processes: Sequence[Process]) -> dict[str, Any]:
        """Reads the weights that the run begins with, keeps every process's part of that state; returns their origin.

        Args:
            generation: generation of the stamp under which the parts are kept.
            processes: processes of that generation.

        Raises:
            SettingError: there is no sound checkpoint of the other run, or it is of another model.
            OSError: a part cannot be kept.
        """
        assert self.init_from is not None
        plan = self.init_from.plan(self.experiment)
        host = jax.device_get(self._spec_of(processes).stored.lay_out(self.init_from.parameters(plan)))
        self._parts(processes).keep(host, Stamp(generation, 0), processes)
        return self.init_from.facts(plan)

    @property
    def _steps(self) -> list[int]:
        return checkpoint_steps(self.checkpoints)

    @cached_property
    def resharding(self) -> Resharding:
        """Resharding of this run's states."""
        assert self.handed_over is not None, "only the ranks of an elastic run change"
        processes = processes_of(self.experiment.topology, by_rank=self.by_rank)
        handover = Handover(self.handed_over, self.snapshots, processes)
        return Resharding(self._elastic_specs, handover, self._counts, self._load_up_to)

    def rehearse(self) -> None:
        """Runs once what will be needed, but without files, so that no process has to wait for compilation later."""
        self.spec.abstract()  # traces the model
        num_ranks = self.experiment.topology.num_expert_ranks
        for count in (num_ranks - 1, num_ranks) if self._is_elastic else ():
            self.resharding.rehearse(max(1, count))

    def _load_up_to(self, spec: StepSpec, step: int) -> tuple[TrainState, RestorePlan] | None:
        """Reads the newest sound checkpoint up to an iteration, on ``spec``; returns None if there is none."""
        for older in reversed([one for one in self._steps if one <= step]):
            with suppress(SettingError):
                plan = plan_restore(self.checkpoints, self.experiment.identity(), older)
                return load_state(self.checkpoints, plan, spec), plan
        return None

    @property
    def _is_elastic(self) -> bool:
        return is_elastic(self.experiment, by_rank=self.by_rank)

    def _spec_of(self, processes: Sequence[Process]) -> StepSpec:
        """Returns the step spec of a generation."""
        return self._elastic_specs.on(len(processes)) if self._is_elastic else self.spec

    def _parts(self, processes: Sequence[Process], cut: BlockHolders = OWN_CUT) -> CheckpointParts:
        """Returns the parts of a generation's processes."""
        return CheckpointParts(
            spec=self._spec_of(processes),
            cut=cut,
            snapshots=self.snapshots,
            by_rank=self.by_rank,
            is_elastic=self._is_elastic,
        )

    def _failure(self, command: CheckpointCommand, error: Exception) -> CommandFailed:
        why = " ".join(str(error).split())
        if not isinstance(error, SettingError | RunError | OSError):
            traceback.print_exception(error)
            why = f"{type(error).__name__}: {why}"
        if isinstance(command, SaveCheckpoint):
            return CommandFailed("save", command.stamp.step, why)
        if isinstance(command, Reshard):
            return CommandFailed("reshard", command.stamp.step, why, command.generation)
        *_, newest = None, *self._steps
        return CommandFailed("load", newest if command.step is None else command.step, why, command.generation)
