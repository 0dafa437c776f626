"""The job that the options of ``swift launch`` describe."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from jax.extend.backend import clear_backends

from swift.cli.commands import corpora_directory
from swift.cli.configuration import load_experiment
from swift.cli.data.serving import input_hosts_of_runs
from swift.cli.launch.nodes import Nodes, ProcessCommands, nodes_of
from swift.cli.launch.platforms import Platform
from swift.cli.options.deadlines import OF_PROCESSES, deadlines_of
from swift.data.index_cache import find_index
from swift.data.pipeline.elsewhere import ConnectHosts
from swift.deadlines import Deadlines
from swift.elastic.coordinator.fault_injection import FaultInjection, parse_chaos
from swift.elastic.coordinator.memory_demand import MemoryDemand, StorageLocation, choose_storage
from swift.elastic.coordinator.run_spec import RunSpec
from swift.elastic.elastic_ranks import is_elastic
from swift.elastic.membership.members import Process, processes_of
from swift.elastic.membership.run_status import Recovery, RecoveryPolicy
from swift.elastic.state.run_files import RunFiles
from swift.elastic.worker.process_setup import configure_jax
from swift.errors import SettingError, check_count
from swift.schedules.planners.registry import FAULT_FREE
from swift.schedules.plans.holders import OWN_CUT, BlockHolders
from swift.topology import Topology
from swift.train.fitting import check_processes
from swift.train.interrupt import Interrupt
from swift.train.settings.experiment import Experiment

_ENDING_S = 30.0
"""Seconds from the deadline of a stop to the end of this process, which might wait for a file system forever."""


@dataclass(frozen=True, kw_only=True)
class LaunchJob:
    """A run of processes, as the command line describes it.

    Attributes:
        experiment: settings of the run.
        options: command line.
        processes: all processes of the run.
        by_rank: whether each expert rank is a process, rather than each worker.
        nodes: machines of the run.
        platform: what its processes compute on, and the options that depend on that.
        deadlines: time limits.
        faults: faults to be injected.
        connect: function that connects to input hosts while the index of the corpus is built; None: there are none.
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
        """Makes the job of a command line; raises SettingError if it cannot run."""
        experiment = load_experiment(options.config, options.set)
        by_rank = _is_by_rank(options.processes, experiment.topology)
        processes = processes_of(experiment.topology, by_rank=by_rank)
        _check(experiment)
        platform = Platform.of(options.platform, experiment, options.recovery, options.prepare)
        if experiment.move_rule is not None and platform.prepare == "none":
            raise SettingError("--prepare", "none", f"finds no blocks to move: Experiment.adapt = {experiment.adapt!r}")
        _check_snapshots(experiment, by_rank)
        _check_shares(experiment, by_rank)
        check_count("--restarts", options.restarts, least=0)
        _check_copies(options.copy_every, platform.recovery)
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
                _why_unprepared(experiment, platform.prepare, by_rank=by_rank),
            ),
            connect=input_hosts_of_runs([experiment.data], options, has_network=True),
        )
        # The last check, as JAX takes seconds to start.
        platform.check_node(len(nodes.own_of(processes)), _devices_per_process(experiment, by_rank))
        return job

    @property
    def copy_every(self) -> int:
        """Iterations between copies of the states for processes that are started again; 0: none are made."""
        return self.options.copy_every or 1 if self.platform.recovery == "restart" else 0

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the processes."""
        return self.platform.environment(os.environ, self.nodes.count)

    @property
    def is_elastic(self) -> bool:
        """Returns whether the run can continue on any ranks that are left."""
        return is_elastic(self.experiment, by_rank=self.by_rank)

    @property
    def own_cut(self) -> BlockHolders:
        """Workers that hold each chunk; False where all pipelines are cut alike."""
        chunks = self.experiment.chunks
        return OWN_CUT if chunks.is_one_cut else BlockHolders(chunks.stage_DC)

    def show(self, text: str) -> None:
        """Prints a line, after the name of this node if there are several."""
        line = f"node {self.nodes.own}: {text}" if self.nodes.count > 1 else text
        print(line, file=sys.stderr, flush=True)

    def storage(self, run_dir: Path) -> StorageLocation:
        """Chooses where the processes of this node keep states.

        Raises:
            SettingError: there is no room for them, or the processes do not fit into the memory of this node.
        """
        configure_jax(self.experiment, num_devices=1)
        here, is_alone = self.nodes.own_of(self.processes), self.nodes.count == 1
        platform = self.platform.accelerator
        if platform is None:
            warning = check_processes(self.experiment, len(here), len(self.processes))
            if warning is not None:
                self.show(warning)
        demand = MemoryDemand.of(self.experiment, here, by_rank=self.by_rank, is_alone=is_alone, platform=platform)
        clear_backends()  # the supervisor has no use for devices
        return choose_storage(demand, run_dir)

    def corpus(self) -> Path | None:
        """Finds or builds the index of the corpus."""
        directory = corpora_directory()
        if directory is None:
            return None
        return find_index(self.experiment.data, directory, self.show, connect=self.connect)

    def interrupt(self) -> Interrupt:
        """Holds signals back from now on, and ends the process some time after the first."""
        return Interrupt(self.deadlines.stopping + _ENDING_S).hold()

    def commands(self, scratch: RunFiles) -> ProcessCommands:
        """Makes the commands that start processes of the run."""
        return ProcessCommands(
            scratch=scratch,
            processes=self.processes,
            nodes=self.nodes,
            by_rank=self.by_rank,
            copy_every=self.copy_every,
            forming_s=self.deadlines.forming,
            platform=self.platform.accelerator,
            devices_per_process=_devices_per_process(self.experiment, self.by_rank),
            init_from=self.options.init_from,
            init_config=self.options.init_config,
        )

    def spec(self, scratch: RunFiles, logs: Path) -> RunSpec:
        """Makes the spec that the supervisor follows."""
        return RunSpec(
            processes=self.processes,
            command=self.commands(scratch).member,
            logs=logs,
            deadlines=self.deadlines,
            policy=RecoveryPolicy(
                recovery=self.platform.recovery,
                max_restarts=self.options.restarts,
                begins_with_state=self.options.resume or self.options.init_from is not None,
                is_elastic=self.is_elastic,
                own_cut=self.own_cut,
                move_rule=self.experiment.move_rule,
                copy_every=self.copy_every,
                joins_once=self.platform.accelerator is not None,
                needs_all=self.platform.accelerator == "tpu",
            ),
            faults=self.faults,
            services=scratch.sockets if self.nodes.count == 1 else self.nodes.host,
        )


def _is_by_rank(num_processes: int, topology: Topology) -> bool:
    """Returns whether each expert rank is a process; raises SettingError if the number fits neither."""
    num_workers, num_ranks = len(topology.workers), topology.num_devices
    if num_processes not in (num_workers, num_ranks):
        allowed = f"must be {num_workers}, one for each worker of {topology}"
        allowed += f", or {num_ranks}, one for each expert rank" if num_ranks != num_workers else ""
        raise SettingError("--processes", num_processes, allowed)
    return num_processes != num_workers


def _why_unprepared(experiment: Experiment, prepare: str, *, by_rank: bool) -> str | None:
    """Says why no programs are ever prepared for the loss of a process; None: they are."""
    if prepare == "none":
        return "with --prepare none no programs are prepared"
    if experiment.topology.num_pipelines == 1 and not is_elastic(experiment, by_rank=by_rank):
        return "with one pipeline the others cannot continue without a process, so no programs are prepared for that"
    return None


def _check(experiment: Experiment) -> None:
    """Raises SettingError if real processes cannot run an experiment."""
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


def _check_copies(copy_every: int | None, recovery: Recovery) -> None:
    """Raises SettingError if copies of the state are asked for that nobody would need, or none where all do."""
    if copy_every is None:
        return
    check_count("--copy-every", copy_every, least=1)
    if recovery != "restart":
        allowed = "would change nothing without --recovery restart: the others keep their states when a process dies"
        raise SettingError("--copy-every", copy_every, allowed)


def _check_shares(experiment: Experiment, by_rank: bool) -> None:
    """Raises SettingError if ranks with different shares would be copies of a lost one's."""
    allowed = "must be 'whole' where a single worker has a process for each expert rank, and continues without one"
    for name in ("embedding", "head"):
        if getattr(experiment, name) == "shares" and is_elastic(experiment, by_rank=by_rank):
            raise SettingError(f"Experiment.{name}", "shares", allowed)


def _check_snapshots(experiment: Experiment, by_rank: bool) -> None:
    """Raises SettingError if an experiment sets snapshots from which no process would continue."""
    every = experiment.checkpoint.snapshot_every
    if every and not is_elastic(experiment, by_rank=by_rank):
        allowed = "must be 0, unless a single worker has a process for each expert rank: no other survives without one"
        raise SettingError("CheckpointConfig.snapshot_every", every, allowed)
