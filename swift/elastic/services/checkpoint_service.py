"""The checkpoint service, also called keeper: a process that writes and reads the checkpoints of a run of processes.

It is in no generation: inside of one Orbax would wait for all processes, and for ever where one of them dies. The state
comes and goes through shared memory, see ``swift.elastic.state.shared_memory_store``; its slots are left out, they are
made anew.
"""

import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np

from swift.checkpoint import (
    Manifest,
    RestorePlan,
    StateSplit,
    checkpoint_path,
    checkpoint_steps,
    plan_restore,
    record_restore,
    restore_facts,
    restore_lines,
    save_checkpoint,
    save_facts,
    set_aside_newer,
)
from swift.data import check_same_data
from swift.elastic.elastic_programs import ElasticPrograms, is_elastic
from swift.elastic.membership import Process, Stamp, processes_of
from swift.elastic.services.reshard_state import Resharding
from swift.elastic.state import Handover, LedgerCounts, SharedMemoryStore, cut_parts, join_parts
from swift.elastic.transport import (
    CHECKPOINT_ANSWERS,
    CHECKPOINT_COMMANDS,
    Anew,
    CheckpointAnswer,
    CheckpointCommand,
    Failed,
    Kept,
    LoadCheckpoint,
    Loaded,
    Reshard,
    SaveCheckpoint,
    Saved,
)
from swift.errors import RunError, SettingError
from swift.experts.placement import unsound_placement
from swift.mesh import part_shapes
from swift.pipeline import StepSpec, TrainState
from swift.runlog import sync_record
from swift.train import Experiment
from swift.train.checkpoints import extra_of, keep_elsewhere, ledger_after, load_state, split_of

_PATIENCE_S = 20.0
"""For the record of an iteration whose state is there."""


