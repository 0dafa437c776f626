"""Programs of a generation, and those that a member loads ahead: for the next one, in which it keeps its devices.

XLA binds a loaded program to its devices, so in any other transition a member loads its program only once it has the
devices of the new generation, and training waits for that.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from swift.elastic.membership.commands import LoadAhead
from swift.elastic.membership.events import CutRefused, Loaded
from swift.pipeline.reconfigure.block_sharing import Share, compiled_share, share_key
from swift.pipeline.reconfigure.compiled_steps import Steps, program_key
from swift.pipeline.reconfigure.cuts import Cuts, UnknownCut
from swift.pipeline.reconfigure.executable_cache import ExecutableCache
from swift.pipeline.reconfigure.recut import blocks_spec
from swift.pipeline.runtime.step_spec import StepSpec
from swift.schedules.plans.holders import OWN_CUT, BlockHolders


@dataclass(frozen=True, eq=False)
class GenerationPrograms:
    """The programs of a generation.

    Attributes:
        steps: its step functions.
        before: step spec of a state that all members have, of which ``loaded`` makes that of the generation.
        loaded: program that gives every member its blocks; None: it was not loaded ahead.
    """

    steps: Steps
    before: StepSpec | None = None
    loaded: Share | None = None

    def share(self, before: StepSpec, has_R: Sequence[bool], executables: ExecutableCache) -> Share:
        """Returns the program that gives every member its blocks, see ``compiled_share``."""
        is_loaded = self.before is not None and before.is_held_as(self.before) and all(has_R)
        if is_loaded and self.loaded is not None:
            return self.loaded
        return compiled_share(before, self.steps.spec, executables, has_R, self.steps.configuration.device_rows)


class AheadLoader:
    """Loads programs in a thread of its own, on the devices of the generation that the main thread runs.

    Args:
        cuts: step specs and plans of the run.
        executables: cache of the run's programs.
        num_sequences: sequences of a micro-batch, over all expert ranks.
        send: function that sends a message to the supervisor, see ``ControlChannel.send``.
    """

    def __init__(self, cuts: Cuts, executables: ExecutableCache, num_sequences: int, send: Callable[..., None]):
        self._cuts, self._executables, self._num_sequences = cuts, executables, num_sequences
        self._send = send
        self._thread = ThreadPoolExecutor(1, "load ahead")
        self._lock = threading.Lock()
        self._live: tuple[int, Steps, np.ndarray] | None = None
        self._loading: tuple[BlockHolders, Future[GenerationPrograms | None]] | None = None

    def begin(self, number: int, steps: Steps, devices_RN: np.ndarray) -> None:
        """Lets programs be loaded from now on, on the devices ``[R, N]`` of a generation that runs these steps."""
        with self._lock:
            self._live = number, steps, devices_RN

    def load(self, command: LoadAhead) -> None:
        """Begins to load programs, unless their generation has ended; from any thread."""
        with self._lock:
            if self._live is not None and self._live[0] == command.number:
                self._loading = command.cut, self._thread.submit(self._load, command, *self._live[1:])

    def end(self, cut: BlockHolders) -> GenerationPrograms | None:
        """Ends the generation, and waits for a program that is being loaded: it uses the devices.

        Returns:
            The programs for the cut of the next generation, if they are loaded.
        """
        with self._lock:
            self._live, loading, self._loading = None, self._loading, None
        if loading is None:
            return None
        loaded = loading[1].result()
        return loaded if loading[0] == cut else None

    def _load(self, command: LoadAhead, steps: Steps, devices_RN: np.ndarray) -> GenerationPrograms | None:
        loaded = None
        try:
            loaded = self._loaded(command.cut, steps, devices_RN)
        except UnknownCut as error:
            self._send(CutRefused, number=command.number, why=str(error))
            return None
        except Exception as error:  # whatever it is comes again once the next generation forms, or does not
            print(f"could not load programs ahead: {error}", file=sys.stderr, flush=True)
        self._send(Loaded, number=command.number)
        return loaded

    def _loaded(self, cut: BlockHolders, steps: Steps, devices_RN: np.ndarray) -> GenerationPrograms | None:
        """Loads programs; returns None if they have to be compiled, which nothing could end before a failure."""
        failed, num_sequences = steps.configuration.failed, self._num_sequences
        recut = self._cuts.agreed(failed, cut)
        configuration = self._cuts.configure(recut, failed)
        ahead = Steps.of_processes(self._cuts.spec(recut), configuration, devices_RN, num_sequences, self._executables)
        spec, before = ahead.spec, blocks_spec(self._cuts.spec(None).at(ahead.spec.live), OWN_CUT)
        shares = [True] * len(configuration.rows), configuration.device_rows
        own_key = program_key(configuration, spec.live.num_ranks, ahead.main, keep_state=True)
        keys = own_key, share_key(before, spec, *shares)
        if not all(key in self._executables for key in keys):
            return None
        ahead.compiled(ahead.main)
        if self._live is None:  # the generation has ended, and the main thread waits
            return None
        return GenerationPrograms(ahead, before, compiled_share(before, spec, self._executables, *shares))
