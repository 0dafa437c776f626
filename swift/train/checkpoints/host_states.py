"""The saves of a run on several hosts: what they agree on, and what each does in its thread."""

import secrets
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from swift.checkpoint.hosts.host_board import HostFailed, Save, Spoilt
from swift.checkpoint.hosts.host_save import HostSave
from swift.checkpoint.hosts.shared_files import Piece
from swift.checkpoint.memory.snapshots import begin_pieces
from swift.checkpoint.partial.expert_units import StateSplit
from swift.checkpoint.storage.manifest import Manifest
from swift.checkpoint.storage.verification import is_finite, is_of_model
from swift.errors import first_line
from swift.pipeline.runtime.step_spec import StepSpec
from swift.pipeline.train_state import TrainState
from swift.train.checkpoints.attempts import Attempts
from swift.train.checkpoints.block_pieces import begin_block_pieces
from swift.train.checkpoints.saved_state import to_store
from swift.train.checkpoints.writer_process import WriterProcess
from swift.train.hosts.agreement import Hosts


class HostStates:
    """The hosts of a run, from the side of one of them, which all save at the same iterations.

    Args:
        run_dir: run directory.
        hosts: its hosts; where there is only one, it agrees with itself.
    """

    def __init__(self, run_dir: Path, hosts: Hosts):
        self._directory, self._hosts = run_dir / "checkpoints", hosts
        self._writer = WriterProcess(run_dir) if hosts.count > 1 and hosts.is_first else None
        self.bytes_of_hosts: list[int] = []
        """Bytes of values that each host has written of the last checkpoint, on the first one."""

    def agree(self, step: int, chosen_LK: np.ndarray) -> tuple[Save, np.ndarray]:
        """The save and the experts that the first host has chosen for it, once all hosts are here."""
        mine = secrets.token_hex(4), chosen_LK.shape, chosen_LK.reshape(-1).tolist()
        token, shape, chosen = self._hosts.of_first(mine)
        return Save(step, token), np.array(chosen, chosen_LK.dtype).reshape(shape)

    def save(
        self,
        save: Save,
        split: StateSplit,
        chosen_LK: np.ndarray,
        finish: Callable[[], list[Piece]],
        attempts: Attempts,
        prepare: Callable[[], None],
        facts: Mapping[str, Any],
    ) -> Manifest | None:
        """Writes this host's part of a checkpoint, in any thread.

        Args:
            save: the save.
            split: division of the state.
            chosen_LK: experts that are saved.
            finish: function that waits for this host's pieces and returns them.
            attempts: attempts of the first host to make the files; the others wait for it meanwhile.
            prepare: function that the first host calls before each.
            facts: what ``HostSave.commit`` needs to know.

        Returns:
            The manifest; None on the others than the first, which say on stderr what goes wrong.

        Raises:
            Exception: the first one could not write its part, or another one has failed.
        """
        mine = HostSave(self._directory, save, self._hosts.own, self._hosts.count, split, chosen_LK)
        try:
            pieces = _now(finish)
            if self._writer is not None:
                attempts.run(partial(_begin, mine, prepare, self._writer))
            else:
                mine.wait()
            return self._write(mine, pieces, facts)
        except Exception as error:
            mine.board.give_up(error)
            if self._hosts.is_first:
                raise
            if not isinstance(error, HostFailed | Spoilt):  # of which the first one hears
                said = f"host {self._hosts.own}: its part of the checkpoint of iteration {save.step} was not written"
                print(f"swift: {said}: {first_line(error)}", file=sys.stderr)
            return None

    def _write(self, mine: HostSave, pieces: Callable[[], list[Piece]], facts: Mapping[str, Any]) -> Manifest | None:
        try:
            mine.write(_finite(pieces()))
            if not self._hosts.is_first:
                return None
            manifest, self.bytes_of_hosts = mine.commit(**facts)
            return manifest
        except BaseException:
            if self._hosts.is_first:
                mine.discard()
            raise

    def close(self) -> None:
        """Ends the process that writes, if there is one."""
        if self._writer is not None:
            self._writer.close()


def begin_or_fail(
    split: StateSplit, spec: StepSpec, state: TrainState, chosen_LK: np.ndarray
) -> Callable[[], list[Piece]]:
    """Starts to copy what a checkpoint saves, see ``begin_pieces``; what goes wrong is raised by the function."""
    try:
        if jax.process_count() > 1 and not spec.chunks.are_stages:
            return begin_block_pieces(split, spec, state, chosen_LK)
        return begin_pieces(split, *to_store(spec, state), chosen_LK)
    except (RuntimeError, MemoryError) as error:  # no memory, on the devices or on the host
        return partial(_fail, error)


def _begin(save: HostSave, prepare: Callable[[], None], writer: WriterProcess) -> None:
    prepare()
    save.begin(partial(writer.write, progress=save.board.sign))


def _now(finish: Callable[[], list[Piece]]) -> Callable[[], list[Piece]]:
    """Returns a function that returns or raises what another one does now: what it waits for takes up memory."""
    try:
        pieces = finish()
    except (RuntimeError, MemoryError) as error:  # no memory, on the devices or on the host
        return partial(_fail, error)
    return lambda: pieces


def _finite(pieces: list[Piece]) -> list[Piece]:
    """Returns the pieces; raises Spoilt if a value of the model is not finite."""
    if not all(is_finite(piece.values) for piece in pieces if is_of_model(piece.name)):
        raise Spoilt("its values are not finite")
    return pieces


def _fail(error: Exception) -> NoReturn:
    raise error
