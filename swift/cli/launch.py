"""``swift launch``: the supervisor of a run, and the processes that it starts."""

import argparse
import os
import sys
import time
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jax.extend.backend import clear_backends
from rich.console import Console

from swift.cli.commands import corpora_directory, distance_line, run_dir_of, show_run
from swift.cli.configuration import config_text, load_experiment
from swift.cli.nodes import Entrance, Nodes, nodes_of
from swift.cli.options import OF_PROCESSES, deadlines_of
from swift.data import find_index
from swift.deadlines import Deadlines
from swift.elastic import check_support, is_elastic
from swift.elastic.coordinator import (
    KEEPER,
    PREPARER,
    CheckpointClient,
    CompileClient,
    FaultInjection,
    MemoryDemand,
    RunSpec,
    StorageLocation,
    Supervisor,
    choose_place,
    parse_chaos,
)
from swift.elastic.events import BackgroundCalls, Display, Journal, Reporter, goodput_table
from swift.elastic.membership import Member, Process, processes_of
from swift.elastic.state import RunFiles
from swift.elastic.transport import MEMORY, Children, coming, serve
from swift.elastic.worker import settle_jax
from swift.errors import RunError, SettingError, check_count
from swift.runlog import Lease, RunDirectory, read_run
from swift.schedules import FAULT_FREE
from swift.topology import Topology
from swift.train import (
    Experiment,
    Interrupt,
    TrainOptions,
    check_range,
    conclude,
    find_start,
    is_to_conclude,
    open_run,
    own_run,
    summarize,
    try_placement,
)

_ENDING_S = 30.0
"""From the end of the time that a stop has to that of this process, which may wait for a file system for ever."""


def launch(options: argparse.Namespace) -> None:
    """``swift launch --processes N CONFIG.gin``."""
    experiment = load_experiment(options.config, options.set)
    by_rank = _is_by_rank(options.processes, experiment.topology)
    processes = processes_of(experiment.topology, by_rank=by_rank)
    _check(experiment)
    _check_snapshots(experiment, by_rank)
    check_count("--restarts", options.restarts, least=0)
    deadlines, nodes = deadlines_of(options.deadline, OF_PROCESSES), nodes_of(options, os.environ)
    chaos = parse_chaos(options.chaos, experiment.topology, processes, experiment.num_steps)
    against = None if options.against is None else read_run(options.against, setting="--against")
    check_support()
    here = [process for index, process in enumerate(processes) if nodes.place(index, len(processes)) == nodes.own]
    if nodes.own > 0:
        _serve(experiment, options, _place(experiment, here, by_rank, nodes, options.run_dir), nodes, deadlines)
        return
    run = TrainOptions(run_dir_of(options), config_text(experiment), options.resume)
    with own_run(run) as lease:  # first: what follows takes seconds
        place = _place(experiment, here, by_rank, nodes, run.run_dir)
        try_placement(experiment)
        if is_elastic(experiment, by_rank=by_rank) and experiment.topology.num_expert_ranks > 1:
            try_placement(experiment, experiment.topology.num_expert_ranks - 1)  # as after a failure
        summary = _launch(experiment, options, run, lease, processes, deadlines, nodes, chaos, place)
    ended = read_run(run.run_dir)
    show_run(ended, summary, options.format)
    if against is not None:
        line = distance_line(ended, against, experiment.topology)
        print(line, file=sys.stderr if options.format == "json" else sys.stdout)


def _serve(
    experiment: Experiment, options: argparse.Namespace, place: StorageLocation, nodes: Nodes, deadlines: Deadlines
) -> None:
    """Runs as another node."""
    _tell(nodes, place.text)
    run_dir, is_trusted = options.run_dir, options.insecure_network
    with coming(run_dir, nodes.own, is_trusted):
        corpus = find_index(experiment.data, corpora_directory(), partial(_tell, nodes))
    with Interrupt(deadlines.stopping + _ENDING_S).hold() as interrupt:
        serve(
            run_dir,
            nodes.own,
            deadlines,
            os.environ,
            place.path,
            corpus,
            lambda: interrupt.requested,
            is_trusted=is_trusted,
        )


