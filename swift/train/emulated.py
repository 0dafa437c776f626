"""Emulated failures: the live workers and expert ranks of one process, and the engine that runs them.

If a worker fails, its peers in the stage continue with the state that they have. With a single pipeline, a single
expert rank may fail: the axis ``expert`` shrinks to the remaining ranks, and the lost rank's state is restored from
copies, see ``recover_ranks``.

Right after a failure, the failed worker's micro-batches are re-routed, which moves no state. A better plan may move
blocks twice: to the survivors, and back when the worker rejoins. ``CutSearch`` searches for such a plan in the
background, and the run adopts it if the time that it saves outweighs the cost of its moves.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple, Self

import jax

from swift.checkpoint.recovery import Recovered, recover_ranks
from swift.config.experiment import Experiment
from swift.config.failures import FailureList, FailureSource, StageRank
from swift.errors import RunError
from swift.mesh.state_rows import host_stages
from swift.pipeline.reconfigure.configuration import survives
from swift.pipeline.reconfigure.engine import Engine, Prepare, Reconfiguration
from swift.pipeline.reconfigure.recut import PreparedRecut
from swift.pipeline.reconfigure.reshard import reshape_state
from swift.pipeline.state import TrainState
from swift.pipeline.step.spec import StepSpec
from swift.schedules.adapt.moves import MigrationPolicy
from swift.tasks import one_thread
from swift.topology import Worker, worker_names
from swift.train.build import make_engine, make_mesh, migration_policy, with_num_ranks
from swift.train.checkpointer import Checkpointer
from swift.train.loop import check_failures, lost_stages
from swift.train.saved_state import put_state, split_of

_Ranks = tuple[int, ...]
"""Expert ranks in ascending order, numbered as in the whole cluster."""


class FailedSet(NamedTuple):
    """The workers that are down or, with a single pipeline, the individual expert ranks that are down."""

    workers: frozenset[Worker]
    ranks: frozenset[StageRank]


@dataclass(frozen=True)
class ReconfigurationResult:
    """The outcome of moving a run to other workers or ranks.

    Attributes:
        state: state on the new devices.
        facts: description of the change, as fields for ``events.jsonl``.
        lines: description of the change, as lines for the terminal.
    """

    state: TrainState
    facts: dict[str, Any]
    lines: list[str]


class StateLost(RunError):
    """Part of the state is lost, and the run cannot continue.

    Args:
        reason: phrase that names the lost part.
        event: name of the event in ``events.jsonl``.
        facts: fields of the event.
        remedy: settings that would have prevented the loss.
    """

    def __init__(self, reason: str, event: str, facts: dict[str, Any], remedy: str):
        super().__init__(reason)
        self.event, self.facts, self.remedy = event, facts, remedy


class CutSearch:
    """Searches in the background for a better cut for the current failures, and compiles its program.

    Args:
        rule: policy that decides whether a move pays off.
        waits: whether ``ready`` waits for a running search.
        clock: returns the time in seconds.
    """

    def __init__(self, rule: MigrationPolicy, *, waits: bool, clock: Callable[[], float] = time.monotonic):
        self._rule, self._waits, self._clock = rule, waits, clock
        self._background = one_thread("better cut")
        self._found: Future[PreparedRecut | None] | None = None
        self._troubles: SimpleQueue[str] = SimpleQueue()

    def close(self, *, wait: bool = True) -> None:
        """Stops searching.

        Args:
            wait: whether to wait for a running compilation, which XLA cannot interrupt.
        """
        self._background.shutdown(wait=wait, cancel_futures=True)

    def begin(self, engine: Engine, failed: frozenset[Worker]) -> None:
        """Begins a search for these failures, and cancels the previous search."""
        self._rule = self._rule.after(failed, self._clock())
        if self._found is not None:
            self._found.cancel()
        self._found = self._background.submit(self._find, engine, failed) if failed else None

    def ready(self) -> PreparedRecut | None:
        """Returns a compiled better cut if its move pays off before the failed workers are expected back.

        Each cut is returned only once. Returns None if there is no such cut yet.
        """
        if self._found is None or not (self._waits or self._found.done()):
            return None
        better = self._found.result()
        if better is not None and not self._rule.is_worth(better.gain, better.most_bytes):
            return None
        self._found = None
        return better

    def background_errors(self) -> list[str]:
        """Returns the errors of searches that failed since the last call."""
        return [self._troubles.get() for _ in range(self._troubles.qsize())]

    def moved(self, better: PreparedRecut, change: Reconfiguration) -> None:
        """Updates the policy with the measured time of a move."""
        self._rule = self._rule.after_move(better.most_bytes, change.move_ms / 1000)

    def _find(self, engine: Engine, failed: frozenset[Worker]) -> PreparedRecut | None:
        try:
            return engine.better_cut(failed)
        except Exception as error:  # after any error, the run continues with re-routed micro-batches
            down = ", ".join(worker_names(failed))
            self._troubles.put(f"with other cuts while {down} are down: {error}")
            return None


class EmulatedCluster:
    """The live workers and expert ranks of an emulated cluster, and the engine that runs them; a context manager.

    Args:
        experiment: settings of the run.
        prepare: see ``Engine``.
        failures: source of the failures at each iteration.
        first: first iteration of the first window.
        last: last iteration of the first window.

    Raises:
        SettingError: there are too few devices, too little memory, or no plan for the failures of the first window.
    """

    def __init__(self, experiment: Experiment, prepare: Prepare, failures: FailureSource, first: int, last: int):
        # If no listed failure lies ahead, there is nothing to prepare for: compiling would only slow down the steps.
        is_over = isinstance(failures, FailureList) and failures.is_over(first)
        self._experiment, self._failures = experiment, failures
        self._num_ranks = experiment.topology.num_expert_ranks
        self._prepare: Prepare = "none" if is_over else prepare
        self._live = make_mesh(experiment)
        self._lost = failures.lost_ranks(first, last)
        self._engines = {self.ranks: self._make(self.ranks, failures.failed(first, last))}
        rule = migration_policy(experiment)
        self._search = None if rule is None else CutSearch(rule, waits=prepare == "none")

    def __enter__(self) -> Self:
        self.engine.open()
        self._seek()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        background: list[Engine | CutSearch] = [*self._engines.values(), *filter(None, [self._search])]
        for service in background:  # after Ctrl-C, the process exits without waiting for compilations
            service.close(wait=kind is not KeyboardInterrupt)

    @property
    def engine(self) -> Engine:
        """The engine for the live ranks."""
        return self._engines[self.ranks]

    @property
    def ranks(self) -> _Ranks:
        """Expert ranks that are live in every stage."""
        return _remaining(self._num_ranks, self._lost)

    @property
    def down(self) -> list[str]:
        """Names of the workers or expert ranks that are down now, as in ``events.jsonl``."""
        return worker_names(self.engine.configuration.failed) + _rank_names(self._lost)

    def check(self, failures: FailureList) -> None:
        """Plans for every failure of a list, so that a run that cannot survive them is refused before it starts.

        Raises:
            SettingError: a stage would lose its state, or some failures have no plan or leave too little memory.
        """
        window = self._experiment.window
        check_failures(self.engine, failures, window)
        lost = [failures.lost_ranks(event.step, event.step + window - 1) for event in failures.events]
        remaining = [_remaining(self._num_ranks, down) for down in lost if down]
        for ranks in {len(ranks): ranks for ranks in remaining}.values():
            make_engine(
                with_num_ranks(self._experiment, len(ranks)), frozenset(), "none", self._live.with_ranks(ranks)
            ).close()

    def change(self, first: int, last: int) -> FailedSet | PreparedRecut | None:
        """Returns the failures in these iterations if they differ from the current ones, else a better cut or None."""
        down = FailedSet(self._failures.failed(first, last), self._failures.lost_ranks(first, last))
        if down != (self.engine.configuration.failed, self._lost):
            return down
        return None if self._search is None else self._search.ready()

    def follow(
        self, state: TrainState, change: FailedSet | PreparedRecut, first: int, checkpointer: Checkpointer
    ) -> ReconfigurationResult:
        """Moves the run to the remaining workers or ranks, or to a better cut for them.

        Args:
            state: current state; consumed.
            change: failed workers or ranks, or the better cut, as returned by the method ``change``.
            first: next iteration.
            checkpointer: checkpointer of the run; no checkpoint may be in progress.

        Raises:
            StateLost: the lost state of a stage or an expert rank has no other copy.
        """
        if isinstance(change, PreparedRecut):
            assert self._search is not None, "found without a search"
            return _move_blocks(self.engine, state, self._search, change)
        if _remaining(self._num_ranks, change.ranks) != self.ranks:
            return self._regroup(state, change.ranks, first, checkpointer)
        if change.ranks != self._lost:
            return self._note(state, change.ranks)
        return self._reconfigure(state, change.workers, first)

    def background_errors(self) -> list[str]:
        """Returns the errors of background compilations and searches since the last call."""
        return self.engine.background_errors() + ([] if self._search is None else self._search.background_errors())

    def _reconfigure(self, state: TrainState, failed: frozenset[Worker], first: int) -> ReconfigurationResult:
        """Moves the run to other workers; raises StateLost if they do not hold the whole state."""
        engine, before = self.engine, self.engine.configuration
        chunks = engine.spec.chunks
        topology, run_chunks = self._experiment.topology, engine.own_chunks
        stages = lost_stages(topology, before.rows, before.failed, failed, chunks, run_chunks)
        if stages:
            stage_names, facts = (
                f"stage {', '.join(map(str, stages))}",
                {"stages": stages, "failed": worker_names(failed)},
            )
            if survives(topology, failed, run_chunks):
                reason = f"nobody has the state of {stage_names} at iteration {first}, as roles or blocks had moved"
                remedy = "Experiment.adapt = 'reroute', or a CheckpointConfig.every above 0"
                raise StateLost(reason, "stage_lost", facts, remedy)
            lost = f"{stage_names} has" if run_chunks.is_uniform_cut else f"layers of {stage_names} have"
            reason = f"{lost} no live worker left at iteration {first}"
            raise StateLost(reason, "stage_lost", facts, "an Experiment.failures that leaves it one")
        state, change = engine.reconfigure(state, failed)
        self._seek()
        workers = {"failed": worker_names(failed - before.failed), "rejoined": worker_names(before.failed - failed)}
        live = f"{engine.num_live} live, period {engine.period_ratio:.2f} x fault-free"
        return ReconfigurationResult(
            state, workers | asdict(change), [f"worker {_changed_text(workers)}; {live}; {_cost_text(change)}"]
        )

    def _seek(self) -> None:
        """Begins a search for a better cut for the current failures."""
        if self._search is not None:
            self._search.begin(self.engine, self.engine.configuration.failed)

    def _note(self, state: TrainState, lost: frozenset[StageRank]) -> ReconfigurationResult:
        """Records a change that leaves the set of live ranks as it was, because other stages lack the same ranks."""
        changed_ranks = _changed_names(self._lost, lost)
        self._lost = lost
        return ReconfigurationResult(
            state,
            dict(changed_ranks),
            [f"{_changed_text(changed_ranks)}; {len(self.ranks)} expert ranks live, as before"],
        )

    def _regroup(
        self, state: TrainState, lost: frozenset[StageRank], first: int, checkpointer: Checkpointer
    ) -> ReconfigurationResult:
        """Moves the run to other expert ranks, through host memory."""
        times = [time.perf_counter()]
        before, ranks = self.ranks, _remaining(self._num_ranks, lost)
        old, k = self.engine.spec, checkpointer.ledger.k
        changed_ranks = _changed_names(self._lost, lost)
        is_planned = ranks in self._engines
        if not is_planned:
            self._engines[ranks] = self._make(ranks, frozenset()).open()
        steps = self._engines[ranks].steps
        is_prepared = is_planned and steps.is_compiled(steps.main)
        times.append(time.perf_counter())
        steps.compiled(steps.main)
        times.append(time.perf_counter())
        newly_lost = {(stage, before.index(rank)) for stage, rank in lost - self._lost if rank in before}
        try:
            recovery = _collect(state, old, newly_lost, first - 1, checkpointer, before)
        except RunError as error:
            reason = f"{error}, at iteration {first}"
            remedy = "every" if self._experiment.checkpoint.snapshot_every else "snapshot_every"
            raise StateLost(reason, "rank_lost", changed_ranks, f"a CheckpointConfig.{remedy} above 0") from None
        jax.tree.map(lambda leaf: leaf.delete(), state)  # the devices may be too small for both states
        state = jax.block_until_ready(put_state(steps.spec, reshape_state(recovery.state, old, steps.spec)))
        times.append(time.perf_counter())
        self._lost = lost
        # Keep the engine for all ranks: the run returns to it once all of them have rejoined.
        for other in self._engines.keys() - {ranks, tuple(range(self._num_ranks))}:
            self._engines.pop(other).close()
        checkpointer.change_ranks(steps.spec, recovery.ledger)
        change = _change(state, times, is_prepared=is_prepared)
        slots, old_slots = (spec.experts.slots_per_rank for spec in (steps.spec, old))
        lines = [
            f"{_changed_text(changed_ranks)}; {len(ranks)} expert ranks live; {_cost_text(change)}",
            *recovery.lines,
            *[f"proportion of lost tokens so far: {recovery.ledger.tally.plt:.4f}"] * bool(newly_lost),
            *[f"K is now {checkpointer.ledger.k} experts of a layer, and was {k}"] * (checkpointer.ledger.k != k),
            *[f"every rank has {slots} slots now, and had {old_slots}"] * (slots != old_slots),
        ]
        now = {"slots_per_rank": slots, "experts_per_layer": checkpointer.ledger.k, "experts_per_layer_before": k}
        return ReconfigurationResult(state, changed_ranks | asdict(change) | now | recovery.facts, lines)

    def _make(self, ranks: _Ranks, failed: frozenset[Worker]) -> Engine:
        return make_engine(
            with_num_ranks(self._experiment, len(ranks)), failed, self._prepare, self._live.with_ranks(ranks)
        )


def _remaining(num_ranks: int, lost: frozenset[StageRank]) -> _Ranks:
    """Returns the expert ranks that are live in every stage."""
    down = {rank for _, rank in lost}
    return tuple(rank for rank in range(num_ranks) if rank not in down)


def _move_blocks(engine: Engine, state: TrainState, search: CutSearch, better: PreparedRecut) -> ReconfigurationResult:
    """Moves the run to a better cut for the survivors."""
    state, change = engine.reconfigure(state, engine.configuration.failed, better.recut)
    search.moved(better, change)
    assignment = better.holders
    facts = {"failed": [], "rejoined": [], "cuts": assignment.cuts, "positions": assignment.positions}
    cut_text = f"{assignment.text}; {', '.join(map(str, better.microbatches))} micro-batches"
    period = f"period {engine.period_ratio:.2f} x fault-free"
    line = f"blocks moved among the survivors: {cut_text}; {period}; {_cost_text(change)}"
    return ReconfigurationResult(state, facts | {"microbatches": better.microbatches} | asdict(change), [line])


def _collect(
    state: TrainState,
    old: StepSpec,
    lost_ranks: Collection[StageRank],
    done: int,
    checkpointer: Checkpointer,
    names: _Ranks,
) -> Recovered:
    """Copies the state to the host, and restores the slices of lost ranks from snapshots or a checkpoint."""
    parts = (replace(state, slots={}), state.slots if lost_ranks else {})
    specs = (replace(old.specs, slots={}), old.specs.slots if lost_ranks else {})
    host, slots = host_stages(parts, old.live, specs, lost_ranks)
    if not lost_ranks:
        return Recovered(host, checkpointer.ledger, [], {})
    copies, split = checkpointer.copies({rank for _, rank in lost_ranks}), split_of(old)
    return recover_ranks(
        host,
        slots,
        split,
        lost_ranks,
        copies=copies,
        step=done,
        ledger=checkpointer.ledger,
        stored=lambda: checkpointer.load(old),
        names=names,
    )


def _change(state: TrainState, times: Sequence[float], *, is_prepared: bool) -> Reconfiguration:
    """Computes the cost of a move through host memory."""
    plan_ms, compile_ms, move_ms = (1000 * (b - a) for a, b in pairwise(times))
    return Reconfiguration(
        is_prepared, plan_ms, compile_ms, move_ms, sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    )


def _changed_text(changed: Mapping[str, Sequence[str]]) -> str:
    """Formats the names of the workers or ranks that failed and rejoined.

    >>> _changed_text({"failed": ["0:1", "1:1"], "rejoined": []})
    '0:1, 1:1 failed'
    """
    return " and ".join(f"{', '.join(names)} {event}" for event, names in changed.items() if names)


def _cost_text(change: Reconfiguration) -> str:
    """Formats the time that a reconfiguration took."""
    elapsed_ms = change.plan_ms + change.compile_ms + change.move_ms
    return f"{elapsed_ms:.0f} ms to reconfigure{'' if change.prepared else ', not prepared'}"


def _changed_names(before: frozenset[StageRank], lost: frozenset[StageRank]) -> dict[str, list[str]]:
    """Returns the names of the ranks that failed or rejoined, under the keys ``failed`` and ``rejoined``."""
    return {"failed": _rank_names(lost - before), "rejoined": _rank_names(before - lost)}


def _rank_names(ranks: Collection[StageRank]) -> list[str]:
    """Returns the names of expert ranks, as written in settings, in ascending order."""
    return [f"0:{stage} rank {rank}" for stage, rank in sorted(ranks)]
