"""What a run of processes has counted: the keeper reads it from the record, which somebody else writes.

An iteration without a record must not cost a checkpoint: it is counted as one that is not known, see ``Tally``.
"""

import json
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from swift.checkpoint import Ledger, Tally, checkpoint_path, checkpoint_steps, read_manifest
from swift.elastic.state.disk_spill import remove_kept, write_kept
from swift.errors import SettingError
from swift.pipeline import StepSpec
from swift.runlog import CLASS_COUNTS, METRICS, ClassCounts, lines_from_end, parse_object
from swift.train import Experiment
from swift.train.checkpoints import first_ledger, ledger_for, split_of

_PAUSE_S = 0.05


@dataclass(frozen=True)
class LedgerCounts:
    """The ledgers of a run: what its checkpoints and its losses have left behind, and the iterations since.

    Attributes:
        experiment: what is run.
        checkpoints: the directory of the run's checkpoints, in the run directory.
        losses: a file for what slices have lost that came from older copies, until a checkpoint has it.
    """

    experiment: Experiment
    checkpoints: Path
    losses: Path

    @property
    def _run_dir(self) -> Path:
        return self.checkpoints.parent

    @property
    def _most_updates(self) -> int:
        """That an expert may get in an iteration: a token goes to a class once at most."""
        return self.experiment.tokens_per_step

    def at(self, spec: StepSpec, step: int, patience_s: float) -> Ledger:
        """The ledger after an iteration, for a checkpoint of a program's state; see ``counted``."""
        base, ledger = self._base(spec, step)
        return counted(ledger, self._run_dir, base, step, self._most_updates, patience_s)

    def so_far(self, spec: StepSpec, step: int) -> tuple[Ledger, int]:
        """The same, as far as it is known now; and the last iteration that it counts."""
        base, ledger = self._base(spec, step)
        return counted_so_far(ledger, self._run_dir, base, step, self._most_updates)

    def contained(self, spec: StepSpec, step: int) -> np.ndarray:
        """The token updates that experts contained after an iteration."""
        return self.so_far(spec, step)[0].tally.contained_LE

    def note_loss(self, ledger: Ledger, step: int) -> None:
        """Notes what a recovery has cost, by the ledger that counts the iterations up to ``step``."""
        said = {"step": step, "k": ledger.k, "classes": ledger.num_classes, "tally": ledger.tally.to_json()}
        content, temporary = json.dumps(said).encode(), self.losses.with_name(f".{self.losses.name}.tmp")
        write_kept(self.losses, temporary, lambda file: file.write(content))

    def forget_losses(self, step: int) -> None:
        """A checkpoint after this iteration has been written, or all resume from one of an earlier iteration."""
        found = self._noted()
        if found is not None and found[0] <= step:
            remove_kept(self.losses)

    def _base(self, spec: StepSpec, step: int) -> tuple[int, Ledger]:
        """What counting begins with. A checkpoint of the same iteration is about to be replaced."""
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

    def _noted(self) -> tuple[int, Tally, int] | None:
        if not self.losses.exists():
            return None
        said = json.loads(self.losses.read_text())
        return said["step"], Tally.from_json(said["tally"], said["classes"]), said["k"]


def counted_so_far(ledger: Ledger, run_dir: Path, after: int, step: int, most_updates: int) -> tuple[Ledger, int]:
    """A ledger with the iterations from ``after`` to ``step``, as far as the record goes already.

    Records are written in the order of their iterations: where a later one is there, one that is missing will not come.

    Args:
        ledger: as it was after iteration ``after``.
        run_dir: the run directory.
        after: the last iteration that is counted already.
        step: the last one to count.
        most_updates: that an expert may get in an iteration.

    Returns:
        (the ledger, the last iteration that it counts).
    """
    recorded = _recorded(run_dir / METRICS, after)
    last = max(after, min(step, max(recorded, default=after)))
    if not ledger.tally.contained_LE.size:  # nothing is counted
        return ledger, last
    num_uncounted, counts = last - after, _class_counts(run_dir)
    for row_step, (popularity_LE, _, dropped_LE) in counts.after(after, last) if counts else ():
        if row_step in recorded:
            ledger, num_uncounted = ledger.counted(popularity_LE, dropped_LE), num_uncounted - 1
    return ledger.uncounted(num_uncounted, most_updates) if num_uncounted else ledger, last


def counted(ledger: Ledger, run_dir: Path, after: int, step: int, most_updates: int, patience_s: float) -> Ledger:
    """The same with all iterations to ``step``, of which the last may yet have to be recorded.

    Args:
        ledger, run_dir, after, step, most_updates: see ``counted_so_far``.
        patience_s: how long to wait for records; those that have not come by then are not known.
    """
    deadline, last = time.monotonic() + patience_s, after
    while True:
        ledger, last = counted_so_far(ledger, run_dir, last, step, most_updates)
        if last == step:
            return ledger
        if time.monotonic() > deadline:
            return ledger.uncounted(step - last, most_updates)
        time.sleep(_PAUSE_S)


def _recorded(metrics: Path, after: int) -> set[int]:
    """The iterations after one that have a line; those before are neither read nor parsed."""
    found: set[int] = set()
    for _, line in lines_from_end(metrics) if metrics.exists() else ():
        step = (parse_object(line) or {}).get("step")
        if isinstance(step, int):  # a line that is damaged is none
            if step <= after:
                break
            found.add(step)
    return found


def _class_counts(run_dir: Path) -> ClassCounts | None:
    with suppress(SettingError):  # damaged: nothing of it is known
        return ClassCounts.open(run_dir / CLASS_COUNTS)
    return None
