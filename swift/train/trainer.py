"""A training run in one process on each host: runs an experiment, and writes a run directory and a summary.

``train`` runs the experiment. ``check_before`` checks everything but the checkpoints, and writes nothing.
"""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from swift.checkpoint.inspection import restore_lines
from swift.checkpoint.reader import RestorePlan
from swift.config.checks import check
from swift.config.cuts import cuts_text, layers_of_stages, model_cuts
from swift.config.experiment import Experiment
from swift.config.failures import FailureSource, failure_list
from swift.config.stored import config_text
from swift.data.index import find_index
from swift.data.loader import Loader
from swift.errors import RunError
from swift.mesh.devices import enable_compilation_cache
from swift.mesh.live import host_line
from swift.pipeline.state import TrainState
from swift.runlog.lease import Lease
from swift.runlog.reading import check_new_run
from swift.runlog.run_directory import NullRunDirectory
from swift.train.build import make_loader, users_settings
from swift.train.checkpointer import Checkpointer
from swift.train.display import ProgressDisplay
from swift.train.emulated import EmulatedCluster
from swift.train.emulated_run import EmulatedWorkers, RunCheckpoints, RunRecord
from swift.train.fitting import check_program, check_shapes
from swift.train.hosts import LocalSequences, check_all_compute, check_hosts
from swift.train.initial_weights import ModelPlan, WeightSource
from swift.train.interrupt import SAVING, STOPPING, Interrupt
from swift.train.loop import TrainLoop
from swift.train.model_directory import weights_digest
from swift.train.records import Utilization, summarize
from swift.train.saved_state import ledger_after
from swift.train.start import (
    TrainOptions,
    acquire_run,
    begin,
    check_range,
    find_start,
    find_weights,
    needs_summary,
    next_length,
    open_run,
    read_start,
    stopped_early,
    try_own_rules,
    write_summary,
)
from swift.variables import compiler_variables


def check_before(experiment: Experiment, options: TrainOptions) -> Any:
    """Performs the checks made at the start of a run, except for its checkpoints; writes nothing.

    Returns:
        Identity of the data, JSON-serializable. It must be the same on all hosts of a run.

    Raises:
        SettingError: a setting, the data or the run directory is unusable, some failures have no plan, or there is too
            little memory.
    """
    if not options.resume:
        check_new_run(options.run_dir)
    if options.hosts.count > 1:
        check_hosts(experiment, 0)
    try_own_rules(experiment)
    loader, _ = _load_data(experiment, options, lambda line: print(line, file=sys.stderr, flush=True))
    listed, length = failure_list(experiment), next_length(experiment, options, 0, experiment.num_steps)
    with users_settings():
        cluster = EmulatedCluster(experiment, "none", listed, 1, length)
        cluster.check(listed)
    check_shapes(experiment, cluster.engine, length)
    return loader.state()["data"]


def train(
    experiment: Experiment, options: TrainOptions | Path | str, failures: FailureSource | None = None
) -> dict[str, Any]:
    """Runs an experiment to its end, or to ``options.stop_at``.

    Args:
        experiment: settings of the run.
        options: options of this invocation, or just the run directory.
        failures: source of the failures at each iteration; None for the experiment's own list.

    Returns:
        The summary, which is empty on all hosts but the first. ``summary.json`` is only written if the run has reached
        its end.

    Raises:
        SettingError: a setting, the run directory or the checkpoint is unusable; nothing was written.
        RunError: the run cannot continue, for example because the loss is not finite, a stage has lost its last worker,
            or another process has taken over the directory.
        KeyboardInterrupt: Ctrl-C or SIGTERM; the iteration that was running is completed and saved.
    """
    check(experiment)
    if not isinstance(options, TrainOptions):
        options = TrainOptions(Path(options))
    if not options.config_text:
        options = replace(options, config_text=config_text(experiment))
    enable_compilation_cache()
    hosts = options.hosts
    with users_settings(), ExitStack() as stack:
        with hosts.all_or_none():
            try_own_rules(experiment)
            lease = stack.enter_context(acquire_run(options)) if hosts.is_first else None
        hosts.check_shared(options.run_dir)
        return _train(experiment, options, failures, lease)


def _train(
    experiment: Experiment, options: TrainOptions, failures: FailureSource | None, lease: Lease | None
) -> dict[str, Any]:
    last_step, hosts = experiment.num_steps if options.stop_at is None else options.stop_at, options.hosts
    start = find_start(experiment, options)
    done, stopped = (
        0 if start is None else start.step,
        stopped_early(experiment, None if start is None else start.manifest),
    )
    is_left = not hosts.broadcast(needs_summary(experiment, options, done, stopped))
    with hosts.all_or_none():
        if is_left:
            check_range(experiment, options, done, last_step, stopped)
        weights = find_weights(experiment, options)
        if hosts.count > 1:
            check_hosts(experiment, done)
    if is_left:
        return _continue(experiment, options, failures, lease, (start, weights), last_step)
    _part(options)
    device = jax.devices()[0].device_kind
    return {} if lease is None else write_summary(experiment, options, lease, device, done, stopped)


