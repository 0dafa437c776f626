"""``swift launch``: the supervisor of a run, and the processes that it starts."""

import argparse
import sys
import time
from contextlib import AbstractContextManager, suppress
from typing import Any

from rich.console import Console

from swift.cli.commands import distance_line, observers_of, run_dir_of, show_run, weights_of
from swift.cli.launch.job import LaunchJob
from swift.cli.launch.nodes import Entrance
from swift.elastic.coordinator.checkpoint_client import CHECKPOINT_SERVICE, CheckpointClient
from swift.elastic.coordinator.compile_client import COMPILE_SERVICE, CompileClient
from swift.elastic.coordinator.memory_demand import StorageLocation
from swift.elastic.coordinator.run_spec import RunContext, RunSpec
from swift.elastic.coordinator.supervisor import Supervisor
from swift.elastic.jax_group import check_support
from swift.elastic.reporting.background_calls import BackgroundCalls
from swift.elastic.reporting.display import Display, goodput_table
from swift.elastic.reporting.journal import Journal
from swift.elastic.reporting.reporter import Reporter
from swift.elastic.state.run_files import RunFiles
from swift.elastic.transport.child_processes import Children
from swift.elastic.transport.remote_node import announcing_arrival, serve_node
from swift.errors import RunError
from swift.runlog.lock.run_lock import Lease
from swift.runlog.reading import read_run
from swift.runlog.run_directory import RunDirectory
from swift.train.interrupt import Interrupt
from swift.train.options import TrainOptions
from swift.train.settings.config_text import config_text
from swift.train.settings.experiment import Experiment
from swift.train.start import (
    check_range,
    conclude,
    find_start,
    find_weights,
    is_to_conclude,
    open_run,
    own_run,
    try_placement,
)
from swift.train.summary import summarize


def launch(options: argparse.Namespace) -> None:
    """``swift launch --processes N CONFIG.gin``."""
    job = LaunchJob.of(options)
    experiment = job.experiment
    against = None if options.against is None else read_run(options.against, setting="--against")
    check_support()
    if job.nodes.own > 0:
        _serve(job)
        return
    run = TrainOptions(
        run_dir_of(options),
        config_text(experiment),
        resume=options.resume,
        init_from=weights_of(options, experiment),
        log_every=options.log_every,
        observers=observers_of(options),
    )
    with own_run(run) as lease:  # before anything else, which takes seconds
        storage = job.storage(run.run_dir)
        try_placement(experiment)
        if job.is_elastic and experiment.topology.num_expert_ranks > 1:
            try_placement(experiment, experiment.topology.num_expert_ranks - 1)  # as after a failure
        summary = _launch(job, run, lease, storage)
    ended = read_run(run.run_dir)
    show_run(ended, summary, options.format)
    if against is not None:
        line = distance_line(ended, against, experiment.topology)
        print(line, file=sys.stderr if options.format == "json" else sys.stdout)


def _serve(job: LaunchJob) -> None:
    """Runs as another node than the first."""
    run_dir, is_trusted = job.options.run_dir, job.options.insecure_network
    storage = job.storage(run_dir)
    job.show(storage.text)
    with announcing_arrival(run_dir, job.nodes.own, is_trusted):
        corpus = job.corpus()
    with job.interrupt() as interrupt:
        serve_node(
            run_dir,
            job.nodes.own,
            deadlines=job.deadlines,
            environment=job.environment,
            storage=storage.path,
            corpus=corpus,
            is_end_requested=lambda: interrupt.requested,
            is_trusted=is_trusted,
        )


def _launch(job: LaunchJob, run: TrainOptions, lease: Lease, storage: StorageLocation) -> dict[str, Any]:
    """Runs as the first node, and returns the summary."""
    experiment = job.experiment
    start = find_start(experiment, run)
    done = 0 if start is None else start.step
    if is_to_conclude(experiment, run, done):
        return conclude(experiment, run, lease, job.options.platform)
    check_range(experiment, run, done, experiment.num_steps)
    find_weights(experiment, run)  # so that a mistake is reported once, and here; the checkpoint service loads them
    corpus = job.corpus()
    data = experiment.loader("train", corpus).state()  # so that a mistake in the data is reported once, and here
    job.show(storage.text)
    shared = run.run_dir if job.nodes.count > 1 else None
    with (
        job.interrupt() as interrupt,
        Entrance.of(job.nodes) as entrance,
        open_run(experiment, run, done, lease) as directory,
        RunFiles.of(run.config_text, data, storage.path, corpus, shared) as scratch,
    ):
        children = entrance.children(
            directory.path, scratch, job.commands(scratch).node, job.deadlines, job.environment
        )
        return _supervise(job, directory, done, scratch, children, interrupt)


