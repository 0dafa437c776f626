"""``swift launch``: an elastic run with one process per worker or expert rank, which survives failures.

``LaunchJob`` checks the options and turns them into the specs of the run. ``launch`` runs the supervisor on the first
node; on any other node it serves the first one.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from jax.extend.backend import clear_backends
from rich.console import Console

from swift.checkpoint.saver import newest_text
from swift.cli.input_hosts import input_hosts_of_runs, plan_reading
from swift.cli.nodes import NodeListener, Nodes, Platform, ProcessCommands, nodes_of
from swift.cli.run_setup import corpora_directory, observers_of, run_dir_of, weights_of
from swift.cli.values import OF_PROCESSES, deadlines_of
from swift.config.cuts import checkpoint_cut, model_chunks
from swift.config.experiment import Experiment
from swift.config.gin_reader import load_experiment
from swift.config.stored import config_text
from swift.data.index import find_index
from swift.data.remote_records import ConnectHosts
from swift.deadlines import Deadlines
from swift.elastic.coordinator.fault_injection import FaultInjection, parse_chaos
from swift.elastic.coordinator.memory_demand import MemoryEstimate, StorageLocation, choose_storage
from swift.elastic.coordinator.service_clients import (
    CHECKPOINT_SERVICE,
    COMPILE_SERVICE,
    CheckpointClient,
    CompileClient,
)
from swift.elastic.coordinator.supervisor import RunContext, RunSpec, Supervisor
from swift.elastic.jax_group import check_support
from swift.elastic.membership.messages import Process, processes_of
from swift.elastic.membership.status import Recovery, RecoveryPolicy
from swift.elastic.reporting.journal import Journal
from swift.elastic.reporting.reporter import BackgroundCalls, Display, Reporter, goodput_table
from swift.elastic.state.run_files import RunFiles
from swift.elastic.state.slices import is_elastic
from swift.elastic.transport.children import Children
from swift.elastic.transport.remote_node import announcing_arrival, serve_node
from swift.elastic.worker.channel import configure_jax
from swift.errors import RunError, SettingError, check_count
from swift.runlog.lease import Lease
from swift.runlog.reading import read_run
from swift.runlog.run_directory import RunDirectory
from swift.schedules.planners.names import FAULT_FREE
from swift.schedules.plans.normalize import DEFAULT_ASSIGNMENT, ChunkAssignment
from swift.topology import Topology
from swift.train.build import make_loader, migration_policy
from swift.train.fitting import check_processes
from swift.train.interrupt import Interrupt
from swift.train.records import summarize
from swift.train.start import (
    TrainOptions,
    acquire_run,
    check_range,
    find_start,
    find_weights,
    needs_summary,
    open_run,
    try_own_rules,
    write_summary,
)

_ENDING_S = 30.0
"""Seconds past the stopping deadline after which this process exits regardless, as a file system may never respond."""


@dataclass(frozen=True, kw_only=True)
class LaunchJob:
    """An elastic run, as the command line describes it.

    Attributes:
        experiment: settings of the run.
        options: options of the command line.
        processes: all processes of the run.
        by_rank: whether each expert rank is a process of its own, rather than each worker.
        nodes: machines of the run.
        platform: devices that the processes compute on, and the options that depend on them.
        deadlines: time limits.
        faults: faults to inject.
        connect: connects to input hosts while the corpus index is built, or None if there are none.
    """

    experiment: Experiment
    options: argparse.Namespace
    processes: Sequence[Process]
    by_rank: bool
    nodes: Nodes
    platform: Platform
    deadlines: Deadlines
    faults: FaultInjection
    connect: ConnectHosts | None

    @classmethod
    def of(cls, options: argparse.Namespace) -> Self:
        """Creates the job from the command line; raises SettingError if it cannot run."""
        experiment = load_experiment(options.config, options.set)
        by_rank = _is_by_rank(options.processes, experiment.topology)
        processes = processes_of(experiment.topology, by_rank=by_rank)
        _check(experiment)
        platform = Platform.of(options.platform, experiment, options.recovery, options.prepare)
        if experiment.adapt != "reroute" and platform.prepare == "none":
            raise SettingError("--prepare", "none", f"finds no blocks to move: Experiment.adapt = {experiment.adapt!r}")
        _check_snapshots(experiment, by_rank)
        _check_sharded(experiment, by_rank)
        check_count("--restarts", options.restarts, least=0)
        _check_copies(options.memory_checkpoint_every, platform.recovery)
        nodes = nodes_of(options, os.environ)
        job = cls(
            experiment=experiment,
            options=options,
            processes=processes,
            by_rank=by_rank,
            deadlines=deadlines_of(options.deadline, OF_PROCESSES, platform.deadlines),
            nodes=nodes,
            platform=platform,
            faults=parse_chaos(
                options.chaos,
                experiment.topology,
                processes,
                experiment.num_steps,
                _why_uncompiled(experiment, platform.prepare, by_rank=by_rank),
            ),
            connect=input_hosts_of_runs([experiment.data], options, has_network=True),
        )
        # This check comes last, since it starts JAX, which takes seconds.
        platform.check_node(len(nodes.own_of(processes)), _devices_per_process(experiment, by_rank))
        return job

    @property
    def memory_checkpoint_every(self) -> int:
        """Iterations between in-memory copies of the state for restarted processes, or 0 for no copies."""
        return self.options.memory_checkpoint_every or 1 if self.platform.recovery == "restart" else 0

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for the processes of the run."""
        return self.platform.environment(os.environ, self.nodes.count)

    @property
    def is_elastic(self) -> bool:
        """Whether any subset of the ranks can continue the run."""
        return is_elastic(self.experiment, by_rank=self.by_rank)

    @property
    def own_cut(self) -> ChunkAssignment:
        """Stage that holds each chunk in each pipeline; empty (and falsy) if all pipelines have the same cut."""
        chunks = model_chunks(self.experiment)
        return DEFAULT_ASSIGNMENT if chunks.is_uniform_cut else ChunkAssignment(chunks.stage_DC)

    def show(self, text: str) -> None:
        """Prints a line on stderr, prefixed with the number of this node if there are several."""
        line = f"node {self.nodes.own_node}: {text}" if self.nodes.count > 1 else text
        print(line, file=sys.stderr, flush=True)

    def storage(self, run_dir: Path) -> StorageLocation:
        """Chooses the directory where the processes of this node store their states.

        Raises:
            SettingError: no directory has enough free space, or the processes do not fit into the memory of this node.
        """
        configure_jax(self.experiment, num_devices=1)
        here, is_alone = self.nodes.own_of(self.processes), self.nodes.count == 1
        platform = self.platform.accelerator
        if platform is None:
            warning = check_processes(self.experiment, len(here), len(self.processes))
            if warning is not None:
                self.show(warning)
        demand = MemoryEstimate.of(self.experiment, here, by_rank=self.by_rank, is_alone=is_alone, platform=platform)
        clear_backends()  # the estimate may have created a backend; the supervisor needs no devices
        return choose_storage(demand, run_dir)

    def corpus(self) -> Path | None:
        """Finds or builds the corpus index; returns None if the user has no cache directory."""
        directory = corpora_directory()
        if directory is None:
            return None
        return find_index(self.experiment.data, directory, self.show, connect=self.connect, plan=plan_reading)

    def interrupt(self) -> Interrupt:
        """Handles Ctrl-C and SIGTERM within a ``with`` block; the first also starts a timer that ends this process."""
        return Interrupt(self.deadlines.stopping + _ENDING_S).hold()

    def commands(self, scratch: RunFiles) -> ProcessCommands:
        """Returns the builder of the command lines that start the run's processes."""
        return ProcessCommands(
            scratch=scratch,
            processes=self.processes,
            nodes=self.nodes,
            by_rank=self.by_rank,
            memory_checkpoint_every=self.memory_checkpoint_every,
            forming_s=self.deadlines.forming,
            platform=self.platform.accelerator,
            devices_per_process=_devices_per_process(self.experiment, self.by_rank),
            init_from=self.options.init_from,
            init_config=self.options.init_config,
        )

    def spec(self, scratch: RunFiles, logs: Path) -> RunSpec:
        """Returns the settings of the run for the supervisor."""
        return RunSpec(
            processes=self.processes,
            command=self.commands(scratch).worker,
            logs=logs,
            deadlines=self.deadlines,
            policy=RecoveryPolicy(
                recovery=self.platform.recovery,
                max_restarts=self.options.restarts,
                begins_with_state=self.options.resume or self.options.init_from is not None,
                is_elastic=self.is_elastic,
                own_cut=self.own_cut,
                move_rule=migration_policy(self.experiment),
                memory_checkpoint_every=self.memory_checkpoint_every,
                joins_once=self.platform.accelerator is not None,
                needs_all=self.platform.accelerator == "tpu",
            ),
            faults=self.faults,
            services=scratch.sockets if self.nodes.count == 1 else self.nodes.host,
        )


