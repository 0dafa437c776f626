"""Resharding of an elastic run's state for other ranks, from what processes have handed over and other copies."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from swift.checkpoint.memory.rank_recovery import recover_ranks
from swift.checkpoint.storage.reader import RestorePlan
from swift.elastic.elastic_ranks import ElasticSpecs
from swift.elastic.membership.members import Process, Stamp
from swift.elastic.state.handover import Handover
from swift.elastic.state.ledger_counts import LedgerCounts
from swift.elastic.state.state_shards import join_parts, process_parts
from swift.elastic.transport.checkpoint_messages import Reshard
from swift.errors import RunError
from swift.mesh.process_shards import shard_shapes
from swift.pipeline.reconfigure.reshard import reshape_state
from swift.pipeline.runtime.step_spec import StepSpec
from swift.pipeline.train_state import TrainState
from swift.train.checkpoints.saved_state import split_of

LoadUpTo = Callable[[StepSpec, int], tuple[TrainState, RestorePlan] | None]
"""(step spec, iteration) -> state of the newest sound checkpoint up to that iteration, with its plan; or None."""


@dataclass(frozen=True)
class Resharding:
    """Reshards the states of an elastic run.

    Attributes:
        specs: step specs of the run.
        handover: states and copies that processes have handed over.
        counts: token updates of the run.
        load_up_to: function that reads checkpoints.
    """

    specs: ElasticSpecs
    handover: Handover
    counts: LedgerCounts
    load_up_to: LoadUpTo

    def reshard(self, command: Reshard) -> tuple[list[str], dict[str, Any]]:
        """Keeps for every process of a generation its part of a state with another layout.

        Returns:
            (sources of the slices of lost ranks, in lines for the terminal; the same for the events).

        Raises:
            RunError: there is no copy of a lost rank's slices, or no part of the state.
            OSError: a part cannot be kept.
        """
        stamp, layout, generation, processes = command
        old, new = (self.specs.on(len(of)) for of in (layout.processes, processes))
        state, slots, lost = self._joined(old, layout.processes, stamp)
        lines, facts = list[str](), dict[str, Any]()
        if lost:
            split = split_of(old)
            copies = self.handover.rank_copies(split, layout, lost, lambda step: self.counts.contained(old, step))
            ledger, last = self.counts.so_far(old, stamp.step)
            found = recover_ranks(
                state,
                slots,
                split,
                [(0, layout.processes.index(process)) for process in lost],
                copies=list(copies),
                step=stamp.step,
                ledger=ledger,
                stored=partial(self.load_up_to, old, stamp.step),
                names=[process.rank for process in layout.processes],
            )
            state, lines, facts = found.state, found.lines, {"lost": [str(process) for process in lost], **found.facts}
            self.counts.note_loss(found.ledger, last)
        host = reshape_state(state, old, new)
        for rank, process in enumerate(processes):
            parts = process_parts(_without_slots(new), host, process.worker[1], [rank])
            self.handover.parts(process).save(Stamp(generation, stamp.step), parts)
        slots_before, slots_now = old.experts.slots_per_rank, new.experts.slots_per_rank
        if slots_before != slots_now:
            lines.append(f"each rank now has {slots_now} slots instead of {slots_before}")
        return lines, facts | {"ranks": len(processes), "ranks_before": len(layout.processes)}

    def rehearse(self, num_ranks: int) -> None:
        """Compiles the placement of experts on ``num_ranks`` ranks, so that no process has to wait for it later."""
        spec = self.specs.on(num_ranks)
        layers, classes, slots = spec.num_moe_layers, spec.experts.num_classes, spec.experts.slots_per_rank
        if layers:
            placement, policy = spec.policy.init(layers, classes, num_ranks, slots)
            spec.policy(jnp.ones((layers, classes), jnp.int32), placement, policy)

    def _joined(
        self, old: StepSpec, processes: Sequence[Process], stamp: Stamp
    ) -> tuple[TrainState, dict[str, np.ndarray] | None, list[Process]]:
        """Returns the state and the slots from the parts there are, and the processes whose parts are lost.

        The values in the place of lost parts are arbitrary.
        """
        parts = [self._part(old, process, stamp) for process in processes]
        lost = [process for process, part in zip(processes, parts, strict=True) if part is None]
        found = [part for part in parts if part is not None]
        if not found:
            raise RunError(f"nothing is left of the state after iteration {stamp.step}")
        has_slots = all(part.slots for part in found)
        if not has_slots:
            found = [replace(part, slots={}) for part in found]
        specs = old.specs if has_slots else _without_slots(old)
        given = iter(found)
        parts = [found[0] if part is None else next(given) for part in parts]
        state = join_parts(specs, old.abstract(with_slots=has_slots), parts)
        return replace(state, slots={}), state.slots or None, lost

    def _part(self, old: StepSpec, process: Process, stamp: Stamp) -> TrainState | None:
        """Returns the part that a process handed over or was to resume from; None if there is no sound one."""
        for store, specs, shapes in (
            (self.handover.states(process), old.specs, old.abstract(with_slots=True)),
            (self.handover.parts(process), _without_slots(old), old.abstract()),
        ):
            if stamp in store.stamps():
                try:
                    return store.load(stamp, shard_shapes(specs, shapes, num_devices=1))
                except RunError as error:
                    print(f"passed over: {error}", file=sys.stderr)
        return None


def _without_slots(spec: StepSpec) -> TrainState:
    return replace(spec.specs, slots={})
