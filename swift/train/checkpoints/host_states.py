"""The state of a run on its way to a checkpoint: each of several hosts has pieces of it, the first one gets all."""

import secrets
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import NoReturn

import numpy as np

from swift.checkpoint import Snapshot, StateSplit, begin_pieces, join_pieces
from swift.checkpoint.storage import Piece, Save, give_up, read_pieces, write_pieces
from swift.errors import first_line
from swift.pipeline import StepSpec, TrainState
from swift.train.checkpoints.saved_state import to_store
from swift.train.checkpoints.writer_process import WriterProcess
from swift.train.hosts import Hosts


class HostStates:
    """The hosts of a run, from the side of one of them, which all save at the same iterations.

    Args:
        run_dir: run directory.
        hosts: its hosts; where there is only one, all pieces are its own.
    """

    def __init__(self, run_dir: Path, hosts: Hosts):
        self._directory, self._hosts = run_dir / "checkpoints", hosts
        self._writer = WriterProcess(run_dir) if hosts.count > 1 and hosts.is_first else None

    @property
    def write(self) -> Callable[[Path, Mapping[str, np.ndarray]], None] | None:
        """Function that writes arrays in another process, see ``write_arrays``; None where there is one host only."""
        return None if self._writer is None else self._writer.write

    def agree(self, step: int, chosen_LK: np.ndarray) -> tuple[Save, np.ndarray]:
        """The save and the experts that the first host has chosen for it, once all hosts are here."""
        mine = secrets.token_hex(4), chosen_LK.shape, chosen_LK.reshape(-1).tolist()
        token, shape, chosen = self._hosts.of_first(mine)
        return Save(step, token), np.array(chosen, chosen_LK.dtype).reshape(shape)

    def snapshot(
        self,
        save: Save,
        split: StateSplit,
        finish: Callable[[], list[Piece]],
        chosen_LK: np.ndarray,
        room: Snapshot | None,
    ) -> Snapshot | None:
        """Brings the pieces of all hosts together on the first one, in any thread.

        Args:
            save: the save.
            split: division of the state.
            finish: function that waits for this host's pieces and returns them.
            chosen_LK: experts that are saved.
            room: an older snapshot that may be overwritten, see ``join_pieces``.

        Returns:
            The snapshot; None on the others than the first.

        Raises:
            OSError: the first one cannot write or read.
        """
        pieces = finish() if self._hosts.count == 1 else self._of_all(save, finish)
        return None if pieces is None else join_pieces(split, pieces, chosen_LK, room)

    def _of_all(self, save: Save, finish: Callable[[], list[Piece]]) -> Iterable[Piece] | None:
        hosts = self._hosts
        try:
            write_pieces(self._directory, save, hosts.own, finish())
        except (OSError, RuntimeError) as error:  # such as no memory on the devices
            if hosts.is_first:
                raise
            give_up(self._directory, save, hosts.own, first_line(error))
            said = f"swift: host {hosts.own}: its part of the checkpoint of iteration {save.step} was not written"
            print(f"{said}: {first_line(error)}", file=sys.stderr)
        return read_pieces(self._directory, save, hosts.count) if hosts.is_first else None

    def close(self) -> None:
        """Ends the process that writes, if there is one."""
        if self._writer is not None:
            self._writer.close()


def begin_or_fail(
    split: StateSplit, spec: StepSpec, state: TrainState, chosen_LK: np.ndarray
) -> Callable[[], list[Piece]]:
    """Starts to copy what a checkpoint saves, see ``begin_pieces``; what goes wrong is raised by the function."""
    try:
        return begin_pieces(split, *to_store(spec, state), chosen_LK)
    except RuntimeError as error:  # such as no memory on the devices
        return partial(_fail, error)


def _fail(error: Exception) -> NoReturn:
    raise error
