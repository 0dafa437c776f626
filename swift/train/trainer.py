"""The training loop: batches in, iterations, and a run directory out."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import jax
import numpy as np

from swift.checkpoint import RestorePlan, checkpoint_steps, restore_lines
from swift.data import Batch, DataError, Loader, find_index
from swift.errors import RunError
from swift.experts.placement import unsound_placement
from swift.mesh import own_row
from swift.pipeline import Engine, TrainState
from swift.runlog import Lease, RunDirectory
from swift.train.checkpoints import Checkpointer, ledger_after
from swift.train.emulated_cluster import EmulatedCluster, StateLost
from swift.train.interrupt import Interrupt
from swift.train.progress import ProgressDisplay
from swift.train.settings import Experiment, FailureSource
from swift.train.start import (
    TrainOptions,
    begin,
    check_range,
    conclude,
    find_start,
    is_to_conclude,
    next_length,
    open_run,
    own_run,
    try_placement,
)
from swift.train.step_records import mean_loss, plan_facts, step_record
from swift.train.summary import summarize
from swift.train.window_rules import is_due

_MENDED = "once the data are mended"
_REMEDY = "a lower OptimizerConfig.peak_learning_rate or a smaller OptimizerConfig.clip_norm"


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
        RunError: the loss was no longer finite, a stage has lost its last worker, or another has taken the directory.
        KeyboardInterrupt: Ctrl-C or SIGTERM; a checkpoint is kept of the iteration in which it came.
    """
    try_placement(experiment)
    with own_run(options) as lease:
        return _train(experiment, options, failures, lease)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _train(
    experiment: Experiment, options: TrainOptions, failures: FailureSource | None, lease: Lease
) -> dict[str, Any]:
    last_step = experiment.num_steps if options.stop_at is None else options.stop_at
    start = find_start(experiment, options)
    done = 0 if start is None else start.step
    if is_to_conclude(experiment, options, done):
        return conclude(experiment, options, lease, jax.devices()[0].device_kind)
    check_range(experiment, options, done, last_step)
    listed = experiment.failure_list
    failures = listed if failures is None else failures
    first = done + next_length(experiment, options, done, last_step)
    corpus = None if options.corpora is None else find_index(experiment.data, options.corpora, _tell)
    loader, validation = experiment.loader("train", corpus), experiment.loader("validation", corpus)
    with (
        EmulatedCluster(experiment, options.prepare, failures, done + 1, first) as cluster,
        Interrupt(options.stopping_s) as interrupt,
    ):
        cluster.check(listed)
        spec = cluster.engine.spec
        first_state = [begin(experiment, spec, options, start)]
        changes = [] if start is None else loader.restore(start.manifest.extra["loader"])
        with (
            open_run(experiment, options, done, lease) as directory,
            Checkpointer(experiment, spec, directory, start) as saver,
            ProgressDisplay(options.run_dir.name, last_step, done + 1) as progress,
        ):
            run = _Run(experiment, options, cluster, directory, saver, progress, interrupt)
            run.announce(done, start, changes)
            if experiment.checkpoint.every:
                progress.saved(saver.newest)
            # Given away: kept here, it would take memory as long as the run.
            try:
                run.loop(first_state.pop(), loader, validation, last_step)
            except (OSError, RunError) as error:
                raise run.broken_off(error) from None
            return summarize(experiment, directory, jax.devices()[0].device_kind)


