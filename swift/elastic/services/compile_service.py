"""A process beside a run that compiles what the run's processes may need next, while they compute.

It hears which workers are down, and makes ready what the others would need now, and after one more failure or return:
it puts the programs into the store of the run, where the processes look first. It pretends to be each group in turn,
see ``swift.elastic.compile_only_group``. Nothing is lost if it dies, the others then compile for themselves: so it is
the one process that may trim programs.
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

from swift.elastic.compile_only_group import CompileOnlyGroup
from swift.elastic.elastic_programs import ElasticPrograms
from swift.elastic.state import compiled_neighbour, neighbour_key
from swift.elastic.transport import (
    COMPILE_NEWS,
    COMPILE_REQUESTS,
    Alive,
    CompileFailed,
    CompileNews,
    CompileRequest,
    Prepared,
)
from swift.elastic.worker import settle_jax, take_output
from swift.errors import RunError
from swift.mesh import AXES, LiveMesh
from swift.pipeline import Configuration, Configurator, Steps, StepSpec, neighbours
from swift.pipeline.reconfigure import (
    ExecutableCache,
    StepKind,
    compiled_share,
    compiled_slots,
    program_key,
    share_key,
    slots_key,
)
from swift.topology import Topology, Worker
from swift.train import Experiment
from swift.train.checkpoints import split_of

Failed = frozenset[Worker]
_BEAT_S = 0.5


class CompileJob(NamedTuple):
    """What is made ready together.

    Attributes:
        failed: the workers that would be down.
        kinds: of the programs.
        returning: who would have come back, and get the state of a peer.
        num_ranks: the expert ranks that would be there, of an elastic run; None: they do not change.
    """

    failed: Failed
    kinds: tuple[StepKind, ...]
    returning: Worker | None = None
    num_ranks: int | None = None


def jobs_for(experiment: Experiment, wish: CompileRequest) -> list[CompileJob]:
    """What to make ready while some workers or ranks are down, the most urgent first.

    That is what the run needs now, then after one more failure, then after a return; last what only some iterations
    need, in the same order.
    """
    evaluates = bool(experiment.eval_every or experiment.checkpoint.every)
    kinds: tuple[StepKind, ...] = ("window" if experiment.window > 1 else "single",)
    kinds += ("evaluate",) if evaluates else ()
    failed, num_ranks = wish
    if num_ranks is not None:
        some = range(1, experiment.topology.num_expert_ranks + 1)
        counts = (num_ranks, num_ranks - 1, num_ranks + 1)
        return [CompileJob(failed, kinds, num_ranks=count) for count in counts if count in some]
    near = [failed, *_by_urgency(experiment.topology, failed)]
    now = [CompileJob(other, kinds, next(iter(failed - other), None)) for other in near]
    return now + [CompileJob(other, ("single",)) for other in near if experiment.window > 1]


def _by_urgency(topology: Topology, failed: Failed) -> list[Failed]:
    return sorted(neighbours(topology, failed), key=len, reverse=True)


class CompileService:
    """Makes configurations ready: compiles their programs into the run's store.

    Args:
        experiment: what is run.
        programs: the directory of the run's programs.
        sockets: a directory that only its owner may enter.
        trims: make programs smaller, see ``ExecutableCache``.
    """

    def __init__(self, experiment: Experiment, programs: Path, sockets: Path, *, trims: bool = False):
        self._experiment, self._store = experiment, ExecutableCache(programs, trims=trims)
        self._sockets = sockets
        self._programs = ElasticPrograms(experiment)
        spec = self._programs.on(experiment.topology.num_expert_ranks)
        self._configurator = Configurator(experiment.plan_settings(spec), self._store)
        self._devices_per_process = jax.local_device_count()
        clear_backends()

    def make_ready(self, job: CompileJob) -> int:
        """Compiles what is not in the store.

        Returns:
            How many programs were missing.

        Raises:
            RunError: this JAX does not let a process pretend to be a group.
            SettingError: the planner cannot plan for these failures.
            OSError: the store has no room for the programs.
        """
        configuration = self._configurator.configure(job.failed)
        spec = self._programs.on(job.num_ranks or self._experiment.topology.num_expert_ranks)
        clear_backends()
        missing = [key for key in self._keys(job, configuration, spec.live.num_ranks) if key not in self._store]
        if missing:
            num_devices = len(configuration.places) * spec.live.num_ranks
            with CompileOnlyGroup(num_devices // self._devices_per_process, self._sockets) as rehearsal:
                # In a function of its own: what it makes has to be gone when the devices go.
                self._compile(rehearsal, configuration, spec, job)
            _return_memory()
            if any(key not in self._store for key in missing):
                raise OSError("what was compiled cannot be kept, see the log")
        return len(missing)

    def _keys(self, job: CompileJob, configuration: Configuration, num_ranks: int) -> list[object]:
        keys = [program_key(configuration, num_ranks, kind, keep_state=True) for kind in job.kinds]
        has_R = _has_state(job, configuration)
        if not all(has_R):
            keys.append(share_key(configuration, has_R))
        if job.num_ranks is not None:
            keys.append(slots_key(num_ranks, [place.stage for place in configuration.places]))
            keys += [neighbour_key(num_ranks, k) for k in self._experts_of_copies(job.num_ranks)]
        return keys

    def _experts_of_copies(self, num_ranks: int) -> list[int]:
        """Experts of a layer that copies of a rank's slices have, see ``NeighbourCopies``."""
        config, num_classes = self._experiment.checkpoint, split_of(self._programs.on(num_ranks)).num_classes
        has_buddy = config.snapshot_every and num_ranks > 1
        return sorted({num_classes, min(num_classes, config.snapshot_k(num_classes))}) if has_buddy else []

    def _compile(
        self, rehearsal: CompileOnlyGroup, configuration: Configuration, spec: StepSpec, job: CompileJob
    ) -> None:
        """Just as a process of the run does when it forms a generation."""
        topology, num_sequences = spec.live.topology, self._experiment.sequences_per_microbatch
        grid = Mesh(rehearsal.grid(topology.num_expert_ranks), AXES)
        spec = spec.at(LiveMesh(topology, configuration.places, grid))
        steps = Steps(spec, configuration, num_sequences, self._store, keep_state=True)
        for kind in job.kinds:
            if program_key(configuration, topology.num_expert_ranks, kind, keep_state=True) not in self._store:
                steps.compiled(kind)
        has_R = _has_state(job, configuration)
        if not all(has_R):
            compiled_share(spec, self._store, has_R)
        if job.num_ranks is not None:
            compiled_slots(spec, self._store)
            for k in self._experts_of_copies(job.num_ranks):
                compiled_neighbour(spec, self._store, k)


