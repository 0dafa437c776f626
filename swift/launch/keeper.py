"""The keeper: a process of its own that writes checkpoints of a run of real processes, and reads them.

It is in no epoch: inside of one Orbax would wait for all processes, and for ever where one of them dies. The state
comes and goes through shared memory, see ``swift.launch.keep``; its slots are left out, they are made anew.
"""

import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, TextIO

import jax
import numpy as np

from swift.checkpoint import (
    Ledger,
    Manifest,
    Plan,
    Split,
    checkpoint_path,
    checkpoint_steps,
    plan_restore,
    read_manifest,
    record_restore,
    restore_facts,
    restore_lines,
    save_checkpoint,
    save_facts,
    set_aside_newer,
    settle,
)
from swift.data import Loader
from swift.errors import RunError, SettingError
from swift.launch.counts import counted
from swift.launch.keep import Keep
from swift.launch.keeper_wire import Answer, Command, Failed, Load, Loaded, Save, Saved, answer_line, read_command
from swift.launch.parts import cut_parts, join_parts
from swift.launch.surroundings import settle_jax, take_output
from swift.mesh import storage_mesh
from swift.mesh.epochs import Process, Stamp, processes_of
from swift.mesh.sharing import part_shapes
from swift.pipeline import Program, TrainState
from swift.record import METRICS
from swift.train import Experiment
from swift.train.saved_state import extra_of, first_ledger, ledger_after, ledger_for, load_state, split_of

_PATIENCE_S = 20.0
"""For the record of an iteration whose state is there."""


