"""The training loop: batches in, iterations, and a run directory out."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from swift.checkpoint import checkpoint_path, checkpoint_steps, load_checkpoint, save_checkpoint
from swift.data import Batch, Loader
from swift.errors import RunError, SettingError
from swift.mesh import move_rows, source_rows
from swift.pipeline import Engine, Prepare, Program, TrainState
from swift.record import RunDirectory, check_new_run, check_same_run, measure, read_run
from swift.topology import Worker
from swift.train.experiment import Experiment
from swift.train.failures import FailureSource
from swift.train.interrupt import Interrupt
from swift.train.metrics import step_record
from swift.train.progress import Progress

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
        prepare: ``next`` plans and compiles ahead what a failure or a return of one worker would need.
    """

    run_dir: Path
    config_text: str
    resume: bool = False
    stop_at: int | None = None
    profile: tuple[int, int] | None = None
    prepare: Prepare = "next"


def train(experiment: Experiment, options: TrainOptions, failures: FailureSource | None = None) -> dict[str, Any]:
    """Runs an experiment to its end, or to ``options.stop_at``.

    Args:
        experiment: what to run.
        options: how.
        failures: who is down when; the experiment's list unless given.

    Returns:
        The summary; ``summary.json`` is written at the end of the run only.

    Raises:
        SettingError: a setting, the run directory or the checkpoint is not usable; nothing was written.
        RunError: the loss was no longer finite, or a stage has lost its last worker.
        KeyboardInterrupt: Ctrl-C, after the iteration in which it came.
    """
    last_step = experiment.num_steps if options.stop_at is None else options.stop_at
    done = _steps_done(options)
    _check_range(experiment, options, done, last_step)
    failures = experiment.failure_list if failures is None else failures
    loader, validation = experiment.loader("train"), experiment.loader("validation")
    with (
        experiment.engine(failures.failed(done + 1, done + 1), options.prepare) as engine,
        Interrupt() as interrupt,
    ):
        state, loader_state = _begin(experiment, engine.program, options, done)
        if loader_state is not None:
            loader.restore(loader_state)
        with (
            _open_run(options, done) as directory,
            Progress(options.run_dir.name, last_step, done + 1) as progress,
        ):
            run = _Run(experiment, options, engine, failures, directory, progress, interrupt)
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


def _open_run(options: TrainOptions, done: int) -> RunDirectory:
    if options.resume:
        return RunDirectory.resume(options.run_dir, options.config_text, done, MAY_CHANGE)
    return RunDirectory.create(options.run_dir, options.config_text)


