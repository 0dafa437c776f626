"""A state of some expert ranks made one of others: what processes have handed over, and the best of what is lost."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from swift.checkpoint import RestorePlan, recover_ranks
from swift.elastic.elastic_programs import ElasticPrograms
from swift.elastic.membership import Process, Stamp
from swift.elastic.state import Handover, LedgerCounts, cut_parts, join_parts
from swift.elastic.transport import Reshard
from swift.errors import RunError
from swift.mesh import part_shapes
from swift.pipeline import StepSpec, TrainState, reshape_state
from swift.train.checkpoints import split_of

Stored = Callable[[StepSpec, int], tuple[TrainState, RestorePlan] | None]
"""(program, iteration) -> the state of the newest sound checkpoint up to that iteration, and where it came from."""


@dataclass(frozen=True)
class Resharding:
    """Cuts the states of an elastic run anew.

    Attributes:
        programs: of the run.
        handover: what processes have handed over.
        counts: of the run.
        stored: reads checkpoints.
    """

    programs: ElasticPrograms
    handover: Handover
    counts: LedgerCounts
    stored: Stored

    def follow(self, command: Reshard) -> tuple[list[str], dict[str, Any]]:
        """Keeps for every process of a generation its part of a state that was cut for others.

        Returns:
            (where slices of lost ranks came from, a line each; the same for the events).

        Raises:
            RunError: the slices of a lost rank are nowhere, or nobody has anything of the state.
            OSError: a part cannot be kept.
        """
        stamp, cut, generation, processes = command
        old, new = (self.programs.on(len(of)) for of in (cut.processes, processes))
        state, slots, lost = self._joined(old, cut.processes, stamp)
        lines, facts = list[str](), dict[str, Any]()
        if lost:
            split = split_of(old)
            copies = self.handover.rank_copies(split, cut, lost, lambda step: self.counts.contained(old, step))
            ledger, last = self.counts.so_far(old, stamp.step)
            places = [(0, cut.processes.index(process)) for process in lost]
            names = [process.rank for process in cut.processes]
            read = partial(self.stored, old, stamp.step)
            found = recover_ranks(state, slots, split, places, list(copies), stamp.step, ledger, read, names)
            state, lines, facts = found.state, found.lines, {"lost": [str(process) for process in lost], **found.facts}
            self.counts.note_loss(found.ledger, last)
        host = reshape_state(state, old, new)
        for rank, process in enumerate(processes):
            parts = cut_parts(_without_slots(new), host, process.worker[1], [rank])
            self.handover.parts(process).save(Stamp(generation, stamp.step), parts)
        if old.experts.slots_per_rank != new.experts.slots_per_rank:
            lines.append(f"slots of a rank: {new.experts.slots_per_rank}, and were {old.experts.slots_per_rank}")
        return lines, facts | {"ranks": len(processes), "ranks_before": len(cut.processes)}

    def rehearse(self, num_ranks: int) -> None:
        """Compiles what places experts on so many ranks: better now than when all wait for it."""
        spec = self.programs.on(num_ranks)
        layers, classes, slots = spec.num_moe_layers, spec.experts.num_classes, spec.experts.slots_per_rank
        if layers:
            placement, policy = spec.policy.init(layers, classes, num_ranks, slots)
            spec.policy(jnp.ones((layers, classes), jnp.int32), placement, policy)

    def _joined(
        self, old: StepSpec, processes: Sequence[Process], stamp: Stamp
    ) -> tuple[TrainState, dict[str, np.ndarray] | None, list[Process]]:
        """The state and the slots that there are, and who has lost theirs: nothing in it is what these had."""
        parts = [self._part(old, process, stamp) for process in processes]
        lost = [process for process, part in zip(processes, parts, strict=True) if part is None]
        there = [part for part in parts if part is not None]
        if not there:
            raise RunError(f"nothing is left of the state after iteration {stamp.step}")
        has_slots = all(part.slots for part in there)
        if not has_slots:
            there = [replace(part, slots={}) for part in there]
        specs = old.specs if has_slots else _without_slots(old)
        given = iter(there)
        parts = [there[0] if part is None else next(given) for part in parts]
        state = join_parts(specs, old.abstract(with_slots=has_slots), parts)
        return replace(state, slots={}), state.slots or None, lost

    def _part(self, old: StepSpec, process: Process, stamp: Stamp) -> TrainState | None:
        """Part of a state that a process handed over or was to resume from; None: no sound one."""
        for keep, specs, shapes in (
            (self.handover.states(process), old.specs, old.abstract(with_slots=True)),
            (self.handover.parts(process), _without_slots(old), old.abstract()),
        ):
            if stamp in keep.stamps():
                try:
                    return keep.load(stamp, part_shapes(specs, shapes, num_devices=1))
                except RunError as error:
                    print(f"passed over: {error}", file=sys.stderr)
        return None


def _without_slots(spec: StepSpec) -> TrainState:
    return replace(spec.specs, slots={})