def run_compile_service(
    experiment: Experiment, programs: Path, sockets: Path, num_local_devices: int, *, trims: bool = False
) -> NoReturn:
    """The main function of the process: follows what comes on standard input until that ends.

    Args:
        experiment: what is run.
        programs: the directory of the run's programs.
        sockets: a directory that only its owner may enter.
        num_local_devices: of each process of the run: all expert ranks of a worker, or one.
        trims: make programs smaller, see ``ExecutableCache``.
    """
    settle_jax(experiment, num_local_devices)
    channel = _Voice()
    wishes = SimpleQueue[CompileRequest]()
    listener = threading.Thread(target=_listen, args=(sys.stdin, wishes), name="wishes", daemon=True)
    listener.start()
    try:
        preparer = CompileService(experiment, programs, sockets, trims=trims)
        while True:
            wish = wishes.get()
            for job in jobs_for(experiment, wish):
                if not wishes.empty():
                    break
                channel.say(_outcome(preparer, job))
    except RunError as error:  # which every other job would meet, too
        channel.say(CompileFailed(str(error)))
    while True:
        listener.join()  # which ends the process


def _has_state(job: CompileJob, configuration: Configuration) -> list[bool]:
    return [place.worker != job.returning for place in configuration.places]


def _return_memory() -> None:
    """To the system, what the compiler has freed: glibc keeps it, some 100 MB more with every large program."""
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _listen(source: TextIO, wishes: SimpleQueue[CompileRequest]) -> None:
    try:
        for line in source:
            wishes.put(COMPILE_REQUESTS.read(line))
    finally:  # the main thread may be in XLA, which cannot be interrupted
        os._exit(0)


def _outcome(preparer: CompileService, job: CompileJob) -> Prepared | CompileFailed:
    begun = time.perf_counter()
    try:
        compiled = preparer.make_ready(job)
    except RunError:
        raise
    except Exception as error:  # whatever it is: the run continues, and compiles for itself
        down = ", ".join(f"{d}:{p}" for d, p in sorted(job.failed)) or "none"
        where = f"with {down} down" if job.num_ranks is None else f"on {job.num_ranks} ranks"
        return CompileFailed(f"{where}: {error}")
    return Prepared(job.failed, job.num_ranks, job.kinds, compiled, round(time.perf_counter() - begun, 3))


class _Voice:
    """Says what there is to say, from any thread, and that the process is alive."""

    def __init__(self) -> None:
        self._output, self._lock = take_output(), threading.Lock()
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def say(self, said: CompileNews) -> None:
        """Ends the process where nobody listens."""
        try:
            with self._lock:
                self._output.write(COMPILE_NEWS.line(said))
                self._output.flush()
        except BrokenPipeError:
            os._exit(0)

    def _beat(self) -> None:
        while True:
            self.say(Alive())
            time.sleep(_BEAT_S)