def _is_by_rank(num_processes: int, topology: Topology) -> bool:
    """Returns whether ``--processes`` means one process per expert rank rather than per worker.

    Raises:
        SettingError: the number is neither that of the workers nor that of the expert ranks.
    """
    num_workers, num_ranks = len(topology.workers), topology.num_devices
    if num_processes not in (num_workers, num_ranks):
        allowed = f"must be {num_workers}, one for each worker of {topology}"
        allowed += f", or {num_ranks}, one for each expert rank" if num_ranks != num_workers else ""
        raise SettingError("--processes", num_processes, allowed)
    return num_processes != num_workers


def _why_uncompiled(experiment: Experiment, prepare: str, *, by_rank: bool) -> str | None:
    """Returns why programs for the loss of a process are never prepared in advance, or None if they are."""
    if prepare == "none":
        return "with --prepare none no programs are prepared"
    if experiment.topology.num_pipelines == 1 and not is_elastic(experiment, by_rank=by_rank):
        return "with one pipeline the others cannot continue without a process, so no programs are prepared for that"
    return None


def _check(experiment: Experiment) -> None:
    """Raises SettingError if an experiment cannot run with real processes."""
    refused = {
        "failures": (bool(experiment.failures), "must be empty: processes fail for real, see --chaos"),
        "planner": (experiment.planner in FAULT_FREE, "plans without failures"),
    }
    for name, (is_wrong, allowed) in refused.items():
        if is_wrong:
            raise SettingError(f"Experiment.{name}", getattr(experiment, name), allowed)
    if (memory := experiment.optimizer.memory) != "device":
        raise SettingError("OptimizerConfig.memory", memory, "must be 'device': processes hand states over from there")


