"""A process beside a run that compiles what the run's processes may need next, while they compute.

It is told which workers are down, and makes ready what the others would need now, and after one more failure or return:
it puts the programs into the store of the run, where the processes look first. It pretends to be each group in turn,
see ``swift.mesh.rehearsal``. Nothing is lost if it dies, the others then compile for themselves: so it trims programs.
"""

import ctypes
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple, NoReturn, TextIO

import jax
from jax.extend.backend import clear_backends
from jax.sharding import Mesh

from swift.errors import RunError
from swift.launch.preparer_wire import Prepared, Trouble, read_wish, said_line
from swift.launch.surroundings import settle_jax, take_output
from swift.mesh import AXES, LiveMesh, storage_mesh
from swift.mesh.rehearsal import Rehearsal
from swift.pipeline import Configuration, Configurator, Steps, neighbours
from swift.pipeline.joining import compiled_share, share_key
from swift.pipeline.program_store import ProgramStore
from swift.pipeline.steps import Kind, program_key
from swift.topology import Topology, Worker
from swift.train import Experiment

Failed = frozenset[Worker]


class Job(NamedTuple):
    """What is made ready together.

    Attributes:
        failed: the workers that would be down.
        kinds: of the programs.
        returning: who would have come back, and get the state of a peer.
    """

    failed: Failed
    kinds: tuple[Kind, ...]
    returning: Worker | None = None


def jobs_for(experiment: Experiment, failed: Failed) -> list[Job]:
    """What to make ready while some workers are down, the most urgent first.

    That is what the run needs now, then after one more failure, then after a return; last what only some iterations
    need, in the same order.
    """
    evaluates = bool(experiment.eval_every or experiment.checkpoint.every)
    kinds: tuple[Kind, ...] = ("window" if experiment.window > 1 else "single",)
    kinds += ("evaluate",) if evaluates else ()
    near = [failed, *_by_urgency(experiment.topology, failed)]
    now = [Job(other, kinds, next(iter(failed - other), None)) for other in near]
    return now + [Job(other, ("single",)) for other in near if experiment.window > 1]


def _by_urgency(topology: Topology, failed: Failed) -> list[Failed]:
    return sorted(neighbours(topology, failed), key=len, reverse=True)


class Preparer:
    """Makes configurations ready: compiles their programs into the run's store.

    Args:
        experiment: what is run.
        programs: the directory of the run's programs.
    """

    def __init__(self, experiment: Experiment, programs: Path):
        self._experiment, self._store = experiment, ProgramStore(programs, trims=True)
        topology = experiment.topology
        self._program = experiment.program(storage_mesh(topology))
        self._configurator = Configurator(experiment.plan_settings(self._program))
        self._processes_per_worker = topology.num_expert_ranks // jax.local_device_count()
        clear_backends()

    def make_ready(self, job: Job) -> int:
        """Compiles what is not in the store.

        Returns:
            How many programs were missing.

        Raises:
            RunError: this JAX does not let a process pretend to be a group.
            SettingError: the planner cannot plan for these failures.
        """
        configuration = self._configurator.configure(job.failed)
        kinds = [kind for kind in job.kinds if self._key(configuration, kind) not in self._store]
        has_R = [place.worker != job.returning for place in configuration.places]
        shares = not all(has_R) and share_key(configuration, has_R) not in self._store
        if kinds or shares:
            with Rehearsal(len(configuration.places) * self._processes_per_worker) as rehearsal:
                # In a function of its own: what it makes has to be gone when the devices go.
                self._compile(rehearsal, configuration, kinds, has_R if shares else None)
            _return_memory()
        return len(kinds) + shares

    def _key(self, configuration: Configuration, kind: Kind) -> object:
        return program_key(configuration, kind, keep_state=True)

    def _compile(
        self, rehearsal: Rehearsal, configuration: Configuration, kinds: list[Kind], has_R: list[bool] | None
    ) -> None:
        """Just as a process of the run does when it forms an epoch."""
        experiment, topology = self._experiment, self._experiment.topology
        live = LiveMesh(topology, configuration.places, Mesh(rehearsal.grid(topology.num_expert_ranks), AXES))
        program = self._program.at(live)
        steps = Steps(program, configuration, experiment.sequences_per_microbatch, self._store, keep_state=True)
        for kind in kinds:
            steps.compiled(kind)
        if has_R is not None:
            compiled_share(program, self._store, has_R)


def prepare(experiment: Experiment, programs: Path, num_local_devices: int) -> NoReturn:
    """The main function of the process: follows what comes on standard input until that ends.

    Args:
        experiment: what is run.
        programs: the directory of the run's programs.
        num_local_devices: of each process of the run: all expert ranks of a worker, or one.
    """
    settle_jax(experiment, num_local_devices)
    output = take_output()
    wishes = SimpleQueue[Failed]()
    listener = threading.Thread(target=_listen, args=(sys.stdin, wishes), name="wishes", daemon=True)
    listener.start()
    try:
        preparer = Preparer(experiment, programs)
        while True:
            failed = wishes.get()
            for job in jobs_for(experiment, failed):
                if not wishes.empty():
                    break
                _say(output, _outcome(preparer, job))
    except RunError as error:  # which every other job would meet, too
        _say(output, Trouble(str(error)))
    while True:
        listener.join()  # which ends the process


def _return_memory() -> None:
    """To the system, what the compiler has freed: glibc keeps it, some 100 MB more with every large program."""
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _listen(source: TextIO, wishes: SimpleQueue[Failed]) -> None:
    try:
        for line in source:
            wishes.put(read_wish(line))
    finally:  # the main thread may be in XLA, which cannot be interrupted
        os._exit(0)


def _outcome(preparer: Preparer, job: Job) -> Prepared | Trouble:
    begun = time.perf_counter()
    try:
        compiled = preparer.make_ready(job)
    except RunError:
        raise
    except Exception as error:  # whatever it is: the run goes on, and compiles for itself
        down = ", ".join(f"{d}:{p}" for d, p in sorted(job.failed)) or "none"
        return Trouble(f"with {down} down: {error}")
    return Prepared(job.failed, job.kinds, compiled, round(time.perf_counter() - begun, 3))


def _say(output: TextIO, said: Prepared | Trouble) -> None:
    try:
        output.write(said_line(said))
        output.flush()
    except BrokenPipeError:
        os._exit(0)