@dataclass(frozen=True)
class _Run:
    """A run under way: what computes, and where its record goes."""

    experiment: Experiment
    options: TrainOptions
    engine: Engine
    failures: FailureSource
    directory: RunDirectory
    progress: Progress
    interrupt: Interrupt

    def announce(self, done: int) -> None:
        program = self.engine.program
        topology, parameters = program.live.topology, program.gpt.num_parameters
        self.directory.log_event(
            "resume" if done else "start",
            done,
            parameters=parameters,
            pipelines=topology.num_pipelines,
            stages=topology.num_stages,
            ranks=topology.num_expert_ranks,
            live_workers=program.live.num_rows,
            kind=self.experiment.ranks,
            device=jax.devices()[0].device_kind,
            jax=jax.__version__,
            ends_bytes_per_worker=program.ends_bytes,
            state_bytes_per_worker=program.state_bytes,
        )
        workers = f"{topology.num_pipelines} pipelines x {topology.num_stages} stages x " if not program.is_lone else ""
        self.progress.note(
            f"{parameters / 1e6:.1f}M parameters, {workers}{topology.num_expert_ranks} {self.experiment.ranks} expert "
            f"ranks; embedding, head and their moments: {program.ends_bytes / 1e6:.1f} MB per worker"
        )
        if self.experiment.window > 1:
            self.progress.note(
                f"windows of {self.experiment.window} iterations keep the state before them: "
                f"{program.state_bytes / 1e6:.1f} MB more per worker"
            )

    def loop(self, state: TrainState, loader: Loader, validation: Loader, last_step: int) -> None:
        engine, done = self.engine, int(jax.device_get(state.step)[0])
        started, rows = time.perf_counter(), None
        batches = self._next(loader, done, last_step)
        while done < last_step:
            first, end = done + 1, done + len(batches)
            state, is_changed = self._follow(state, first, end)
            if rows is None or is_changed:
                rows = engine.put(batches)
            position = loader.state()  # what a checkpoint after these iterations has to hold
            with self._profiled(first, end):
                with jax.transfer_guard("disallow"):
                    finish = engine.start(state, batches, rows)
                upcoming = self._next(loader, end, last_step)  # while the devices compute
                rows = engine.put(upcoming) if upcoming else None
                outcome = finish()
            done, state, batches = end, outcome.state, upcoming
            step_s = (time.perf_counter() - started) / len(outcome.metrics)
            records = [
                step_record(step, metrics, step_s, engine.program.live.num_rows)
                | self._pipeline_record(was_discarded=outcome.was_discarded)
                for step, metrics in enumerate(outcome.metrics, first)
            ]
            self._keep(records, state, validation, position)
            if self.interrupt.requested:
                self._interrupted(done)
                raise KeyboardInterrupt
            started = time.perf_counter()
        self.directory.log_event("finish" if done == self.experiment.num_steps else "stop", done)

    def _next(self, loader: Loader, done: int, last_step: int) -> list[Batch]:
        """The batches of the next window; of one iteration, where something is due before a window's end."""
        window, profile = self.experiment.window, self.options.profile or (0, 0)
        inside = range(done + 1, done + window)
        is_cut = done + window > last_step or any(
            self._is_due(step, self.experiment.eval_every)
            or self._is_due(step, self.experiment.checkpoint_every)
            or step in (profile[0] - 1, profile[1])
            for step in inside
        )
        return [next(loader) for _ in range(1 if is_cut else window)] if done < last_step else []

    def _follow(self, state: TrainState, first: int, end: int) -> tuple[TrainState, bool]:
        """Goes on with the workers that are live in these iterations: the state, and whether they are others."""
        engine, failed = self.engine, self.failures.failed(first, end)
        before = engine.configuration.failed
        if failed == before:
            return state, False
        self._check_stages(failed, first)
        state, change = engine.reconfigure(state, failed)
        costs = {"failed": _names(failed - before), "rejoined": _names(before - failed)}
        self.directory.log_event(
            "reconfigure", first, **costs, **asdict(change), **self._pipeline_record(), live_workers=engine.num_live
        )
        who = " and ".join(f"{', '.join(names)} {how}" for how, names in costs.items() if names)
        took = change.plan_ms + change.compile_ms + change.move_ms
        self.progress.note(
            f"iteration {first}: worker {who}; {engine.num_live} live, period {engine.period_ratio:.2f} x fault-free; "
            f"{took:.0f} ms to reconfigure{'' if change.prepared else ', not prepared'}"
        )
        return state, True

    def _pipeline_record(self, **more: Any) -> dict[str, Any]:
        """What the plan says of an iteration; nothing for a lone worker."""
        if self.engine.program.is_lone:
            return {}
        plan = self.engine.configuration
        return {"bubble_share": plan.bubble_share, "period_ratio": self.engine.period_ratio, **more}

    def _keep(
        self, records: list[dict[str, Any]], state: TrainState, validation: Loader, position: dict[str, Any]
    ) -> None:
        """Logs the iterations of a window; evaluates and saves what is due at its end."""
        done = records[-1]["step"]
        for record in records:
            self._check_finite(record["step"], loss=record["loss"], grad_norm=record["grad_norm"])
            if record["step"] == done and self._is_due(done, self.experiment.eval_every):
                num_batches = min(self.experiment.num_eval_batches, validation.num_batches_per_epoch)
                record["validation_loss"] = self._evaluate(state, validation, num_batches)
            self.directory.log_step(record)
            self.progress.update(record)
        if self._is_due(done, self.experiment.checkpoint_every) or done == self.options.stop_at:
            # The loss above is of the parameters before the update; a checkpoint holds those after it.
            self._check_finite(done, loss_after=self._evaluate(state, validation, num_batches=1))
            self._save(state, position, done)

    def summarize(self) -> dict[str, Any]:
        experiment = self.experiment
        facts = {
            "name": self.options.run_dir.name,
            "placement": experiment.placement.name,
            "layout": experiment.optimizer.layout,
            "ranks": experiment.ranks,
            "pipelines": experiment.topology.num_pipelines,
            "stages": experiment.topology.num_stages,
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

    def _evaluate(self, state: TrainState, validation: Loader, num_batches: int) -> float:
        loss, tokens, steps = 0.0, 0, self.engine.steps
        for index in range(num_batches):
            sums = jax.device_get(steps.evaluate(state, steps.put([validation.batch(index)])))
            loss, tokens = loss + float(sums.loss[0]), tokens + int(sums.tokens[0])
        return loss / max(tokens, 1)

    def _save(self, state: TrainState, position: dict[str, Any], done: int) -> None:
        started, program = time.perf_counter(), self.engine.program
        kept, specs = replace(state, slots={}), replace(program.specs, slots={})  # slots are made anew from the rest
        stages = program.stages_mesh()
        path = save_checkpoint(
            self.directory.checkpoints_path,
            done,
            move_rows(kept, program.live, stages, specs, program.live.first_rows),
            identity=self.experiment.identity(),
            extra={"loader": position},
            num_kept=self.experiment.num_checkpoints_kept,
        )
        self.directory.log_event("checkpoint", done, path=path.name, save_ms=1000 * (time.perf_counter() - started))

    def _check_stages(self, failed: frozenset[Worker], step: int) -> None:
        """Stops the run if nobody is left who serves a stage or has its state; a worker may serve another than its own.

        Who is back has copied the state of its stage before anybody else fails.
        """
        live, before = self.engine.program.live, self.engine.configuration.failed
        manned = {stage for pipeline, stage in live.topology.workers if (pipeline, stage) not in failed}
        kept = {place.stage for place in live.places if place.worker not in failed}
        kept |= {stage for _, stage in before - failed}
        lost = [stage for stage in range(live.topology.num_stages) if stage not in manned & kept]
        if not lost:
            return
        self.directory.log_event("stage_lost", step, stages=lost, failed=_names(failed))
        stages = ", ".join(map(str, lost))
        raise RunError(f"stage {stages} has no live worker left at iteration {step}: stopped; {self._how_to_go_on()}")

    def _check_finite(self, step: int, **measured: float) -> None:
        if all(map(np.isfinite, measured.values())):
            return
        self.directory.log_event("not_finite", step, **measured)
        values = ", ".join(f"{name} = {value}" for name, value in measured.items())
        raise RunError(f"{values} at iteration {step}: stopped; {self._how_to_go_on(_REMEDY)}")

    def _how_to_go_on(self, remedy: str = "") -> str:
        steps = checkpoint_steps(self.directory.checkpoints_path)
        if not steps:
            return "there is no checkpoint yet; start again in another --run-dir" + (
                f" with {remedy}" if remedy else ""
            )
        how = f"go on with --run-dir {self.options.run_dir} --resume" + (f" and {remedy}" if remedy else "")
        return f"the checkpoint of iteration {steps[-1]} is kept; {how}"

    def _interrupted(self, done: int) -> None:
        self.directory.log_event("interrupt", done)
        steps = checkpoint_steps(self.directory.checkpoints_path)
        self.progress.note(
            f"interrupted after iteration {done}; "
            + (f"--resume goes on from iteration {steps[-1]}" if steps else "no checkpoint was saved yet")
        )

    @contextmanager
    def _profiled(self, first: int, end: int) -> Iterator[None]:
        """Traces the iterations that the user asked for; no window begins before them and ends among them."""
        window = self.options.profile
        if window and first == window[0]:
            jax.profiler.start_trace(self.directory.path / "profile")
        with jax.profiler.StepTraceAnnotation("iteration", step_num=first) if window else nullcontext():
            yield
        if window and end == window[1]:
            jax.profiler.stop_trace()
            self.progress.note(f"profiler trace of iterations {window[0]}-{window[1]} in {self.directory.path}/profile")


def _names(workers: frozenset[Worker]) -> list[str]:
    return [f"{d}:{p}" for d, p in sorted(workers)]
