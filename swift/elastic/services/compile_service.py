"""The compile service: a process that compiles the programs that workers may need next, while they train.

It receives the set of failed workers, and prepares the programs for the present configuration and for every
configuration after one more failure or return. It puts them into the run's executable cache, where workers look first.
To compile for a group of processes, it poses as that group, see ``swift.elastic.jax_group``. If the service dies,
nothing is lost, since workers then compile their programs themselves.
"""

import ctypes
import os
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple, NoReturn, TextIO

import jax
import numpy as np
from jax.extend.backend import clear_backends

from swift.config.cuts import model_chunks
from swift.config.experiment import Experiment
from swift.elastic.jax_group import CompileOnlyGroup
from swift.elastic.state.slices import ElasticSpecs, compiled_neighbour, neighbour_key
from swift.elastic.transport.messages import (
    COMPILE_ANSWERS,
    COMPILE_REQUESTS,
    Alive,
    CompileFailed,
    CompileRequest,
    CutPrepared,
    Prepared,
)
from swift.elastic.worker.channel import LineWriter, configure_jax
from swift.errors import RunError
from swift.pipeline.reconfigure.compiled_steps import StepKind, Steps, program_key
from swift.pipeline.reconfigure.configuration import Configuration, Plan, neighbours
from swift.pipeline.reconfigure.executables import ExecutableCache, compiled_slots, slots_key
from swift.pipeline.reconfigure.recut import Cuts, PreparedRecut, Recut, spec_with_assignment
from swift.pipeline.reconfigure.transfer import compiled_transfer, share_key
from swift.pipeline.step.spec import StepSpec
from swift.schedules.plans.normalize import DEFAULT_ASSIGNMENT, ChunkAssignment
from swift.tasks import start_thread
from swift.topology import Worker, worker_names
from swift.train.build import make_plan_settings
from swift.train.saved_state import split_of


class CompileJob(NamedTuple):
    """The programs for one configuration that the run may change to.

    Attributes:
        failed: workers that are down.
        kinds: kinds of programs.
        returning: worker that would return and copy the state of a peer; None if there is none.
        num_ranks: number of expert ranks of an elastic run; None if the run is not elastic.
        before: workers that hold each block before the change; falsy for the run's own cut.
        is_better: whether to prepare a better cut for the survivors, rather than the run's own.
    """

    failed: frozenset[Worker]
    kinds: tuple[StepKind, ...]
    returning: Worker | None = None
    num_ranks: int | None = None
    before: ChunkAssignment = DEFAULT_ASSIGNMENT
    is_better: bool = False


def jobs_for(experiment: Experiment, request: CompileRequest) -> list[CompileJob]:
    """Returns the jobs for the failed workers or the number of ranks in a request, the most urgent first.

    The order is: the present configuration, a better cut, one more failure, one return; then, in the same order, the
    programs that only a few iterations need. In an elastic run, it is: the present number of ranks, one less, one more.
    """
    evaluates = bool(experiment.eval_every or experiment.checkpoint.every)
    kinds: tuple[StepKind, ...] = ("window" if experiment.window > 1 else "single",)
    kinds += ("evaluate",) if evaluates else ()
    failed, num_ranks, cut, seeks_cut = request
    if num_ranks is not None:
        possible = range(1, experiment.topology.num_expert_ranks + 1)
        counts = (num_ranks, num_ranks - 1, num_ranks + 1)
        return [CompileJob(failed, kinds, num_ranks=count) for count in counts if count in possible]
    near = sorted(neighbours(experiment.topology, failed, model_chunks(experiment)), key=len, reverse=True)
    jobs = [CompileJob(failed, kinds, is_better=bool(cut))]
    if experiment.adapt != "reroute" and seeks_cut and failed and not cut:
        jobs.append(CompileJob(failed, kinds, is_better=True))
    jobs += [CompileJob(other, kinds, next(iter(failed - other), None), before=cut) for other in near]
    if cut:  # a cut is used only once: if a generation forms again with the same failures, it has the run's own cut
        jobs.append(CompileJob(failed, kinds, before=cut))
    # These jobs need no programs to move states: those of the jobs above serve both kinds of programs.
    few = [job._replace(kinds=("single",), returning=None, before=DEFAULT_ASSIGNMENT) for job in jobs]
    return [*jobs, *few] if experiment.window > 1 else jobs