def _devices_per_process(experiment: Experiment, by_rank: bool) -> int:
    return 1 if by_rank else experiment.topology.num_expert_ranks


def _check_copies(memory_checkpoint_every: int | None, recovery: Recovery) -> None:
    """Raises SettingError if ``--memory-checkpoint-every`` is below 1 or the recovery mode would not use the copies."""
    if memory_checkpoint_every is None:
        return
    check_count("--memory-checkpoint-every", memory_checkpoint_every, least=1)
    if recovery != "restart":
        allowed = "would change nothing without --recovery restart: the others keep their states when a process dies"
        raise SettingError("--memory-checkpoint-every", memory_checkpoint_every, allowed)


def _check_sharded(experiment: Experiment, by_rank: bool) -> None:
    """Raises SettingError if an elastic run shards the embedding or head: a lost rank's shard would have no copy."""
    allowed = "must be 'replicated' where a single worker has a process for each expert rank, and continues without one"
    for name in ("embedding", "head"):
        if getattr(experiment, name) == "sharded" and is_elastic(experiment, by_rank=by_rank):
            raise SettingError(f"Experiment.{name}", "sharded", allowed)


def _check_snapshots(experiment: Experiment, by_rank: bool) -> None:
    """Raises SettingError if an experiment asks for snapshots from which no process could continue."""
    every = experiment.checkpoint.snapshot_every
    if every and not is_elastic(experiment, by_rank=by_rank):
        allowed = "must be 0, unless a single worker has a process for each expert rank: no other survives without one"
        raise SettingError("CheckpointConfig.snapshot_every", every, allowed)


def launch(options: argparse.Namespace) -> None:
    """Runs ``swift launch --processes N CONFIG.gin``."""
    job = LaunchJob.of(options)
    experiment = job.experiment
    reference_dir = options.compare_loss_to
    reference = None if reference_dir is None else read_run(reference_dir, setting="--compare-loss-to")
    check_support()
    if job.nodes.own_node > 0:
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
    with acquire_run(run) as lease:  # first, so that a conflict with another process is reported without delay
        storage = job.storage(run.run_dir)
        try_own_rules(experiment)
        if job.is_elastic and experiment.topology.num_expert_ranks > 1:
            try_own_rules(experiment, experiment.topology.num_expert_ranks - 1)  # for the case of a failure
        summary = _launch(job, run, lease, storage)
    from swift.cli.report import distance_line, show_run

    ended = read_run(run.run_dir)
    show_run(ended, summary, options.format)
    if reference is not None:
        line = distance_line(ended, reference, experiment.topology)
        print(line, file=sys.stderr if options.format == "json" else sys.stdout)