def _supervise(
    job: LaunchJob,
    directory: RunDirectory,
    done: int,
    scratch: RunFiles,
    starting: AbstractContextManager[Children],
    interrupt: Interrupt,
) -> dict[str, Any]:
    """Runs to the end and returns the summary."""
    begun, experiment = time.monotonic(), job.experiment
    run_spec = job.spec(scratch, directory.path / "logs")
    _log_start(experiment, directory, done, run_spec)
    with (
        Display(directory.path.name, experiment.num_steps, begun, log_every=job.options.log_every) as display,
        BackgroundCalls() as background,
        starting as children,
    ):
        run_spec.logs.mkdir(exist_ok=True)
        reporter = Reporter(Journal(begun), display, directory, background, done)
        context = _context(job, directory, scratch, run_spec, children, reporter)
        checkpoints = context.checkpoints
        if experiment.checkpoint.every:
            reporter.saved(checkpoints.newest)
        try:
            with Supervisor(context) as supervisor:
                _run(supervisor, checkpoints, interrupt)
        except RunError:
            with suppress(OSError, RunError):  # an error of the record may have ended the run
                reporter.note("stop", reporter.written, None, goodput=reporter.goodput())
            raise
        if interrupt.requested:
            newest = checkpoints.newest
            how = "no checkpoint was saved" if newest is None else f"--resume continues from {newest}"
            text = f"interrupted after iteration {reporter.written}; {how}"
            reporter.note("interrupt", reporter.written, text, goodput=reporter.goodput())
            background.settle()  # a stop without a complete record is an error
            raise KeyboardInterrupt
        goodput = reporter.goodput()
        reporter.note("finish", experiment.num_steps, None, goodput=goodput)
        background.settle()
        summary = summarize(experiment, directory, job.options.platform, goodput=goodput)
    Console(stderr=True).print(goodput_table(goodput))
    return summary


def _log_start(experiment: Experiment, directory: RunDirectory, done: int, run_spec: RunSpec) -> None:
    topology = experiment.topology
    directory.log_event(
        "resume" if done else "start",
        done,
        pipelines=topology.num_pipelines,
        stages=topology.num_stages,
        layers_of_stages=list(experiment.blocks.sizes),
        ranks=topology.num_expert_ranks,
        processes=[str(process) for process in run_spec.processes],
    )


def _context(
    job: LaunchJob,
    directory: RunDirectory,
    scratch: RunFiles,
    run_spec: RunSpec,
    children: Children,
    reporter: Reporter,
) -> RunContext:
    """Puts the parts of a run together; the services of its clients start later."""
    commands, limits = job.commands(scratch), run_spec.deadlines
    checkpoints = CheckpointClient(
        children=children,
        command=commands.checkpoint_service(directory.path),
        log=run_spec.log(CHECKPOINT_SERVICE),
        directory=directory.checkpoints_path,
        processes=run_spec.processes,
        start_s=limits.start,
        deadline_s=limits.saving,
        record=reporter,
        own_cut=job.own_cut,
        has_origin=job.options.init_from is not None,
    )
    programs = CompileClient(
        children=children,
        command=commands.compile_service() if job.platform.prepare == "next" else None,
        log=run_spec.log(COMPILE_SERVICE),
        start_s=limits.start,
        silence_s=limits.heartbeat,
    )
    return RunContext(
        spec=run_spec,
        children=children,
        checkpoints=checkpoints,
        programs=programs,
        reporter=reporter,
        mend=scratch.mend,
    )


def _run(supervisor: Supervisor, checkpoints: CheckpointClient, interrupt: Interrupt) -> None:
    """Runs to the end; raises RunError, after keeping the newest state elsewhere, if it could not be saved."""
    try:
        supervisor.run(lambda: interrupt.requested)
    except (RunError, OSError) as error:
        kept = supervisor.keep_unsaved()
        text = str(error)
        if isinstance(error, OSError):
            newest = (
                "there is no checkpoint yet"
                if checkpoints.newest is None
                else f"--resume continues from {checkpoints.newest}"
            )
            text = f"{error}: stopped; {newest}"
        raise RunError(text if kept is None else f"{text}; {kept}") from error
    kept = supervisor.keep_unsaved()
    if kept is not None:
        newest = (
            "no other checkpoint is"
            if checkpoints.newest is None
            else f"the checkpoint of iteration {checkpoints.newest} is"
        )
        raise RunError(f"the last checkpoint was not saved: stopped; {kept}; {newest} there")
