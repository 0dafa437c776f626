"""Counts of token updates for the ledgers of checkpoints, which the checkpoint service reads from the run's record.

Another process writes the record. An iteration without a record must not prevent a checkpoint: its token updates count
as unknown, see ``TokenUpdateCounter``.
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
    """The ledgers of a run: those of its checkpoints and losses, plus the iterations since.

    Attributes:
        experiment: settings of the run.
        checkpoints: directory of the run's checkpoints, in the run directory.
        losses: file for the token updates lost with slices that came from older copies, until a checkpoint has them.
    """

    experiment: Experiment
    checkpoints: Path
    losses: Path

    @property
    def _run_dir(self) -> Path:
        return self.checkpoints.parent

    @property
    def _max_updates(self) -> int:
        """Token updates that an expert may get in an iteration: a token goes to an expert once at most."""
        return self.experiment.tokens_per_step

    def at(self, spec: StepSpec, step: int, timeout_s: float) -> Ledger:
        """Returns the ledger after an iteration, for a checkpoint of a state of ``spec``; see ``counted``."""
        base, ledger = self._base(spec, step)
        return counted(ledger, self._run_dir, base, step, self._max_updates, timeout_s)

    def so_far(self, spec: StepSpec, step: int) -> tuple[Ledger, int]:
        """Returns the same as far as it is recorded now, and the last iteration that it counts."""
        base, ledger = self._base(spec, step)
        return counted_so_far(ledger, self._run_dir, base, step, self._max_updates)

    def contained(self, spec: StepSpec, step: int) -> np.ndarray:
        """Returns the token updates ``[L, E]`` contained in the experts after an iteration."""
        return self.so_far(spec, step)[0].tally.contained_LE

    def note_loss(self, ledger: Ledger, step: int) -> None:
        """Writes what a recovery has cost, by the ledger that counts the iterations up to ``step``."""
        fields = {"step": step, "k": ledger.k, "classes": ledger.num_classes, "tally": ledger.tally.to_json()}
        content, temporary = json.dumps(fields).encode(), self.losses.with_name(f".{self.losses.name}.tmp")
        write_or_spill(self.losses, temporary, lambda file: file.write(content))

    def forget_losses(self, step: int) -> None:
        """Removes losses up to an iteration: a checkpoint after it has them, or the run resumes from an earlier one."""
        losses = self._noted()
        if losses is not None and losses[0] <= step:
            remove_with_spill(self.losses)

    def _base(self, spec: StepSpec, step: int) -> tuple[int, Ledger]:
        """Returns the ledger that counting begins with. A checkpoint of the same iteration is about to be replaced."""
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
        """Reads the file of losses: (iteration, tally, K); None if there is none."""
        if not self.losses.exists():
            return None
        fields = json.loads(self.losses.read_text())
        return fields["step"], TokenUpdateCounter.from_json(fields["tally"], fields["classes"]), fields["k"]


def counted_so_far(ledger: Ledger, run_dir: Path, after: int, step: int, max_updates: int) -> tuple[Ledger, int]:
    """Returns a ledger with the recorded iterations from ``after`` to ``step``.

    Records are written in the order of their iterations: one that is missing before a later one will not come.

    Args:
        ledger: ledger after iteration ``after``.
        run_dir: run directory.
        after: last iteration that is counted already.
        step: last iteration to count.
        max_updates: token updates that an expert may get in an iteration.

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
    """Returns a ledger with all iterations to ``step``, waiting for records that are not written yet.

    The other arguments are those of ``counted_so_far``.

    Args:
        timeout_s: time limit for records, in seconds; the token updates of those still missing then are unknown.
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
    """Returns the iterations after ``after`` that have a line; earlier lines are neither read nor parsed."""
    steps: set[int] = set()
    for _, line in lines_from_end(metrics) if metrics.exists() else ():
        step = (parse_object(line) or {}).get("step")
        if isinstance(step, int):  # a damaged line does not count
            if step <= after:
                break
            steps.add(step)
    return steps


def _class_counts(run_dir: Path) -> ClassCounts | None:
    with suppress(SettingError):  # damaged: nothing in it is known
        return ClassCounts.open(run_dir / CLASS_COUNTS)
    return None