def _serve(job: LaunchJob) -> None:
    """Runs a node other than the first: serves the first node until the run is over."""
    run_dir, is_trusted = job.options.run_dir, job.options.insecure_network
    storage = job.storage(run_dir)
    job.show(storage.text)
    with announcing_arrival(run_dir, job.nodes.own_node, is_trusted):
        corpus = job.corpus()
    with job.interrupt() as interrupt:
        serve_node(
            run_dir,
            job.nodes.own_node,
            deadlines=job.deadlines,
            environment=job.environment,
            storage=storage.path,
            corpus=corpus,
            is_end_requested=lambda: interrupt.requested,
            is_trusted=is_trusted,
        )


def _launch(job: LaunchJob, run: TrainOptions, lease: Lease, storage: StorageLocation) -> dict[str, Any]:
    """Runs the first node: prepares the run, supervises it, and returns the summary."""
    experiment = job.experiment
    start = find_start(experiment, run)
    done = 0 if start is None else start.step
    if needs_summary(experiment, run, done):
        return write_summary(experiment, run, lease, job.options.platform)
    check_range(experiment, run, done, experiment.num_steps)
    # The checkpoint service loads the weights, and each process the data. Try both here, so that a mistake is reported
    # once, and before any process starts.
    find_weights(experiment, run)
    corpus = job.corpus()
    data = make_loader(experiment, "train", corpus).state()
    job.show(storage.text)
    shared = run.run_dir if job.nodes.count > 1 else None
    with (
        job.interrupt() as interrupt,
        NodeListener.of(job.nodes) as entrance,
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
    """Supervises the run until it ends, reports its progress and goodput, and returns the summary."""
    start_time, experiment = time.monotonic(), job.experiment
    run_spec = job.spec(scratch, directory.path / "logs")
    _log_start(experiment, directory, done, run_spec)
    with (
        Display(directory.path.name, experiment.num_steps, start_time, log_every=job.options.log_every) as display,
        BackgroundCalls() as background,
        starting as children,
    ):
        run_spec.logs.mkdir(exist_ok=True)
        reporter = Reporter(Journal(start_time), display, directory, background, done)
        context = _context(job, directory, scratch, run_spec, children, reporter)
        checkpoints = context.checkpoints
        if experiment.checkpoint.every:
            reporter.saved(checkpoints.newest)
        try:
            with Supervisor(context) as supervisor:
                _run(supervisor, checkpoints, interrupt)
        except RunError:
            with suppress(OSError, RunError):  # the run may have ended because its log cannot be written
                reporter.note("stop", reporter.written, None, goodput=reporter.goodput())
            raise
        if interrupt.requested:
            newest = checkpoints.newest
            how = "no checkpoint was saved" if newest is None else f"--resume continues from {newest}"
            text = f"interrupted after iteration {reporter.written}; {how}"
            reporter.note("interrupt", reporter.written, text, goodput=reporter.goodput())
            background.settle()  # raises if the log is incomplete, which is an error even for an interrupted run
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
        layers_of_stages=list(checkpoint_cut(experiment).sizes),
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
    """Creates the objects that the supervisor uses; the checkpoint and compile services start later."""
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
    """Runs the supervisor to the end of the run.

    Raises:
        RunError: the run failed, or its newest state could not be saved in the run directory. That state is first saved
            elsewhere if possible.
    """
    try:
        supervisor.run(lambda: interrupt.requested)
    except (RunError, OSError) as error:
        location_text = supervisor.keep_unsaved()
        text = str(error)
        if isinstance(error, OSError):
            newest = (
                "there is no checkpoint yet"
                if checkpoints.newest is None
                else f"--resume continues from {checkpoints.newest}"
            )
            text = f"{error}: stopped; {newest}"
        raise RunError(text if location_text is None else f"{text}; {location_text}") from error
    location_text = supervisor.keep_unsaved()
    if location_text is not None:
        newest = newest_text(checkpoints.newest)
        raise RunError(f"the last checkpoint was not saved: stopped; {location_text}; {newest}")
