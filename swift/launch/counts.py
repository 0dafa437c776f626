"""What a run of processes has counted: the keeper reads it from the metrics, which somebody else writes."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from swift.checkpoint import Ledger, Tally, checkpoint_path, checkpoint_steps, read_manifest
from swift.errors import RunError, SettingError
from swift.files import replace_file
from swift.pipeline import Program
from swift.record import METRICS
from swift.train import Experiment
from swift.train.saved_state import first_ledger, ledger_for, split_of

_PAUSE_S = 0.05


@dataclass(frozen=True)
class Counts:
    """The ledgers of a run: what its checkpoints and its losses have left behind, and the iterations since.

    Attributes:
        experiment: what is run.
        checkpoints: the directory of the run's checkpoints; its metrics are beside it.
        losses: a file for what slices have lost that came from older copies, until a checkpoint has it.
    """

    experiment: Experiment
    checkpoints: Path
    losses: Path

    @property
    def _metrics(self) -> Path:
        return self.checkpoints.parent / METRICS

    def at(self, program: Program, step: int, patience_s: float) -> Ledger:
        """The ledger after an iteration, for a checkpoint of a program's state; see ``counted``."""
        base, ledger = self._base(program, step)
        return counted(ledger, self._metrics, base, step, patience_s)

    def so_far(self, program: Program, step: int) -> tuple[Ledger, int]:
        """The same, as far as it is known now; and the last iteration that it counts."""
        base, ledger = self._base(program, step)
        return counted_so_far(ledger, self._metrics, base, step)

    def contained(self, program: Program, step: int) -> np.ndarray:
        """The token updates that experts contained after an iteration."""
        return self.so_far(program, step)[0].tally.contained_LE

    def note_loss(self, ledger: Ledger, step: int) -> None:
        """Notes what a recovery has cost, by the ledger that counts the iterations up to ``step``."""
        said = {"step": step, "k": ledger.k, "classes": ledger.num_classes, "tally": ledger.tally.to_json()}
        replace_file(self.losses, json.dumps(said).encode())

    def forget_losses(self, step: int) -> None:
        """A checkpoint after this iteration has been written, or all go on from one of an earlier iteration."""
        found = self._noted()
        if found is not None and found[0] <= step:
            self.losses.unlink()

    def _base(self, program: Program, step: int) -> tuple[int, Ledger]:
        """What counting begins with. A checkpoint of the same iteration is about to be replaced."""
        noted = self._noted()
        first = first_ledger(self.experiment, split_of(program))
        if noted is not None and noted[0] <= step:
            return noted[0], replace(first, tally=noted[1], k=noted[2])
        for older in reversed(checkpoint_steps(self.checkpoints)):
            with suppress(SettingError):
                if older < step:
                    manifest = read_manifest(checkpoint_path(self.checkpoints, older), "checkpoint")
                    return older, ledger_for(program, manifest, manifest.ledger)
        return 0, first

    def _noted(self) -> tuple[int, Tally, int] | None:
        if not self.losses.exists():
            return None
        said = json.loads(self.losses.read_text())
        return said["step"], Tally.from_json(said["tally"], said["classes"]), said["k"]


def counted_so_far(ledger: Ledger, metrics: Path, after: int, step: int) -> tuple[Ledger, int]:
    """A ledger with the iterations from ``after`` to ``step``, as far as they have a record already.

    Returns:
        (the ledger, the last iteration that it counts).
    """
    records, last = {record["step"]: record for record in _newest(metrics, after)}, after
    while last < step and last + 1 in records:
        last += 1
        ledger = ledger.counted(records[last]["popularity"], records[last]["dropped"])
    return ledger, last


def counted(ledger: Ledger, metrics: Path, after: int, step: int, patience_s: float) -> Ledger:
    """A ledger with the iterations from ``after`` to ``step``.

    Args:
        ledger: as it was after iteration ``after``.
        metrics: ``metrics.jsonl``, to which iteration ``step`` may yet have to be written.
        after: the last iteration that is counted already.
        step: the last one to count.
        patience_s: how long to wait for it.

    Raises:
        RunError: it has not come.
    """
    deadline, last = time.monotonic() + patience_s, after
    while True:
        ledger, last = counted_so_far(ledger, metrics, last, step)
        if last == step:
            return ledger
        if time.monotonic() > deadline:
            raise RunError(f"{metrics} has {last - after} of the {step - after} iterations up to {step}")
        time.sleep(_PAUSE_S)


def _newest(metrics: Path, after: int) -> Iterator[dict]:
    """The whole lines after an iteration, the newest first; those before are neither read nor parsed."""
    for line in lines_from_end(metrics) if metrics.exists() else ():
        record = json.loads(line)
        if record["step"] <= after:
            return
        yield record


def lines_from_end(path: Path, block_bytes: int = 2**16) -> Iterator[bytes]:
    """The whole lines of a file, the last one first; what follows it is being written.

    Args:
        path: of the file.
        block_bytes: how much is read at once.
    """
    with path.open("rb") as file:
        start, rest, is_torn = file.seek(0, os.SEEK_END), b"", True
        while start:
            end, start = start, max(start - block_bytes, 0)
            file.seek(start)
            rest, *lines = (file.read(end - start) + rest).split(b"\n")
            if lines and is_torn:
                lines.pop()
                is_torn = False
            yield from reversed(lines)
        if not is_torn:
            yield rest
