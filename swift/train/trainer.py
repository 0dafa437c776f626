"""A training run in one process: an experiment in, a run directory and a summary out."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from swift.checkpoint import RestorePlan, restore_lines
from swift.data import Loader, find_index
from swift.errors import RunError, renamed_settings
from swift.mesh import keep_programs
from swift.pipeline import TrainState
from swift.runlog import Lease, check_new_run
from swift.train.checkpoints import Checkpointer, ModelPlan, WeightSource, ledger_after
from swift.train.display import ProgressDisplay
from swift.train.emulated_cluster import EmulatedCluster
from swift.train.emulated_run import EmulatedWorkers, RunCheckpoints, RunRecord
from swift.train.interrupt import STOPPING, Interrupt
from swift.train.loop import TrainLoop
from swift.train.settings import Experiment, FailureSource, config_text, cuts_text, layers_of_stages
from swift.train.start import (
    TrainOptions,
    begin,
    check_range,
    conclude,
    find_start,
    find_weights,
    is_to_conclude,
    next_length,
    open_run,
    own_run,
    try_placement,
)
from swift.train.step_records import Utilization
from swift.train.summary import summarize


def train(
    experiment: Experiment, options: TrainOptions | Path | str, failures: FailureSource | None = None
) -> dict[str, Any]:
    """Runs an experiment to its end, or to ``options.stop_at``.

    Args:
        experiment: settings of the run.
        options: options of this invocation, or only its run directory.
        failures: failures by iteration; the experiment's list unless given.

    Returns:
        The summary; ``summary.json`` is written at the end of the run only.

    Raises:
        SettingError: a setting, the run directory or the checkpoint is not usable; nothing was written.
        RunError: the loss is not finite, a stage has lost its last worker, or another process has taken the directory.
        KeyboardInterrupt: Ctrl-C or SIGTERM; the iteration in which it came is saved.
    """
    if not isinstance(options, TrainOptions):
        options = TrainOptions(Path(options))
    if not options.config_text:
        options = replace(options, config_text=config_text(experiment))
    keep_programs()
    try_placement(experiment)
    with renamed_settings({"planner": "Experiment.planner"}), own_run(options) as lease:
        return _train(experiment, options, failures, lease)


def check_before(experiment: Experiment, options: TrainOptions) -> None:
    """Checks all of a run but its checkpoints, as it does itself when it starts; nothing is written.

    Raises:
        SettingError: a setting, the data or the run directory is not usable, or there is no plan for some failures.
    """
    if not options.resume:
        check_new_run(options.run_dir)
    try_placement(experiment)
    _load_data(experiment, options, lambda line: print(line, file=sys.stderr, flush=True))
    listed, length = experiment.failure_list, next_length(experiment, options, 0, experiment.num_steps)
    with renamed_settings({"planner": "Experiment.planner"}):
        EmulatedCluster(experiment, "none", listed, 1, length).check(listed)


def _load_data(experiment: Experiment, options: TrainOptions, report: Callable[[str], None]) -> tuple[Loader, Loader]:
    """Makes the loaders of training and validation."""
    corpus = None if options.corpora is None else find_index(experiment.data, options.corpora, report)
    return experiment.loader("train", corpus), experiment.loader("validation", corpus)


def _train(
    experiment: Experiment, options: TrainOptions, failures: FailureSource | None, lease: Lease
) -> dict[str, Any]:
    last_step = experiment.num_steps if options.stop_at is None else options.stop_at
    start = find_start(experiment, options)
    done = 0 if start is None else start.step
    if is_to_conclude(experiment, options, done):
        return conclude(experiment, options, lease, jax.devices()[0].device_kind)
    check_range(experiment, options, done, last_step)
    weights = find_weights(experiment, options)
    listed = experiment.failure_list
    failures = listed if failures is None else failures
    first = done + next_length(experiment, options, done, last_step)
    with ProgressDisplay(
        options.run_dir.name, last_step, done + 1, log_every=options.log_every, series=options.series
    ) as progress:
        progress.stage("reading the data")
        loader, validation = _load_data(experiment, options, progress.note)
        progress.stage("planning")
        cluster = EmulatedCluster(experiment, options.prepare, failures, done + 1, first)
        utilization = Utilization.of(cluster.engine.spec)  # before the cluster compiles ahead, which takes cores
        with cluster, Interrupt(options.stopping_s, lambda: progress.note(STOPPING)) as interrupt:
            cluster.check(listed)
            spec = cluster.engine.spec
            progress.stage("making the first state" if start is None else "loading the checkpoint", start is None)
            first_state = [begin(experiment, spec, options, start, weights)]
            changes = [] if start is None else loader.restore(start.manifest.extra["loader"])
            with (
                open_run(experiment, options, done, lease) as directory,
                Checkpointer(experiment, spec, directory, start) as checkpointer,
            ):
                record = RunRecord(directory, progress, utilization)
                checkpoints = RunCheckpoints(
                    experiment=experiment,
                    options=options,
                    cluster=cluster,
                    checkpointer=checkpointer,
                    record=record,
                    train=loader,
                )
                _announce(experiment, cluster, record, done, start, changes)
                if options.init_from is not None and weights is not None:
                    _announce_weights(options.init_from, weights, record)
                if experiment.checkpoint.every:
                    progress.saved(checkpointer.newest)
                progress.stage("compiling the first step")
                workers = EmulatedWorkers(
                    experiment=experiment,
                    options=options,
                    cluster=cluster,
                    checkpoints=checkpoints,
                    record=record,
                    interrupt=interrupt,
                    last_step=last_step,
                )
                loop = TrainLoop(experiment, loader, validation, workers, checkpoints, record.step)
                _run(loop, first_state, done, last_step, checkpoints)
                return summarize(experiment, directory, jax.devices()[0].device_kind)


def _run(
    loop: TrainLoop, first_state: list[TrainState], done: int, last_step: int, checkpoints: RunCheckpoints
) -> None:
    """Runs to the end of the invocation.

    Args:
        loop: training loop.
        first_state: state to begin with, alone in a list: kept by a caller, it would take memory as long as the run.
        done: iterations done.
        last_step: last iteration of the invocation.
        checkpoints: checkpoints of the run.
    """
    try:
        loop.run(first_state.pop(), done)
        checkpoints.finish()
        event = "finish" if last_step == loop.experiment.num_steps else "stop"
        checkpoints.record.directory.log_event(event, last_step)
    except (OSError, RunError) as error:
        raise checkpoints.failed(error) from None


def _announce_weights(source: WeightSource, weights: RestorePlan | ModelPlan, record: RunRecord) -> None:
    """Records and shows the run whose weights this one begins with."""
    facts = source.facts(weights)
    record.directory.log_event("init_from", 0, **facts)
    record.progress.note("begins with the weights of {run}, iteration {of_step}".format(**facts))
    for why in weights.passed_over:
        record.progress.note(f"passed over: {why}")


def _announce(
    experiment: Experiment,
    cluster: EmulatedCluster,
    record: RunRecord,
    done: int,
    start: RestorePlan | None,
    changes: Sequence[str],
) -> None:
    """Records and shows the run that starts, and the state from which it continues."""
    engine, directory, note = cluster.engine, record.directory, record.progress.note
    spec = engine.spec
    topology, parameters = spec.live.topology, spec.gpt.num_parameters
    directory.log_event(
        "resume" if done else "start",
        done,
        parameters=parameters,
        pipelines=topology.num_pipelines,
        stages=topology.num_stages,
        layers_of_stages=layers_of_stages(experiment.cuts),
        ranks=topology.num_expert_ranks,
        live_workers=spec.live.num_live,
        failed=cluster.down,
        kind=experiment.ranks,
        device=jax.devices()[0].device_kind,
        jax=jax.__version__,
        ends_bytes_per_worker=spec.embedding_and_head_bytes,
        state_bytes_per_worker=spec.state_bytes,
        stash_bytes_per_rank=engine.stash_bytes,
        flops_per_token=record.utilization.flops_per_token,
        peak_flops=record.utilization.peak_flops,
    )
    record.plan(done, engine.steps)
    workers = (
        f"{topology.num_pipelines} pipelines x {cuts_text(experiment.cuts, topology.num_stages)} x "
        if not spec.is_single_worker
        else ""
    )
    note(
        f"{parameters / 1e6:.1f}M parameters, {workers}{topology.num_expert_ranks} {experiment.ranks} expert "
        f"ranks; embedding, head and their moments: {spec.embedding_and_head_bytes / 1e6:.1f} MB per worker"
    )
    if start is not None:
        for line in restore_lines(start, ledger_after(experiment, start)):
            note(line)
    for line in changes:
        directory.log_event("data_changed", done, text=line)
        note(line)
    if experiment.window > 1:
        clip = experiment.optimizer.clip_norm
        note(
            f"windows of {experiment.window} iterations keep the state before them: "
            f"{spec.state_bytes / 1e6:.1f} MB more per worker"
            + ("" if clip is None else f"; where the gradient's norm is above {clip:g} they are run again")
        )
