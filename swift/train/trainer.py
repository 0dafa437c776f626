"""The training loop: batches in, iterations, and a run directory out."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from swift.checkpoint import checkpoint_path, checkpoint_steps, load_checkpoint, save_checkpoint
from swift.data import Loader
from swift.errors import RunError, SettingError
from swift.record import RunDirectory, check_new_run, check_same_run, measure, read_run
from swift.train.experiment import Experiment, put_batch
from swift.train.interrupt import Interrupt
from swift.train.metrics import step_record
from swift.train.progress import Progress
from swift.train.state import Program, TrainState
from swift.train.step import evaluate_step, train_step

MAY_CHANGE = (
    *(f"Experiment.{n}" for n in ("eval_every", "num_eval_batches", "checkpoint_every", "num_checkpoints_kept")),
    *(f"OptimizerConfig.{n}" for n in ("peak_learning_rate", "final_learning_rate", "clip_norm")),
)
"""Settings that a resumed run may have changed: what is recorded, and what helps after a loss that was not finite."""

_REMEDY = "a lower OptimizerConfig.peak_learning_rate or a smaller OptimizerConfig.clip_norm"


@dataclass(frozen=True)
class TrainOptions:
    """How this invocation of a run goes, apart from what it computes.

    Attributes:
        run_dir: the run directory.
        config_text: the operative configuration, to be kept there.
        resume: continue the run that is there.
        stop_at: stop, with a checkpoint, after this iteration, though the run goes further.
        profile: (first, last) iteration to trace with the profiler, or None.
    """

    run_dir: Path
    config_text: str
    resume: bool = False
    stop_at: int | None = None
    profile: tuple[int, int] | None = None


def train(experiment: Experiment, options: TrainOptions) -> dict[str, Any]:
    """Runs an experiment to its end, or to ``options.stop_at``.

    Returns:
        The summary; ``summary.json`` is written at the end of the run only.

    Raises:
        SettingError: a setting, the run directory or the checkpoint is not usable; nothing was written.
        RunError: the loss was no longer finite.
        KeyboardInterrupt: Ctrl-C, after the iteration in which it came.
    """
    last_step = experiment.num_steps if options.stop_at is None else options.stop_at
    done = _steps_done(options)
    _check_range(experiment, options, done, last_step)
    program = experiment.program()
    loader, validation = experiment.loader("train"), experiment.loader("validation")
    state, loader_state = _begin(experiment, program, options, done)
    if loader_state is not None:
        loader.restore(loader_state)
    with (
        Interrupt() as interrupt,
        _open_run(options, done) as directory,
        Progress(options.run_dir.name, last_step, done + 1) as progress,
    ):
        run = _Run(experiment, options, program, directory, progress, interrupt)
        run.announce(done)
        run.loop(state, loader, validation, last_step)
        return run.summarize()


def _steps_done(options: TrainOptions) -> int:
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


def _check_range(experiment: Experiment, options: TrainOptions, done: int, last_step: int) -> None:
    if done >= experiment.num_steps:
        raise SettingError("--resume", str(options.run_dir), f"has nothing left to do: it is at iteration {done}")
    if not done < last_step <= experiment.num_steps:
        allowed = f"must be from {done + 1}, the next iteration, to Experiment.num_steps = {experiment.num_steps}"
        raise SettingError("--stop-at", last_step, allowed)
    if options.profile and not done < options.profile[0] <= options.profile[1] <= last_step:
        first, last = options.profile
        raise SettingError("--profile", f"{first}:{last}", f"must lie within iterations {done + 1}:{last_step}")


def _begin(experiment: Experiment, program: Program, options: TrainOptions, done: int) -> tuple[TrainState, Any]:
    """The state to go on from, and the loader's state if there is one."""
    if not done:
        return program.init(jax.random.key(experiment.seed)), None
    directory = options.run_dir / "checkpoints"
    try:
        state, extra = load_checkpoint(checkpoint_path(directory, done), program.abstract(), experiment.identity())
    except SettingError as error:
        older = [step for step in checkpoint_steps(directory) if step < done]
        hint = f"; move it away to go on from iteration {older[-1]}" if older else ""
        raise SettingError(error.setting, error.value, error.allowed + hint) from error
    return program.fill_slots(state), extra["loader"]


def _open_run(options: TrainOptions, done: int) -> RunDirectory:
    if options.resume:
        return RunDirectory.resume(options.run_dir, options.config_text, done, MAY_CHANGE)
    return RunDirectory.create(options.run_dir, options.config_text)