def _launch(
    experiment: Experiment,
    options: argparse.Namespace,
    run: TrainOptions,
    lease: Lease,
    processes: Sequence[Process],
    deadlines: Deadlines,
    nodes: Nodes,
    chaos: FaultInjection,
    place: StorageLocation,
) -> dict[str, Any]:
    """Runs as the first node, and returns the summary."""
    by_rank = _is_by_rank(options.processes, experiment.topology)
    start = find_start(experiment, run)
    done = 0 if start is None else start.step
    if is_to_conclude(experiment, run, done):
        return conclude(experiment, run, lease, "cpu")
    check_range(experiment, run, done, experiment.num_steps)
    corpus = find_index(experiment.data, corpora_directory(), partial(_tell, nodes))
    data = experiment.loader("train", corpus).state()  # so that a mistake in the data is told once, and here
    _tell(nodes, place.text)
    shared = run.run_dir if nodes.count > 1 else None
    with (
        Interrupt(deadlines.stopping + _ENDING_S).hold() as interrupt,
        Entrance.of(nodes) as entrance,
        open_run(experiment, run, done, lease) as directory,
        RunFiles.of(run.config_text, data, place.path, corpus, shared) as scratch,
    ):
        keeps_all, trims = options.recovery == "restart", options.trim_executables
        commands = _Commands(scratch, processes, nodes, by_rank, keeps_all=keeps_all, trims=trims)
        logs, restarts, resume = directory.path / "logs", options.restarts, options.resume
        run_spec = RunSpec(
            processes,
            commands.member,
            logs,
            deadlines,
            options.recovery,
            restarts,
            chaos,
            resume,
            scratch.sockets if nodes.count == 1 else nodes.host,
            is_elastic(experiment, by_rank=by_rank),
        )
        preparer = commands.preparer() if options.prepare == "next" else None
        keeper = commands.keeper(directory.path)
        children = entrance.children(directory.path, scratch, commands.node, deadlines)
        return _supervise(experiment, directory, done, run_spec, children, keeper, preparer, interrupt)


@dataclass(frozen=True)
class _Commands:
    """How the processes of a run are started, and where."""

    scratch: RunFiles
    processes: Sequence[Process]
    nodes: Nodes
    by_rank: bool
    keeps_all: bool
    trims: bool

    def node(self, who: Hashable) -> int:
        """Of a process, or of one of its lives; others are on the first."""
        process = who.process if isinstance(who, Member) else who
        if process not in self.processes:
            return 0
        return self.nodes.place(self.processes.index(process), len(self.processes))

    def member(self, process: Process) -> list[str]:
        flags = ["--keeps-all"] * self.keeps_all
        return self._command("member", *flags, *map(str, (*process.worker, process.rank)))

    def keeper(self, run_dir: Path) -> list[str]:
        return self._command("keeper", str(run_dir))

    def preparer(self) -> list[str]:
        return self._command("preparer", *["--trim-executables"] * self.trims)

    def _command(self, name: str, *more: str) -> list[str]:
        own = [str(self.scratch.path), MEMORY, *["--by-rank"] * self.by_rank]
        return [sys.executable, "-m", "swift", name, *own, *more]


def _supervise(
    experiment: Experiment,
    directory: RunDirectory,
    done: int,
    run_spec: RunSpec,
    family: AbstractContextManager[Children],
    keeper: Sequence[str],
    preparer: Sequence[str] | None,
    interrupt: Interrupt,
) -> dict[str, Any]:
    """Runs to the end and returns the summary."""
    begun, topology = time.monotonic(), experiment.topology
    directory.log_event(
        "resume" if done else "start",
        done,
        pipelines=topology.num_pipelines,
        stages=topology.num_stages,
        ranks=topology.num_expert_ranks,
        processes=[str(process) for process in run_spec.processes],
    )
    with (
        Display(directory.path.name, experiment.num_steps, begun) as display,
        BackgroundCalls() as behind,
        family as children,
    ):
        run_spec.logs.mkdir(exist_ok=True)
        reporter = Reporter(Journal(begun), display, directory, behind, done)
        log, limits = run_spec.log(KEEPER), run_spec.deadlines
        preparing = CompileClient(children, preparer, run_spec.log(PREPARER), limits.start, limits.heartbeat)
        checkpoints = directory.checkpoints_path
        saving = CheckpointClient(children, keeper, log, checkpoints, run_spec.processes, limits.start, limits.saving)
        if experiment.checkpoint.every:
            reporter.saved(saving.newest)
        try:
            with Supervisor(run_spec, children, saving, preparing, reporter) as supervisor:
                _run(supervisor, saving, interrupt)
        except RunError:
            with suppress(OSError, RunError):  # the record may be what has ended the run
                reporter.note("stop", reporter.written, None, goodput=reporter.goodput())
            raise
        if interrupt.requested:
            how = "no checkpoint was saved" if saving.newest is None else f"--resume goes on from {saving.newest}"
            text = f"interrupted after iteration {reporter.written}; {how}"
            reporter.note("interrupt", reporter.written, text, goodput=reporter.goodput())
            behind.settle()  # a record that cannot be written is no stop in order
            raise KeyboardInterrupt
        goodput = reporter.goodput()
        reporter.note("finish", experiment.num_steps, None, goodput=goodput)
        behind.settle()
        summary = summarize(experiment, directory, "cpu", goodput=goodput)
    Console(stderr=True).print(goodput_table(goodput))
    return summary