@dataclass(frozen=True)
class CheckpointService:
    """Writes and reads the checkpoints of a run, which are those of ``swift train``.

    Attributes:
        experiment: the experiment that is run.
        checkpoints: the directory of the run's checkpoints.
        keeps: the directory of the processes' states, see ``SharedMemoryStore``.
        by_rank: whether a process is an expert rank, and not a whole worker.
        data: the state of a loader of the run.
        handed: the directory of the states that they hand over, see ``Handover``; for elastic runs only.
    """

    experiment: Experiment
    checkpoints: Path
    keeps: Path
    by_rank: bool
    data: Mapping[str, Any]
    handed: Path | None = None

    @cached_property
    def spec(self) -> StepSpec:
        """The run's, on the mesh that holds what a checkpoint has."""
        return self._programs.on(self.experiment.topology.num_expert_ranks)

    @cached_property
    def _programs(self) -> ElasticPrograms:
        return ElasticPrograms(self.experiment)

    @cached_property
    def _counts(self) -> LedgerCounts:
        return LedgerCounts(self.experiment, self.checkpoints, self.keeps / "losses.json")

    @cached_property
    def split(self) -> StateSplit:
        """How the state falls into a dense part and experts."""
        return split_of(self.spec)

    @cached_property
    def _specs(self) -> TrainState:
        return replace(self.spec.specs, slots={})

    def serve(self, commands: TextIO, answers: TextIO) -> None:
        """Follows one command after the other, until there are no more; each is finished before the next is read."""
        for line in commands:
            answers.write(CHECKPOINT_ANSWERS.line(self.follow(CHECKPOINT_COMMANDS.read(line))))
            answers.flush()

    def follow(self, command: CheckpointCommand) -> CheckpointAnswer:
        """Does what a command says; a failure is an answer, and does not raise."""
        begun = time.perf_counter()
        try:
            match command:
                case SaveCheckpoint(stamp, holders, is_full, True):
                    write = partial(self.save, stamp, holders, is_full=is_full)
                    return Kept(stamp.step, keep_elsewhere(self.checkpoints, stamp.step, write))
                case SaveCheckpoint(stamp, holders, is_full):
                    facts = save_facts(self.save(stamp, holders, is_full=is_full))
                    path = checkpoint_path(self.checkpoints, stamp.step)
                    return Saved(stamp.step, time.perf_counter() - begun, path.name, facts)
                case LoadCheckpoint(step, generation, processes):
                    plan = self.load(generation, processes, step)
                    after = ledger_after(self.experiment, plan)
                    return Loaded(Stamp(generation, plan.step), restore_lines(plan, after), restore_facts(plan, after))
                case Reshard():
                    lines, facts = self.recutting.follow(command)
                    stamp = Stamp(command.generation, command.stamp.step)
                    return Anew(stamp, lines, facts | {"recut_ms": 1000 * (time.perf_counter() - begun)})
        except Exception as error:  # a checkpoint that cannot be saved, for whatever reason, must not cost the next one
            return self._failure(command, error)

    def save(
        self, stamp: Stamp, holders: Sequence[Process], directory: Path | None = None, *, is_full: bool = False
    ) -> Manifest:
        """Writes a checkpoint of the parts that processes have kept.

        Args:
            stamp: of the state.
            holders: whose parts: one process for every stage, or for every stage and rank.
            directory: for checkpoints; the run's unless given.
            is_full: save all experts, whatever K is; that of the last iteration always is.

        Returns:
            The checkpoint's manifest.

        Raises:
            RunError: a part is damaged or not of this state, the weights are not finite, or a class has no slot.
            OSError: a part is not there, or the checkpoint cannot be written.
        """
        spec = self._spec_of(holders)
        shapes, split = spec.abstract(), split_of(spec)
        like = part_shapes(self._specs, shapes, len(self._ranks(0)))
        parts = [SharedMemoryStore(self.keeps, process).load(stamp, like) for process in self._in_order(holders)]
        state = join_parts(self._specs, shapes, parts)
        _check_state(state, stamp.step, spec.experts.num_classes)
        ledger, config = self._counts.at(spec, stamp.step, _PATIENCE_S), self.experiment.checkpoint
        if directory is None:  # what the ledger counts must not be lost while the checkpoint stays
            sync_record(self.checkpoints.parent)
        chosen_LK = ledger.choose(config.selection, full=is_full or stamp.step == self.experiment.num_steps)
        manifest = save_checkpoint(
            directory or self.checkpoints,
            stamp.step,
            split.host_snapshot(state, chosen_LK),
            split,
            ledger,
            identity=self.experiment.identity(),
            # Batches are by number of iteration, which is all that the loader has to know.
            extra=extra_of(spec, dict(self.data) | {"next_step": stamp.step}),
            num_kept=config.num_kept,
        )
        self._counts.forget_losses(stamp.step)
        return manifest

    def load(self, generation: int, processes: Sequence[Process], step: int | None = None) -> RestorePlan:
        """Reads a checkpoint and keeps for every process its part; all processes of a stage and rank get the same.

        Newer checkpoints are set aside: the run resumes from this one, and they would outlive those that it writes.

        Args:
            generation: of the stamp under which the parts are kept.
            processes: of that generation.
            step: of the checkpoint; the newest that is sound unless given.

        Returns:
            Where everything came from.

        Raises:
            SettingError: there is no such checkpoint, it is of another model or other data, or damaged.
            OSError: a part cannot be kept.
        """
        plan = plan_restore(self.checkpoints, self.experiment.identity(), step)
        host = load_state(self.checkpoints, plan, self._spec_of(processes))
        check_same_data(plan.manifest.extra["loader"], self.data)
        for nth, process in enumerate(processes):
            rank = nth if self._is_elastic else process.rank
            parts = cut_parts(self._specs, host, process.worker[1], self._ranks(rank))
            SharedMemoryStore(self.keeps, process).save(Stamp(generation, plan.step), parts)
        for aside in set_aside_newer(self.checkpoints, plan.step):
            print(f"{aside} is set aside: the run resumes from an older one", file=sys.stderr)
        record_restore(self.checkpoints, plan.manifest, ledger_after(self.experiment, plan))
        self._counts.forget_losses(sys.maxsize)
        return plan

    @cached_property
    def recutting(self) -> Resharding:
        """Reshards states."""
        assert self.handed is not None, "only the ranks of an elastic run become others"
        everybody = processes_of(self.experiment.topology, by_rank=self.by_rank)
        handover = Handover(self.handed, self.keeps, everybody)
        return Resharding(self._programs, handover, self._counts, self._stored)

    def rehearse(self) -> None:
        """Runs once what will be needed, but for files, so that nobody waits for it later."""
        self.spec.abstract()  # traces the model
        num_ranks = self.experiment.topology.num_expert_ranks
        for count in (num_ranks - 1, num_ranks) if self._is_elastic else ():
            self.recutting.rehearse(max(1, count))

    def _stored(self, spec: StepSpec, step: int) -> tuple[TrainState, RestorePlan] | None:
        """What the newest sound checkpoint up to an iteration has, as a program has it; None: there is none."""
        for older in reversed([one for one in checkpoint_steps(self.checkpoints) if one <= step]):
            with suppress(SettingError):
                plan = plan_restore(self.checkpoints, self.experiment.identity(), older)
                return load_state(self.checkpoints, plan, spec), plan
        return None

    @property
    def _is_elastic(self) -> bool:
        return is_elastic(self.experiment, by_rank=self.by_rank)

    def _spec_of(self, processes: Sequence[Process]) -> StepSpec:
        """The program of a generation."""
        return self._programs.on(len(processes)) if self._is_elastic else self.spec

    def _ranks(self, rank: int) -> Sequence[int]:
        """The expert ranks of a process."""
        return (rank,) if self.by_rank else range(self.experiment.topology.num_expert_ranks)

    def _in_order(self, holders: Sequence[Process]) -> list[Process]:
        """The processes of the first stage by rank, then those of the next."""
        if self._is_elastic:
            assert len(set(holders)) == len(holders), f"holders are {holders}"
            return sorted(holders)
        places = processes_of(replace(self.experiment.topology, num_pipelines=1), by_rank=self.by_rank)
        found = {(process.worker[1], process.rank): process for process in holders}
        wanted = [(process.worker[1], process.rank) for process in places]
        assert sorted((process.worker[1], process.rank) for process in holders) == wanted, f"holders are {holders}"
        return [found[place] for place in wanted]

    def _failure(self, command: CheckpointCommand, error: Exception) -> Failed:
        why = " ".join(str(error).split())
        if not isinstance(error, SettingError | RunError | OSError):
            traceback.print_exception(error)
            why = f"{type(error).__name__}: {why}"
        if isinstance(command, SaveCheckpoint):
            return Failed("save", command.stamp.step, why)
        if isinstance(command, Reshard):
            return Failed("recut", command.stamp.step, why, command.generation)
        *_, newest = None, *checkpoint_steps(self.checkpoints)
        return Failed("load", newest if command.step is None else command.step, why, command.generation)


def _check_state(state: Any, step: int, num_classes: int) -> None:
    """Raises RunError where a state must not take the place of a good checkpoint."""
    found = sorted(set(state.step.tolist()))
    if found != [step]:
        raise RunError(f"the parts are of the state after iteration {found}, not {step}")
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.master)):
        raise RunError(f"the weights are not finite after iteration {step}")
    flaw = unsound_placement(state.placement.reshape(-1, *state.placement.shape[2:]), num_classes)
    if flaw is not None:
        raise RunError(f"{flaw} after iteration {step}: mend the policy of Experiment.placement")