@dataclass(frozen=True)
class _Run:
    """A run under way: what computes, and where its record goes."""

    experiment: Experiment
    options: TrainOptions
    cluster: EmulatedCluster
    directory: RunDirectory
    saver: Checkpointer
    progress: ProgressDisplay
    interrupt: Interrupt

    @property
    def engine(self) -> Engine:
        """What runs the live."""
        return self.cluster.engine

    def announce(self, done: int, start: RestorePlan | None, changes: Sequence[str]) -> None:
        spec = self.engine.spec
        topology, parameters = spec.live.topology, spec.gpt.num_parameters
        self.directory.log_event(
            "resume" if done else "start",
            done,
            parameters=parameters,
            pipelines=topology.num_pipelines,
            stages=topology.num_stages,
            ranks=topology.num_expert_ranks,
            live_workers=spec.live.num_live,
            failed=self.cluster.down,
            kind=self.experiment.ranks,
            device=jax.devices()[0].device_kind,
            jax=jax.__version__,
            ends_bytes_per_worker=spec.embedding_and_head_bytes,
            state_bytes_per_worker=spec.state_bytes,
            stash_bytes_per_rank=self.engine.stash_bytes,
        )
        self._tell_plan(done)
        workers = (
            f"{topology.num_pipelines} pipelines x {topology.num_stages} stages x " if not spec.is_single_worker else ""
        )
        self.progress.note(
            f"{parameters / 1e6:.1f}M parameters, {workers}{topology.num_expert_ranks} {self.experiment.ranks} expert "
            f"ranks; embedding, head and their moments: {spec.embedding_and_head_bytes / 1e6:.1f} MB per worker"
        )
        if start is not None:
            for line in restore_lines(start, ledger_after(self.experiment, start)):
                self.progress.note(line)
        for line in changes:
            self.directory.log_event("data_changed", done, text=line)
            self.progress.note(line)
        if self.experiment.window > 1:
            clip = self.experiment.optimizer.clip_norm
            self.progress.note(
                f"windows of {self.experiment.window} iterations keep the state before them: "
                f"{spec.state_bytes / 1e6:.1f} MB more per worker"
                + ("" if clip is None else f"; where the gradient's norm is above {clip:g} they are run again")
            )

    def loop(self, state: TrainState, loader: Loader, validation: Loader, last_step: int) -> None:
        done = int(own_row(state.step))
        started, rows = time.perf_counter(), None
        batches, trouble = self._next(loader, done, last_step)
        if trouble is not None:
            raise RunError(f"{trouble}: stopped; {self._how_to_go_on()}, {_MENDED}") from trouble
        while done < last_step:
            first, end = done + 1, done + len(batches)
            self.saver.snapshot(self.engine.spec, state, done)
            state, is_changed = self._follow(state, first, end)
            engine = self.engine
            if rows is None or is_changed:
                rows = engine.put(batches)
            position = loader.state()  # what a checkpoint after these iterations has to hold
            with self._profiled(first, end):
                with jax.transfer_guard("disallow"):
                    finish = engine.start(state, batches, rows)
                upcoming, trouble = self._next(loader, end, last_step)  # while the devices compute
                rows = engine.put(upcoming) if upcoming else None
                outcome = finish()
                del finish  # which holds the state before
            done, state, batches = end, outcome.state, upcoming
            step_s = (time.perf_counter() - started) / len(outcome.metrics)
            records = [
                step_record(step, metrics, step_s, engine.spec)
                | self._pipeline_record(was_discarded=outcome.was_discarded)
                for step, metrics in enumerate(outcome.metrics, first)
            ]
            try:
                self._keep(records, state, validation, position)
            except DataError as error:
                trouble = error
            if trouble is not None:
                self._end_without_data(state, position, done, trouble)
            for why in engine.troubles():
                self.directory.log_event("prepare_failed", done, error=why)
                self.progress.note(f"could not be prepared {why}")
            self._follow_save(wait=False)
            self.interrupt.hold()
            if self.interrupt.requested:
                self._interrupted(state, position, done)
                raise KeyboardInterrupt
            started = time.perf_counter()
        self._end_save()
        self.directory.log_event("finish" if done == self.experiment.num_steps else "stop", done)

    def _next(self, loader: Loader, done: int, last_step: int) -> tuple[list[Batch], DataError | None]:
        """The batches of what comes next, none at the end; or why they cannot be read, to be told when it is time."""
        count = next_length(self.experiment, self.options, done, last_step) if done < last_step else 0
        try:
            return [next(loader) for _ in range(count)], None
        except DataError as error:
            return [], error

    def _follow(self, state: TrainState, first: int, end: int) -> tuple[TrainState, bool]:
        """Goes on with those who are live in these iterations: the state, and whether they are others."""
        down = self.cluster.change(first, end)
        if down is None:
            return state, False
        self._follow_save(wait=True)
        try:
            followed = self.cluster.follow(state, down, first, self.saver)
        except StateLost as lost:
            self.directory.log_event(lost.event, first, **lost.facts)
            raise RunError(f"{lost}: stopped; {self._how_to_go_on(lost.remedy)}") from None
        engine = self.engine
        self.saver.snapshot(engine.spec, followed.state, first - 1)
        self.directory.log_event(
            "reconfigure",
            first,
            **followed.facts,
            **self._pipeline_record(),
            live_workers=engine.num_live,
            live_ranks=engine.spec.live.num_ranks,
            stash_bytes_per_rank=engine.stash_bytes,
        )
        self._tell_plan(first)
        for line in followed.lines:
            self.progress.note(f"iteration {first}: {line}")
        return followed.state, True

    def _tell_plan(self, step: int) -> None:
        """Records what the live run from now on; nothing for a lone worker."""
        if not self.engine.spec.is_single_worker:
            self.directory.log_event("plan", step, **plan_facts(self.engine.steps))

    def _pipeline_record(self, **more: Any) -> dict[str, Any]:
        """What the plan says of an iteration; nothing for a lone worker."""
        if self.engine.spec.is_single_worker:
            return {}
        return {"bubble_share": self.engine.bubble_share, "period_ratio": self.engine.period_ratio, **more}

    def _keep(
        self, records: list[dict[str, Any]], state: TrainState, validation: Loader, position: dict[str, Any]
    ) -> None:
        """Logs the iterations of a window; evaluates and saves what is due at its end."""
        done = records[-1]["step"]
        for record in records:
            self._check_placed(record["step"], record.get("misplaced"))
            self._check_finite(record["step"], loss=record["loss"], grad_norm=record["grad_norm"])
            trouble = None
            if record["step"] == done and self._is_due(done, self.experiment.eval_every):
                try:
                    record["validation_loss"] = self._evaluate(state, validation, self.experiment.num_eval_batches)
                except DataError as error:
                    trouble = error
            self.directory.log_step(record)
            self.saver.count(record)
            self.progress.update(record)
            if trouble is not None:
                raise trouble
        is_end = done in (self.experiment.num_steps, self.options.stop_at)
        if self._is_due(done, self.experiment.checkpoint.every) or done == self.options.stop_at:
            # The loss and the placement above are those before the update; a checkpoint holds those after it.
            self._check_placed(done, self._misplaced(state))
            self._check_finite(done, loss_after=self._evaluate(state, validation, num_batches=1))
            self._follow_save(wait=True)  # one at a time
            self.saver.save(self.engine.spec, state, position, done, full=is_end)

    def _is_due(self, done: int, every: int) -> bool:
        return is_due(done, every, self.experiment.num_steps)

    def _evaluate(self, state: TrainState, validation: Loader, num_batches: int) -> float:
        return mean_loss(partial(self.engine.evaluate, state), validation, num_batches)

    def _follow_save(self, *, wait: bool) -> None:
        """Tells what has come of the checkpoint under way; one that failed is tried again, or the next has to do.

        Raises:
            RunError: its numbers are not finite.
        """
        lines = self.saver.follow(wait=wait)
        if self.saver.is_spoilt:
            raise RunError(f"{lines[-1]}: stopped; {self._how_to_go_on(_REMEDY)}")
        for line in lines:
            self.progress.note(line)
        if self.experiment.checkpoint.every:
            self.progress.saved(self.saver.newest)

    def _end_save(self) -> None:
        """Waits for the last checkpoint as long as it is tried again; raises RunError where it is not saved."""
        while self.saver.is_busy:
            self.saver.wait(1.0)
            self._follow_save(wait=False)
        self._check_saved()

    def _check_saved(self) -> None:
        """Raises RunError where the last checkpoint was not saved, once it is kept where it can be."""
        kept = self.saver.keep_unsaved()
        if kept is not None:
            raise RunError(f"the last checkpoint was not saved: stopped; {kept}; {self._newest()}")

    def _end_without_data(self, state: TrainState, position: dict[str, Any], done: int, trouble: DataError) -> NoReturn:
        """Ends a run whose data cannot be read any more, with a checkpoint of the last iteration that had them."""
        self._save_last(state, position, done)
        self.directory.log_event("data_lost", done, error=str(trouble))
        raise RunError(f"{trouble}: stopped; {self._how_to_go_on()}, {_MENDED}") from trouble

    def broken_off(self, error: OSError | RunError) -> RunError:
        """The error that ends a run, once its unsaved state is kept where it can be, even if nothing is recorded."""
        with suppress(OSError, RunError):
            self.saver.follow(wait=True)
        if isinstance(error, OSError):
            return RunError(f"{error}: stopped; {self._how_to_go_on()}")
        kept = self.saver.keep_unsaved()
        return error if kept is None else RunError(f"{error}; {kept}")

    def _check_finite(self, step: int, **measured: float) -> None:
        if all(map(np.isfinite, measured.values())):
            return
        self.saver.follow(wait=True)
        self.directory.log_event("not_finite", step, **measured)
        values = ", ".join(f"{name} = {value}" for name, value in measured.items())
        raise RunError(f"{values} at iteration {step}: stopped; {self._how_to_go_on(_REMEDY)}")

    def _misplaced(self, state: TrainState) -> str | None:
        placement_PLNS = np.asarray(jax.device_get(state.placement))
        layers = placement_PLNS.reshape(-1, *placement_PLNS.shape[2:])
        return unsound_placement(layers, self.experiment.experts.num_classes)

    def _check_placed(self, step: int, flaw: str | None) -> None:
        if flaw is None:
            return
        self.saver.follow(wait=True)
        self.directory.log_event("misplaced", step, why=flaw)
        policy, remedy = self.experiment.placement, "a policy that gives every class a slot"
        raise RunError(
            f"Experiment.placement = {policy!r}: {flaw} at iteration {step}: stopped; {self._how_to_go_on(remedy)}"
        )

    def _newest(self) -> str:
        newest = max(checkpoint_steps(self.directory.checkpoints_path), default=None)
        return "no other checkpoint is there" if newest is None else f"the checkpoint of iteration {newest} is there"

    def _how_to_go_on(self, remedy: str = "") -> str:
        kept = self.saver.keep_unsaved()
        if kept is not None:
            return f"{kept}; {self._newest()}" + (f"; resume with {remedy}" if remedy else "")
        steps = checkpoint_steps(self.directory.checkpoints_path)
        if not steps:
            return "there is no checkpoint yet; start again in another --run-dir" + (
                f" with {remedy}" if remedy else ""
            )
        how = f"go on with --run-dir {self.options.run_dir} --resume" + (f" and {remedy}" if remedy else "")
        return f"the checkpoint of iteration {steps[-1]} is kept; {how}"

    def _save_last(self, state: TrainState, position: dict[str, Any], done: int) -> None:
        """Saves an iteration after which no other follows, unless it is saved."""
        self._follow_save(wait=True)
        if done not in checkpoint_steps(self.directory.checkpoints_path):
            self.saver.save(self.engine.spec, state, position, done, full=True)
            self._follow_save(wait=True)

    def _interrupted(self, state: TrainState, position: dict[str, Any], done: int) -> None:
        """Keeps the last iteration, also where a run has no checkpoints otherwise: ``--resume`` needs one."""
        self.progress.note(f"stopping: saves iteration {done}; a second Ctrl-C or SIGTERM ends at once")
        self._save_last(state, position, done)
        self.directory.log_event("interrupt", done)
        self._check_saved()
        self.progress.note(f"interrupted after iteration {done}, which is saved; --resume goes on from it")

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