@dataclass(frozen=True)
class Keeper:
    """Writes and reads the checkpoints of a run, which are those of ``swift train``.

    Attributes:
        experiment: what is run.
        checkpoints: the directory of the run's checkpoints.
        keeps: where processes keep their states, see ``Keep``.
        by_rank: whether a process is an expert rank, and not a whole worker.
    """

    experiment: Experiment
    checkpoints: Path
    keeps: Path
    by_rank: bool

    @cached_property
    def program(self) -> Program:
        """The run's, on the mesh that holds what a checkpoint has."""
        return self.experiment.program(storage_mesh(self.experiment.topology))

    @cached_property
    def _loader(self) -> Loader:
        return self.experiment.loader("train")

    @cached_property
    def split(self) -> Split:
        """How the state falls into a dense part and experts."""
        return split_of(self.program)

    @cached_property
    def _specs(self) -> TrainState:
        return replace(self.program.specs, slots={})

    def serve(self, commands: TextIO, answers: TextIO) -> None:
        """Follows one command after the other, until there are no more; each is finished before the next is read."""
        for line in commands:
            answers.write(answer_line(self.follow(read_command(line))))
            answers.flush()

    def follow(self, command: Command) -> Answer:
        """Does what a command says; what fails is told, and does not raise."""
        begun = time.perf_counter()
        try:
            match command:
                case Save(stamp, holders):
                    facts = save_facts(self.save(stamp, holders))
                    path = checkpoint_path(self.checkpoints, stamp.step)
                    return Saved(stamp.step, time.perf_counter() - begun, path.name, facts)
                case Load(step, epoch):
                    plan = self.load(epoch, step)
                    after = ledger_after(self.experiment, plan)
                    return Loaded(Stamp(epoch, plan.step), restore_lines(plan, after), restore_facts(plan, after))
        except Exception as error:  # a checkpoint that cannot be saved, for whatever reason, must not cost the next one
            return self._failure(command, error)

    def save(self, stamp: Stamp, holders: Sequence[Process]) -> Manifest:
        """Writes a checkpoint of the parts that processes have kept.

        Args:
            stamp: of the state.
            holders: whose parts: one process for every stage, or for every stage and rank.

        Returns:
            The checkpoint's manifest.

        Raises:
            RunError: a part is damaged or not of this state, or the weights are not finite.
            OSError: a part is not there, or the checkpoint cannot be written.
        """
        shapes = self.program.abstract()
        like = part_shapes(self._specs, shapes, len(self._ranks(0)))
        parts = [Keep(self.keeps, process).load(stamp, like) for process in self._in_order(holders)]
        state = join_parts(self._specs, shapes, parts)
        _check_state(state, stamp.step)
        ledger, config = self._ledger(stamp.step), self.experiment.checkpoint
        chosen_LK = ledger.choose(config.selection, full=stamp.step == self.experiment.num_steps)
        return save_checkpoint(
            self.checkpoints,
            stamp.step,
            self.split.host_snapshot(state, chosen_LK),
            self.split,
            ledger,
            identity=self.experiment.identity(),
            # Batches are by number of iteration, which is all that the loader has to know.
            extra=extra_of(self.program, self._loader.state() | {"next_step": stamp.step}),
            num_kept=config.num_kept,
        )

    def _ledger(self, step: int) -> Ledger:
        """What is known of the checkpoints before an iteration, and counted up to it."""
        base, ledger = 0, first_ledger(self.experiment, self.split)
        for older in reversed(checkpoint_steps(self.checkpoints)):
            # One of the same iteration, of which some were run again, is about to be replaced.
            with suppress(SettingError):
                if older < step:
                    manifest = read_manifest(checkpoint_path(self.checkpoints, older), "checkpoint")
                    ledger, base = ledger_for(self.program, manifest, manifest.ledger), older
                    break
        return counted(ledger, self.checkpoints.parent / METRICS, base, step, _PATIENCE_S)

    def load(self, epoch: int, step: int | None = None) -> Plan:
        """Reads a checkpoint and keeps for every process its part; all processes of a stage and rank get the same.

        Newer checkpoints are set aside: the run goes on from this one, and they would outlive those that it writes.

        Args:
            epoch: of the stamp under which the parts are kept.
            step: of the checkpoint; the newest that is sound unless given.

        Returns:
            Where everything came from.

        Raises:
            SettingError: there is no such checkpoint, it is of another model or other data, or damaged.
            OSError: a part cannot be kept.
        """
        plan = plan_restore(self.checkpoints, self.experiment.identity(), step)
        host, plan = load_state(self.checkpoints, plan, self.program)
        self._loader.restore(plan.manifest.extra["loader"])  # for its checks
        for process in processes_of(self.experiment.topology, by_rank=self.by_rank):
            parts = cut_parts(self._specs, host, process.worker[1], self._ranks(process.rank))
            Keep(self.keeps, process).save(Stamp(epoch, plan.step), parts)
        for aside in set_aside_newer(self.checkpoints, plan.step):
            print(f"{aside} does not count any more: the run goes on from an older one", file=sys.stderr)
        record_restore(self.checkpoints, plan.manifest, ledger_after(self.experiment, plan))
        return plan

    def _ranks(self, rank: int) -> Sequence[int]:
        """The expert ranks of a process."""
        return (rank,) if self.by_rank else range(self.experiment.topology.num_expert_ranks)

    def _in_order(self, holders: Sequence[Process]) -> list[Process]:
        """The processes of the first stage by rank, then those of the next."""
        places = processes_of(replace(self.experiment.topology, num_pipelines=1), by_rank=self.by_rank)
        found = {(process.worker[1], process.rank): process for process in holders}
        wanted = [(process.worker[1], process.rank) for process in places]
        assert sorted((process.worker[1], process.rank) for process in holders) == wanted, f"holders are {holders}"
        return [found[place] for place in wanted]

    def _failure(self, command: Command, error: Exception) -> Failed:
        why = " ".join(str(error).split())
        if not isinstance(error, SettingError | RunError | OSError):
            traceback.print_exception(error)
            why = f"{type(error).__name__}: {why}"
        if isinstance(command, Save):
            return Failed("save", command.stamp.step, why)
        *_, newest = None, *checkpoint_steps(self.checkpoints)
        return Failed("load", newest if command.step is None else command.step, why)


def run(experiment: Experiment, run_dir: Path, keeps: Path, by_rank: bool, commands: TextIO) -> NoReturn:
    """The process: follows commands and answers on standard output, lines of ``swift.launch.keeper_wire``.

    It ends where the commands end, when it has followed them all. JAX must not have started.

    Args:
        experiment: what is run.
        run_dir: the run directory.
        keeps: where processes keep their states, see ``Keep``.
        by_rank: whether a process is an expert rank, and not a whole worker.
        commands: where commands come from.
    """
    answers = take_output()
    settle_jax(experiment, num_devices=1)
    keeper = Keeper(experiment, run_dir / "checkpoints", keeps, by_rank)
    settle(keeper.checkpoints)
    keeper.program.abstract()  # traces the model: better now than when somebody waits
    try:
        with suppress(BrokenPipeError):  # nobody is left to hear the answer
            keeper.serve(commands, answers)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # in peace it would wait for threads of a failed save, which Orbax leaves behind for minutes


def _check_state(state: Any, step: int) -> None:
    """Raises RunError where a state must not take the place of a good checkpoint."""
    found = sorted(set(state.step.tolist()))
    if found != [step]:
        raise RunError(f"the parts are of the state after iteration {found}, not {step}")
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.master)):
        raise RunError(f"the weights are not finite after iteration {step}")