def _tell(nodes: Nodes, text: str) -> None:
    print(f"node {nodes.own}: {text}" if nodes.count > 1 else text, file=sys.stderr, flush=True)


def _place(
    experiment: Experiment, processes: Sequence[Process], by_rank: bool, nodes: Nodes, run_dir: Path
) -> StorageLocation:
    """Where the processes of this node keep their states; raises SettingError where there is no room."""
    settle_jax(experiment, num_devices=1)
    demand = MemoryDemand.of(experiment, processes, by_rank=by_rank, is_alone=nodes.count == 1)
    clear_backends()  # the supervisor has no use for devices
    return choose_place(demand, run_dir)


def _run(supervisor: Supervisor, saving: CheckpointClient, interrupt: Interrupt) -> None:
    """Runs to the end; raises RunError where the newest state is not saved then, once it is kept where it can be."""
    try:
        supervisor.run(lambda: interrupt.requested)
    except (RunError, OSError) as error:
        kept = supervisor.keep_unsaved()
        told = str(error)
        if isinstance(error, OSError):
            newest = "there is no checkpoint yet" if saving.newest is None else f"--resume goes on from {saving.newest}"
            told = f"{error}: stopped; {newest}"
        raise RunError(told if kept is None else f"{told}; {kept}") from error
    kept = supervisor.keep_unsaved()
    if kept is not None:
        newest = (
            "no other checkpoint is" if saving.newest is None else f"the checkpoint of iteration {saving.newest} is"
        )
        raise RunError(f"the last checkpoint was not saved: stopped; {kept}; {newest} there")


def _is_by_rank(num_processes: int, topology: Topology) -> bool:
    """Whether a process is an expert rank; raises SettingError where it can be neither that nor a worker."""
    num_workers, num_ranks = len(topology.workers), topology.num_devices
    if num_processes not in (num_workers, num_ranks):
        allowed = f"must be {num_workers}, one for each worker of {topology}"
        allowed += f", or {num_ranks}, one for each expert rank" if num_ranks != num_workers else ""
        raise SettingError("--processes", num_processes, allowed)
    return num_processes != num_workers


def _check(experiment: Experiment) -> None:
    """Raises SettingError where an experiment asks for what real processes cannot do."""
    refused = {
        "failures": (bool(experiment.failures), "must be empty: processes fail for real, see --chaos"),
        "planner": (experiment.planner in FAULT_FREE, "plans without failures only"),
        "move_roles": (experiment.move_roles, "must be False: a process keeps its stage"),
        "ranks": (experiment.ranks != "emulated", "must be 'emulated': processes run on the CPU so far"),
    }
    for name, (is_wrong, allowed) in refused.items():
        if is_wrong:
            raise SettingError(f"Experiment.{name}", getattr(experiment, name), allowed)


def _check_snapshots(experiment: Experiment, by_rank: bool) -> None:
    """Raises SettingError where nobody would go on from the snapshots that an experiment asks for."""
    every = experiment.checkpoint.snapshot_every
    if every and not is_elastic(experiment, by_rank=by_rank):
        allowed = "must be 0, unless a single worker has a process for each expert rank: no other goes on without one"
        raise SettingError("CheckpointConfig.snapshot_every", every, allowed)