def _continue(
    experiment: Experiment,
    options: TrainOptions,
    failures: FailureSource | None,
    lease: Lease | None,
    start_plans: tuple[RestorePlan | None, RestorePlan | ModelPlan | None],
    last_step: int,
) -> dict[str, Any]:
    """Runs the remaining iterations, starting from the run's checkpoint, from other weights, or from new weights."""
    hosts, (start, weights) = options.hosts, start_plans
    done = 0 if start is None else start.step
    listed = failure_list(experiment)
    first = done + next_length(experiment, options, done, last_step)
    with _display(options, last_step, done) as progress:
        progress.stage("reading the data")
        with hosts.all_or_none():
            loaders = _load_data(experiment, options, progress.note)
        hosts.check_same({"the data": loaders[0].state()["data"]})
        progress.stage("planning")
        with hosts.all_or_none():
            prepare = "none" if hosts.count > 1 else options.prepare  # preparing is not supported on several hosts yet
            cluster = EmulatedCluster(experiment, prepare, listed if failures is None else failures, done + 1, first)
            utilization = Utilization.of(cluster.engine.spec)  # before the cluster compiles ahead, which uses the cores
        with cluster, _interrupt(options, progress) as interrupt:
            with hosts.all_or_none():
                cluster.check(listed)
                check_all_compute(experiment, done, hosts.count)
                check_shapes(experiment, cluster.engine, first - done)
            spec = cluster.engine.spec
            progress.stage("compiling the first step")
            with hosts.all_or_none():
                warning = check_program(experiment, cluster.engine, first - done)
            progress.stage("making the first state" if start is None else "loading the checkpoint", start is None)
            if warning is not None:
                progress.note(warning)
            with hosts.all_or_none():
                read = [read_start(spec, options, start, weights)]
            if hosts.count > 1 and weights is not None:
                hosts.check_same({"the weights of --init-from": weights_digest(read[0])})
            # Lists of one element, which the callee pops, so that no frame here keeps the memory for the whole run.
            first_state = [begin(experiment, spec, read.pop())]
            changes = [] if start is None else loaders[0].restore(start.manifest.extra["loader"])
            with (
                (
                    NullRunDirectory(options.run_dir) if lease is None else open_run(experiment, options, done, lease)
                ) as directory,
                Checkpointer(experiment, spec, directory, start, hosts) as checkpointer,
            ):
                record = RunRecord(directory, progress, utilization)
                checkpoints = RunCheckpoints(
                    experiment=experiment,
                    options=options,
                    cluster=cluster,
                    checkpointer=checkpointer,
                    record=record,
                    train=loaders[0],
                )
                _announce(experiment, cluster, record, done, start, changes)
                if options.init_from is not None and weights is not None:
                    _announce_weights(options.init_from, weights, record)
                _run(_loop(loaders, checkpoints, interrupt, last_step), first_state, done, checkpoints)
                _part(options)
                record.show_last_lines()
                if lease is None:
                    return {}
                stopped = checkpointer.validations if checkpointer.validations.ends_early(experiment) else None
                return summarize(experiment, directory, jax.devices()[0].device_kind, stopped)


def _load_data(experiment: Experiment, options: TrainOptions, report: Callable[[str], None]) -> tuple[Loader, Loader]:
    """Creates the loaders of the training and validation splits.

    Args:
        experiment: settings of the run.
        options: options of this invocation.
        report: function that shows a line of text when an operation takes long.
    """
    corpus = None
    if options.corpora is not None:
        corpus = find_index(experiment.data, options.corpora, report, connect=options.connect, plan=options.plan)
    return make_loader(experiment, "train", corpus), make_loader(experiment, "validation", corpus)


def _part(options: TrainOptions) -> None:
    """Separates from the other hosts, unless further runs of a series follow."""
    if options.series is None or options.series.is_last:
        options.hosts.separate()


def _display(options: TrainOptions, last_step: int, done: int) -> ProgressDisplay:
    """Creates the progress display, which is silent on all hosts but the first."""
    console = None if options.hosts.is_first else Console(stderr=True, quiet=True)
    return ProgressDisplay(
        options.run_dir.name, last_step, done + 1, console, log_every=options.log_every, series=options.series
    )


