"""Counts token updates per expert for the ledgers of checkpoints, from the metrics that the run has recorded.

The checkpoint service reads these metrics while the supervisor writes them. An iteration without a record must not
prevent a checkpoint, so its token updates count as unknown, see ``TokenUpdateCounter``.
"""

import json
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from swift.checkpoint.manifest import Ledger, checkpoint_path, checkpoint_steps, read_manifest
from swift.checkpoint.selection import TokenUpdateCounter
from swift.config.experiment import Experiment
from swift.elastic.state.store import remove_with_spill, write_or_spill
from swift.errors import SettingError
from swift.pipeline.step.spec import StepSpec
from swift.runlog.expert_counts import CLASS_COUNTS, ClassCounts
from swift.runlog.files import METRICS, lines_from_end, parse_object
from swift.train.saved_state import first_ledger, ledger_for, split_of

_PAUSE_S = 0.05


@dataclass(frozen=True)
class LedgerCounts:
    """Computes the ledger of a run at any iteration, from the newest checkpoint or loss and the iterations since then.

    Attributes:
        experiment: settings of the run.
        checkpoints: directory of the run's checkpoints, in the run directory.
        losses: file for token updates that were lost because slices were recovered from older copies. It is needed
            until a checkpoint has the same information.
    """

    experiment: Experiment
    checkpoints: Path
    losses: Path

    @property
    def _run_dir(self) -> Path:
        return self.checkpoints.parent

    @property
    def _max_updates(self) -> int:
        """Upper bound on an expert's token updates in an iteration: a token is routed to an expert at most once."""
        return self.experiment.tokens_per_step

    def at(self, spec: StepSpec, step: int, timeout_s: float) -> Ledger:
        """Returns the ledger after an iteration; waits up to ``timeout_s`` for missing records, see ``counted``."""
        base, ledger = self._base(spec, step)
        return counted(ledger, self._run_dir, base, step, self._max_updates, timeout_s)

    def so_far(self, spec: StepSpec, step: int) -> tuple[Ledger, int]:
        """Returns the ledger up to ``step`` as far as records exist now, and the last iteration that it counts."""
        base, ledger = self._base(spec, step)
        return counted_so_far(ledger, self._run_dir, base, step, self._max_updates)

    def contained(self, spec: StepSpec, step: int) -> np.ndarray:
        """Returns the token updates ``[L, E]`` that the experts contain after an iteration."""
        return self.so_far(spec, step)[0].tally.contained_LE

    def note_loss(self, ledger: Ledger, step: int) -> None:
        """Writes the ledger after a recovery, including the token updates that were lost, to the file of losses.

        Args:
            ledger: ledger that counts the iterations up to ``step``.
            step: last iteration that the ledger counts.
        """
        fields = {"step": step, "k": ledger.k, "classes": ledger.num_classes, "tally": ledger.tally.to_json()}
        content, temporary = json.dumps(fields).encode(), self.losses.with_name(f".{self.losses.name}.tmp")
        write_or_spill(self.losses, temporary, lambda file: file.write(content))

    def forget_losses(self, step: int) -> None:
        """Removes the file of losses if it is not newer than ``step``.

        It is no longer needed once a checkpoint contains the losses, or when the run resumes from an older checkpoint.
        """
        losses = self._noted()
        if losses is not None and losses[0] <= step:
            remove_with_spill(self.losses)

    def _base(self, spec: StepSpec, step: int) -> tuple[int, Ledger]:
        """Returns the iteration and ledger to count from: those at the last loss, or else those in a checkpoint.

        A checkpoint of the same iteration is not used, since it is about to be replaced.
        """
        noted = self._noted()
        first = first_ledger(self.experiment, split_of(spec))
        if noted is not None and noted[0] <= step:
            return noted[0], replace(first, tally=noted[1], k=noted[2])
        for older in reversed(checkpoint_steps(self.checkpoints)):
            with suppress(SettingError):
                if older < step:
                    manifest = read_manifest(checkpoint_path(self.checkpoints, older), "checkpoint")
                    return older, ledger_for(spec, manifest, manifest.ledger)
        return 0, first

    def _noted(self) -> tuple[int, TokenUpdateCounter, int] | None:
        """Reads (iteration, tally, K) from the file of losses; returns None if there is no file."""
        if not self.losses.exists():
            return None
        fields = json.loads(self.losses.read_text())
        return fields["step"], TokenUpdateCounter.from_json(fields["tally"], fields["classes"]), fields["k"]


def counted_so_far(ledger: Ledger, run_dir: Path, after: int, step: int, max_updates: int) -> tuple[Ledger, int]:
    """Returns a ledger with the recorded iterations from ``after`` to ``step`` added.

    Records are written in order: if a later iteration has a record, a missing one will never be written.

    Args:
        ledger: ledger after iteration ``after``.
        run_dir: run directory.
        after: last iteration that is counted already.
        step: last iteration to count.
        max_updates: upper bound on an expert's token updates in an iteration.

    Returns:
        (ledger, last iteration that it counts).
    """
    recorded = _recorded(run_dir / METRICS, after)
    last = max(after, min(step, max(recorded, default=after)))
    if not ledger.tally.contained_LE.size:  # there are no experts
        return ledger, last
    num_uncounted, counts = last - after, _class_counts(run_dir)
    for entry_step, (popularity_LE, _, dropped_LE) in counts.after(after, last) if counts else ():
        if entry_step in recorded:
            ledger, num_uncounted = ledger.counted(popularity_LE, dropped_LE), num_uncounted - 1
    return ledger.uncounted(num_uncounted, max_updates) if num_uncounted else ledger, last


def counted(ledger: Ledger, run_dir: Path, after: int, step: int, max_updates: int, timeout_s: float) -> Ledger:
    """Returns a ledger with all iterations up to ``step`` added, waiting for records that are not written yet.

    The other arguments are those of ``counted_so_far``.

    Args:
        timeout_s: time limit for the records, in seconds; after that, token updates of iterations without a record
            count as unknown.
    """
    deadline, last = time.monotonic() + timeout_s, after
    while True:
        ledger, last = counted_so_far(ledger, run_dir, last, step, max_updates)
        if last == step:
            return ledger
        if time.monotonic() > deadline:
            return ledger.uncounted(step - last, max_updates)
        time.sleep(_PAUSE_S)


def _recorded(metrics: Path, after: int) -> set[int]:
    """Returns the iterations after ``after`` that have a record; reads the file backwards, only as far as necessary."""
    steps: set[int] = set()
    for _, line in lines_from_end(metrics) if metrics.exists() else ():
        step = (parse_object(line) or {}).get("step")
        if isinstance(step, int):  # a damaged line does not count
            if step <= after:
                break
            steps.add(step)
    return steps


def _class_counts(run_dir: Path) -> ClassCounts | None:
    with suppress(SettingError):  # damaged: all token updates are unknown
        return ClassCounts.open(run_dir / CLASS_COUNTS)
    return None
