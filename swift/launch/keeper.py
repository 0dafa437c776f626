"""The keeper: a process of its own that writes checkpoints of a run of real processes, and reads them.

It is in no epoch: inside of one Orbax would wait for all processes, and for ever where one of them dies. The state
comes and goes through shared memory, see ``swift.launch.keep``; its slots are left out, they are made anew.
"""

import os
import shutil
import sys
import tempfile
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

from swift.checkpoint import checkpoint_path, checkpoint_steps, load_checkpoint, save_checkpoint
from swift.checkpoint.arrays import is_complete
from swift.data import Loader
from swift.errors import RunError, SettingError
from swift.launch.keep import Keep
from swift.launch.keeper_wire import Answer, Command, Failed, Load, Loaded, Save, Saved, answer_line, read_command
from swift.launch.parts import cut_parts, join_parts
from swift.launch.surroundings import settle_jax, take_output
from swift.mesh import storage_mesh
from swift.mesh.epochs import Process, Stamp, processes_of
from swift.mesh.sharing import part_shapes
from swift.pipeline import Program, TrainState
from swift.train import Experiment

_EARLIER, _ASIDE = ".earlier", ".aside"


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
                    path = self.save(stamp, holders)
                    return Saved(stamp.step, time.perf_counter() - begun, path.name)
                case Load(step, epoch):
                    return Loaded(self.load(epoch, step))
        except Exception as error:  # a checkpoint that cannot be saved, for whatever reason, must not cost the next one
            return self._failure(command, error)

    def save(self, stamp: Stamp, holders: Sequence[Process]) -> Path:
        """Writes a checkpoint of the parts that processes have kept.

        Args:
            stamp: of the state.
            holders: whose parts: one process for every stage, or for every stage and rank.

        Returns:
            The checkpoint's path.

        Raises:
            RunError: a part is damaged or not of this state, or the weights are not finite.
            OSError: a part is not there, or the checkpoint cannot be written.
        """
        shapes = self.program.abstract()
        like = part_shapes(self._specs, shapes, len(self._ranks(0)))
        parts = [Keep(self.keeps, process).load(stamp, like) for process in self._in_order(holders)]
        state = join_parts(self._specs, shapes, parts)
        _check_state(state, stamp.step)
        _check_writable(self.checkpoints)
        _settle(self.checkpoints)  # Orbax's threads may have written on after the last save had failed
        path = checkpoint_path(self.checkpoints, stamp.step)
        if is_complete(path):  # of iterations that were run again; Orbax would remove it first
            path.rename(path.with_suffix(_EARLIER))
        try:
            return self._write(state, stamp.step)
        finally:
            _settle(self.checkpoints)

    def _write(self, state: TrainState, step: int) -> Path:
        return save_checkpoint(
            self.checkpoints,
            step,
            # Arrays of JAX, as `swift train` saves them: Orbax keeps other metadata of NumPy's.
            self.program.live.put(state, self._specs),
            identity=self.experiment.identity(),
            # Batches are by number of iteration, which is all that the loader has to know.
            extra={"loader": self._loader.state() | {"next_step": step}},
            num_kept=self.experiment.num_checkpoints_kept,
        )

    def load(self, epoch: int, step: int | None = None) -> Stamp:
        """Reads a checkpoint and keeps for every process its part; all processes of a stage and rank get the same.

        Newer checkpoints are set aside: the run goes on from this one, and they would outlive those that it writes.

        Args:
            epoch: of the stamp under which the parts are kept.
            step: of the checkpoint; the newest unless given.

        Returns:
            The stamp.

        Raises:
            SettingError: there is no such checkpoint, it is of another model or other data, or damaged.
            OSError: a part cannot be kept.
        """
        step = self._newest() if step is None else step
        path, stamp = checkpoint_path(self.checkpoints, step), Stamp(epoch, step)
        state, extra = load_checkpoint(path, self.program.abstract(), self.experiment.identity())
        self._loader.restore(extra["loader"])  # for its checks
        host = jax.tree.map(np.asarray, state)
        for process in processes_of(self.experiment.topology, by_rank=self.by_rank):
            parts = cut_parts(self._specs, host, process.worker[1], self._ranks(process.rank))
            Keep(self.keeps, process).save(stamp, parts)
        for newer in checkpoint_steps(self.checkpoints):
            if newer > step:
                _set_aside(checkpoint_path(self.checkpoints, newer))
        return stamp

    def _newest(self) -> int:
        steps = checkpoint_steps(self.checkpoints)
        if not steps:
            raise SettingError("checkpoint", str(self.checkpoints), "holds no checkpoint")
        return steps[-1]

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
    _settle(keeper.checkpoints)
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


def _check_writable(directory: Path) -> None:
    """Raises OSError where no checkpoint can be made; Orbax would leave threads behind that wait for it."""
    directory.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryDirectory(prefix=".", dir=directory).cleanup()


def _settle(directory: Path) -> None:
    """After a save that may have failed, now or in an earlier life: whole checkpoints stay, that one or its forerunner.

    What is not whole is removed: it would keep a full disk full.
    """
    for path in directory.glob("step-*"):
        if not is_complete(path):
            shutil.rmtree(path, ignore_errors=True)
    for earlier in directory.glob(f"step-*{_EARLIER}"):
        path = earlier.with_suffix("")
        if is_complete(path):
            shutil.rmtree(earlier)
        else:
            earlier.rename(path)


def _set_aside(path: Path) -> None:
    """Renames a checkpoint so that it does not count any more."""
    aside = path.with_suffix(_ASIDE)
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    print(f"{path} is now {aside.name}: the run goes on from an older one", file=sys.stderr)