def _interrupt(options: TrainOptions, progress: ProgressDisplay) -> Interrupt:
    note = STOPPING if options.ends_at_second else SAVING
    return Interrupt(options.stopping_s, lambda: progress.note(note), ends_at_second=options.ends_at_second)


def _loop(
    loaders: tuple[Loader, Loader], checkpoints: RunCheckpoints, interrupt: Interrupt, last_step: int
) -> TrainLoop:
    """Builds the training loop. On several hosts, each host reads only its own sequences."""
    experiment, options, record = checkpoints.experiment, checkpoints.options, checkpoints.record
    if experiment.checkpoint.every:
        record.progress.saved(checkpoints.checkpointer.newest)
    record.progress.stage("the first step")
    workers = EmulatedWorkers(
        experiment=experiment,
        options=options,
        cluster=checkpoints.cluster,
        checkpoints=checkpoints,
        record=record,
        interrupt=interrupt,
        last_step=last_step,
    )
    train, validation = (
        loader if options.hosts.count == 1 else LocalSequences(loader, lambda: workers.steps) for loader in loaders
    )
    return TrainLoop(experiment, train, validation, workers, checkpoints, record.step, options.hosts.count > 1)


def _run(loop: TrainLoop, first_state: list[TrainState], done: int, checkpoints: RunCheckpoints) -> None:
    """Runs the loop to the end of the invocation, and waits for the last checkpoint.

    Args:
        loop: training loop.
        first_state: list with the first state, which is emptied here so that the caller does not hold its memory.
        done: iterations done.
        checkpoints: checkpoints of the run.
    """
    try:
        done = loop.run(first_state.pop(), done)
        checkpoints.finish()
        _log_end(checkpoints, done)
    except (OSError, RunError) as error:
        raise checkpoints.failed(error) from None


def _log_end(checkpoints: RunCheckpoints, done: int) -> None:
    """Records how the invocation has ended after ``done`` iterations, and shows why if it is early."""
    experiment, record, validations = checkpoints.experiment, checkpoints.record, checkpoints.checkpointer.validations
    is_early = validations.ends_early(experiment)
    if is_early:
        facts = {name: getattr(validations, name) for name in ("best_step", "best_loss", "num_since")}
        record.directory.log_event("early_stop", done, **facts)
        record.progress.note(f"stopped early after iteration {done}: {validations.reason}")
    record.directory.log_event("finish" if is_early or done == experiment.num_steps else "stop", done)


def _announce_weights(source: WeightSource, weights: RestorePlan | ModelPlan, record: RunRecord) -> None:
    """Records and shows the origin of the weights that the run begins with."""
    facts = source.facts(weights)
    record.directory.log_event("init_from", 0, **facts)
    record.progress.note("begins with the weights of {run}, iteration {of_step}".format(**facts))
    for reason in weights.passed_over:
        record.progress.note(f"passed over: {reason}")


def _announce(
    experiment: Experiment,
    cluster: EmulatedCluster,
    record: RunRecord,
    done: int,
    start: RestorePlan | None,
    changes: Sequence[str],
) -> None:
    """Records and shows the run's setup, and the checkpoint from which it continues."""
    engine, directory, note = cluster.engine, record.directory, record.progress.note
    spec = engine.spec
    topology, parameters = spec.live.topology, spec.gpt.num_parameters
    directory.log_event(
        "resume" if done else "start",
        done,
        parameters=parameters,
        pipelines=topology.num_pipelines,
        stages=topology.num_stages,
        layers_of_stages=layers_of_stages(model_cuts(experiment)),
        ranks=topology.num_expert_ranks,
        live_workers=spec.live.num_live,
        failed=cluster.down,
        kind=experiment.ranks,
        device=jax.devices()[0].device_kind,
        jax=jax.__version__,
        variables=compiler_variables(os.environ),
        ends_bytes_per_worker=spec.embedding_and_head_bytes,
        state_bytes_per_worker=spec.state_bytes,
        stash_bytes_per_rank=engine.stash_bytes,
        flops_per_token=record.utilization.flops_per_token,
        peak_flops=record.utilization.peak_flops,
    )
    record.plan(done, engine.steps)
    workers = (
        f"{topology.num_pipelines} pipelines x {cuts_text(model_cuts(experiment), topology.num_stages)} x "
        if not spec.is_single_worker
        else ""
    )
    note(
        f"{parameters / 1e6:.1f}M parameters, {workers}{topology.num_expert_ranks} {experiment.ranks} expert "
        f"ranks; embedding, head and their moments: {spec.embedding_and_head_bytes / 1e6:.1f} MB per worker"
    )
    if jax.process_count() > 1:
        note(host_line(spec.live.workers, spec.live.mesh))
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