class CompileService:
    """Compiles the programs of jobs into the run's executable cache.

    Args:
        experiment: settings of the run.
        programs: directory of the run's programs.
        sockets: directory that only its owner may enter.
    """

    def __init__(self, experiment: Experiment, programs: Path, sockets: Path):
        self._experiment, self._executables = experiment, ExecutableCache(programs)
        self._sockets = sockets
        self._specs = ElasticSpecs(experiment)
        spec = self._specs.on(experiment.topology.num_expert_ranks)
        num_sequences = experiment.sequences_per_microbatch
        self._cuts = Cuts(spec, make_plan_settings(experiment, spec), num_sequences, self._executables)
        self._devices_per_process = jax.local_device_count()
        clear_backends()

    def prepare(self, job: CompileJob) -> int:
        """Compiles the programs of a job that are not in the executable cache yet.

        Returns:
            The number of programs that were missing.

        Raises:
            RunError: this version of JAX does not let a process pose as a group.
            SettingError: there is no plan for this set of failed workers.
            OSError: there is no space for the programs.
        """
        recut = self._cuts.find(job.failed) if job.is_better else None
        spec, configuration = self._cuts.spec(recut), self._cuts.configure(recut, job.failed)
        if job.num_ranks is not None:
            spec = self._specs.on(job.num_ranks)
        clear_backends()
        live_spec = spec.at(replace(spec.live, rows=configuration.rows))
        keys = self._keys(job, configuration, self._before(job, live_spec), live_spec)
        missing = [key for key in keys if key not in self._executables]
        if missing:
            num_devices = len(configuration.rows) * spec.live.num_ranks
            with CompileOnlyGroup(num_devices // self._devices_per_process, self._sockets) as group:
                # In its own function, since all its objects must be freed before the group drops the devices.
                self._compile(group, configuration, spec, job)
            _return_memory()
            if any(key not in self._executables for key in missing):
                raise OSError("compiled programs cannot be kept, see the log")
        return len(missing)

    def better(self, failed: frozenset[Worker]) -> PreparedRecut | None:
        """Plans the best cut for the survivors of these failures; returns None if no cut is faster than re-routing.

        Raises:
            SettingError: no plan fits into the memory of the devices.
        """
        recut = self._cuts.find(failed)
        self._cuts.keep_only([recut])
        if recut is None:
            return None
        return PreparedRecut.of(recut, self._cuts.spec(None), self._plan(failed, recut), self._plan(failed, None))

    def _plan(self, failed: frozenset[Worker], recut: Recut | None) -> Plan:
        spec, configuration = self._cuts.spec(recut), self._cuts.configure(recut, failed)
        live_spec = spec.at(replace(spec.live, rows=configuration.rows))
        return Steps(live_spec, configuration, self._experiment.sequences_per_microbatch).plan

    def _before(self, job: CompileJob, spec: StepSpec) -> StepSpec:
        """Returns the step spec of the state before the change, on the mesh after the change."""
        return (
            spec if job.num_ranks is not None else spec_with_assignment(self._cuts.spec(None).at(spec.live), job.before)
        )

    def _keys(self, job: CompileJob, configuration: Configuration, before: StepSpec, spec: StepSpec) -> list[object]:
        num_ranks = spec.live.num_ranks
        keys = [program_key(configuration, num_ranks, kind, keep_state=True) for kind in job.kinds]
        has_R = _has_state(job, configuration)
        if _is_shared(before, spec, has_R):
            keys.append(share_key(before, spec, has_R, configuration.device_rows))
        if job.num_ranks is not None:
            keys.append(slots_key(spec))
            keys += [neighbour_key(num_ranks, k) for k in self._experts_of_copies(job.num_ranks)]
        return keys

    def _experts_of_copies(self, num_ranks: int) -> list[int]:
        """Returns the numbers of experts per layer that slice copies can have, see ``NeighbourCopies``."""
        config, num_classes = self._experiment.checkpoint, split_of(self._specs.on(num_ranks)).num_classes
        has_neighbour = config.snapshot_every and num_ranks > 1
        return sorted({num_classes, min(num_classes, config.snapshot_k(num_classes))}) if has_neighbour else []

    def _compile(
        self,
        group: CompileOnlyGroup,
        configuration: Configuration,
        spec: StepSpec,
        job: CompileJob,
    ) -> None:
        """Compiles exactly as a worker does when it forms a generation; otherwise, the keys would not match."""
        topology, num_sequences = spec.live.topology, self._experiment.sequences_per_microbatch
        devices_RN = group.grid(topology.num_expert_ranks)
        steps = Steps.of_processes(spec, configuration, devices_RN, num_sequences, self._executables)
        spec, before = steps.spec, self._before(job, steps.spec)
        for kind in job.kinds:
            if program_key(configuration, topology.num_expert_ranks, kind, keep_state=True) not in self._executables:
                steps.compiled(kind)
        has_R = _has_state(job, configuration)
        if _is_shared(before, spec, has_R):
            compiled_transfer(before, spec, self._executables, has_R, configuration.device_rows)
        if job.num_ranks is not None:
            compiled_slots(spec, self._executables)
            for k in self._experts_of_copies(job.num_ranks):
                compiled_neighbour(spec, self._executables, k)


def run_compile_service(experiment: Experiment, programs: Path, sockets: Path, num_local_devices: int) -> NoReturn:
    """Runs the compile service: takes requests from standard input until that is closed, then ends the process.

    Args:
        experiment: settings of the run.
        programs: directory of the run's programs.
        sockets: directory that only its owner may enter.
        num_local_devices: number of devices of each worker process: all expert ranks of a worker, or one.
    """
    configure_jax(experiment, num_local_devices)
    output = LineWriter(lambda: os._exit(0))
    output.repeat(lambda: COMPILE_ANSWERS.line(Alive()))
    requests = SimpleQueue[CompileRequest]()
    listener = start_thread(_listen, sys.stdin, requests, name="requests")
    try:
        service = CompileService(experiment, programs, sockets)
        while True:
            request = requests.get()
            for job in jobs_for(experiment, request):
                if not requests.empty():  # the configuration has changed: the remaining jobs are outdated
                    break
                if (outcome := _outcome(service, job)) is not None:
                    output.write(COMPILE_ANSWERS.line(outcome))
    except RunError as error:  # every other job would fail in the same way
        output.write(COMPILE_ANSWERS.line(CompileFailed(str(error))))
    while True:
        listener.join()  # ends the process


def _has_state(job: CompileJob, configuration: Configuration) -> list[bool]:
    return [row.worker != job.returning for row in configuration.rows]


def _is_shared(before: StepSpec, spec: StepSpec, has_R: list[bool]) -> bool:
    """Returns whether the change needs a program that copies blocks between workers.

    It needs none if a block is lost with the failed workers, since all workers then resume from an older state.
    """
    had_RC = before.chunks.holds_HC[before.holding_R][np.array(has_R)]
    return bool(had_RC.any(axis=0).all()) and not (all(has_R) and before.has_same_chunks(spec))


def _return_memory() -> None:
    """Makes glibc release the memory that the compiler has freed; it would keep about 100 MB per large program."""
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _listen(source: TextIO, requests: SimpleQueue[CompileRequest]) -> None:
    try:
        for line in source:
            requests.put(COMPILE_REQUESTS.read(line))
    finally:  # the main thread may be in XLA, which cannot be interrupted
        os._exit(0)


def _outcome(service: CompileService, job: CompileJob) -> Prepared | CutPrepared | CompileFailed | None:
    """Prepares the programs of a job; returns the message to the supervisor, or None if there is no better cut."""
    start_time = time.perf_counter()
    try:
        better = service.better(job.failed) if job.is_better else None
        if job.is_better and better is None:
            return None
        compiled = service.prepare(job)
    except RunError:
        raise
    except Exception as error:  # whatever the error is, the run continues, and workers compile their own programs
        down = ", ".join(worker_names(job.failed)) or "none"
        where = f"with {down} down" if job.num_ranks is None else f"on {job.num_ranks} ranks"
        return CompileFailed(f"{where}{' and other cuts' if job.is_better else ''}: {error}")
    seconds = round(time.perf_counter() - start_time, 3)
    if better is not None:
        return CutPrepared(job.failed, better.holders, better.microbatches, better.gain, better.most_bytes, seconds)
    return Prepared(job.failed, job.num_ranks, job.kinds, compiled, seconds, job.before)