@dataclass(frozen=True)
class _Run:
    """A run under way: its program, and where its record goes."""

    experiment: Experiment
    options: TrainOptions
    program: Program
    directory: RunDirectory
    progress: Progress
    interrupt: Interrupt

    def announce(self, done: int) -> None:
        live = self.program.live
        self.directory.log_event(
            "resume" if done else "start",
            done,
            parameters=self.program.gpt.num_parameters,
            ranks=live.num_ranks,
            kind=self.experiment.ranks,
            device=jax.devices()[0].device_kind,
            jax=jax.__version__,
            ends_bytes_per_worker=self.program.ends_bytes,
        )
        self.progress.note(
            f"{self.program.gpt.num_parameters / 1e6:.1f}M parameters, {live.num_ranks} {self.experiment.ranks} expert "
            f"ranks; embedding, head and their moments: {self.program.ends_bytes / 1e6:.1f} MB per worker"
        )

    def loop(self, state: TrainState, loader: Loader, validation: Loader, last_step: int) -> None:
        step_function, evaluate = train_step(self.program), evaluate_step(self.program)
        done = int(jax.device_get(state.step)[0])
        started = time.perf_counter()
        batch = put_batch(next(loader), self.program.live)
        while done < last_step:
            position = loader.state()  # what a checkpoint of this iteration has to hold
            with self._profiled(done + 1):
                with jax.transfer_guard("disallow"):
                    state, metrics = step_function(state, batch)
                if done + 1 < last_step:  # while the devices compute
                    batch = put_batch(next(loader), self.program.live)
                host = {name: value[0] for name, value in jax.device_get(metrics).items()}
            done += 1
            now = time.perf_counter()
            record = step_record(done, host, now - started, len(self.program.live.workers))
            self._check_finite(done, loss=record["loss"], grad_norm=record["grad_norm"])
            if self._is_due(done, self.experiment.eval_every):
                num_batches = min(self.experiment.num_eval_batches, validation.num_batches_per_epoch)
                record["validation_loss"] = self._evaluate(evaluate, state, validation, num_batches)
            self.directory.log_step(record)
            self.progress.update(record)
            if self._is_due(done, self.experiment.checkpoint_every) or done == self.options.stop_at:
                # The loss above is of the parameters before the update; a checkpoint holds those after it.
                self._check_finite(done, loss_after=self._evaluate(evaluate, state, validation, num_batches=1))
                self._save(state, position, done)
            if self.interrupt.requested:
                self._interrupted(done)
                raise KeyboardInterrupt
            started = time.perf_counter()
        self.directory.log_event("finish" if done == self.experiment.num_steps else "stop", done)

    def summarize(self) -> dict[str, Any]:
        experiment = self.experiment
        facts = {
            "name": self.options.run_dir.name,
            "placement": experiment.placement.name,
            "layout": experiment.optimizer.layout,
            "ranks": experiment.ranks,
            "device": jax.devices()[0].device_kind,
            "jax_version": jax.__version__,
            "num_steps": experiment.num_steps,
            "target_loss": experiment.target_loss,
        }
        # Computed from the record, so that a resumed run and an unbroken one say the same.
        run = read_run(self.directory.path)
        summary = facts | measure(run, experiment.target_loss)
        if run.metrics[-1]["step"] == experiment.num_steps:
            self.directory.write_summary(summary)
        return summary

    def _is_due(self, done: int, every: int) -> bool:
        return bool(every) and (done % every == 0 or done == self.experiment.num_steps)

    def _evaluate(self, evaluate: Any, state: TrainState, validation: Loader, num_batches: int) -> float:
        loss, tokens = 0.0, 0
        for index in range(num_batches):
            sums = jax.device_get(evaluate(state, put_batch(validation.batch(index), self.program.live)))
            loss, tokens = loss + float(sums.loss[0]), tokens + int(sums.tokens[0])
        return loss / max(tokens, 1)

    def _save(self, state: TrainState, position: dict[str, Any], done: int) -> None:
        started = time.perf_counter()
        path = save_checkpoint(
            self.directory.checkpoints_path,
            done,
            replace(state, slots={}),  # made anew from the rest
            identity=self.experiment.identity(),
            extra={"loader": position},
            num_kept=self.experiment.num_checkpoints_kept,
        )
        self.directory.log_event("checkpoint", done, path=path.name, save_ms=1000 * (time.perf_counter() - started))

    def _check_finite(self, step: int, **measured: float) -> None:
        if all(map(np.isfinite, measured.values())):
            return
        self.directory.log_event("not_finite", step, **measured)
        values = ", ".join(f"{name} = {value}" for name, value in measured.items())
        steps, run_dir = checkpoint_steps(self.directory.checkpoints_path), self.options.run_dir
        how = f"there is no checkpoint yet; start again in another --run-dir with {_REMEDY}"
        if steps:
            kept = f"the checkpoint of iteration {steps[-1]} is kept"
            how = f"{kept}; go on with --run-dir {run_dir} --resume and {_REMEDY}"
        raise RunError(f"{values} at iteration {step}: stopped; {how}")

    def _interrupted(self, done: int) -> None:
        self.directory.log_event("interrupt", done)
        steps = checkpoint_steps(self.directory.checkpoints_path)
        self.progress.note(
            f"interrupted after iteration {done}; "
            + (f"--resume goes on from iteration {steps[-1]}" if steps else "no checkpoint was saved yet")
        )

    @contextmanager
    def _profiled(self, step: int) -> Iterator[None]:
        window = self.options.profile
        if window and step == window[0]:
            jax.profiler.start_trace(self.directory.path / "profile")
        with jax.profiler.StepTraceAnnotation("iteration", step_num=step) if window else nullcontext():
            yield
        if window and step == window[1]:
            jax.profiler.stop_trace()
            self.progress.note(f"profiler trace of iterations {window[0]}-{window[1]} in {self.directory.path}/profile")
