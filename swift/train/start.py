"""Before a run begins: is there anything to do, from which state, and in which directory."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from swift.checkpoint import checkpoint_path, checkpoint_steps, load_checkpoint
from swift.errors import SettingError
from swift.mesh import move_rows, source_rows
from swift.pipeline import Prepare, Program, TrainState
from swift.record import RunDirectory, check_new_run, check_same_run
from swift.train.experiment import Experiment
from swift.train.recovery import window_length

MAY_CHANGE = (
    *(f"Experiment.{n}" for n in ("eval_every", "num_eval_batches", "checkpoint_every", "num_checkpoints_kept")),
    *(f"Experiment.{n}" for n in ("failures", "planner", "window", "memory_limit", "remat", "move_roles")),
    *(f"OptimizerConfig.{n}" for n in ("peak_learning_rate", "final_learning_rate", "clip_norm")),
)
"""Settings that a resumed run may have changed: what is recorded, who fails and how the same sums are computed, and
what helps after a loss that was not finite."""


@dataclass(frozen=True)
class TrainOptions:
    """How this invocation of a run goes, apart from what it computes.

    Attributes:
        run_dir: the run directory.
        config_text: the operative configuration, to be kept there.
        resume: continue the run that is there.
        stop_at: stop, with a checkpoint, after this iteration, though the run goes further.
        profile: (first, last) iteration to trace with the profiler, or None.
        prepare: ``next`` plans and compiles ahead what a failure or a return of one worker would need.
    """

    run_dir: Path
    config_text: str
    resume: bool = False
    stop_at: int | None = None
    profile: tuple[int, int] | None = None
    prepare: Prepare = "next"


def steps_done(options: TrainOptions) -> int:
    """The iteration to go on from, of the newest checkpoint; a wrong directory is refused before data are loaded."""
    if not options.resume:
        check_new_run(options.run_dir)
        return 0
    check_same_run(options.run_dir, options.config_text, MAY_CHANGE)
    steps = checkpoint_steps(options.run_dir / "checkpoints")
    if not steps:
        allowed = "holds no checkpoint to resume from; start again in another --run-dir"
        raise SettingError("--resume", str(options.run_dir), allowed)
    return steps[-1]


def check_range(experiment: Experiment, options: TrainOptions, done: int, last_step: int) -> None:
    """Raises SettingError where nothing is left to do, or what was asked for lies outside of it."""
    if done >= experiment.num_steps:
        raise SettingError("--resume", str(options.run_dir), f"has nothing left to do: it is at iteration {done}")
    if not done < last_step <= experiment.num_steps:
        allowed = f"must be from {done + 1}, the next iteration, to Experiment.num_steps = {experiment.num_steps}"
        raise SettingError("--stop-at", last_step, allowed)
    if options.profile and not done < options.profile[0] <= options.profile[1] <= last_step:
        first, last = options.profile
        raise SettingError("--profile", f"{first}:{last}", f"must lie within iterations {done + 1}:{last_step}")


def begin(experiment: Experiment, program: Program, options: TrainOptions, done: int) -> tuple[TrainState, Any]:
    """The state to go on from, and the loader's state if there is one."""
    if not done:
        return program.init(jax.random.key(experiment.seed)), None
    directory = options.run_dir / "checkpoints"
    saved = program.at(program.stages_mesh())
    try:
        state, extra = load_checkpoint(checkpoint_path(directory, done), saved.abstract(), experiment.identity())
    except SettingError as error:
        older = [step for step in checkpoint_steps(directory) if step < done]
        hint = f"; move it away to go on from iteration {older[-1]}" if older else ""
        raise SettingError(error.setting, error.value, error.allowed + hint) from error
    specs = replace(program.specs, slots={})
    state = move_rows(state, saved.live, program.live, specs, source_rows(saved.live, program.live))
    return program.fill_slots(state), extra["loader"]


def open_run(options: TrainOptions, done: int) -> RunDirectory:
    """The run's directory, made or opened again."""
    if options.resume:
        return RunDirectory.resume(options.run_dir, options.config_text, done, MAY_CHANGE)
    return RunDirectory.create(options.run_dir, options.config_text)


def next_length(experiment: Experiment, options: TrainOptions, done: int, last_step: int) -> int:
    """How many iterations come next as one program, see ``window_length``."""
    first, last = options.profile or (0, 0)
    periods = (experiment.eval_every, experiment.checkpoint_every)
    return window_length(experiment.window, done, last_step, periods, breaks=(first - 1, last))
